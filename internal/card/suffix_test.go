package card

import (
	"strings"
	"testing"
)

// TestPatternsAboveASuffix: what is refused, at which place, and what to write.
func TestPatternsAboveASuffix(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ host, under string }{
		{"**.amazonaws.com", "s3.amazonaws.com"},
		{"*.amazonaws.com", "s3.amazonaws.com"},
		{"**.windows.net", "web.core.windows.net"},
		{"*.windows.net", "servicebus.windows.net"},
		{"*.core.windows.net", "web.core.windows.net"},
		{"**.Compute.AmazonAWS.com.", "*.compute.amazonaws.com"},
		{"*.compute.amazonaws.com", "*.compute.amazonaws.com"},
		{"**.nom.br", "*.nom.br"},
	} {
		_, err := ParseAt("x.yaml", []byte(allowing(`{host: "`+c.host+`", ports: [443], protocol: tls}`)), testNow)
		if err == nil {
			t.Errorf("%s loads", c.host)
			continue
		}
		for _, want := range []string{"x.yaml:7:", "everybody's names", c.under, "without stars"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v: no %q in it", c.host, err, want)
			}
		}
	}
	// One owner each: the stars stay short of the suffix, or there is none.
	for _, host := range []string{"*.vault.windows.net", "**.vendor.com", "mine.s3.amazonaws.com", "**.mine.s3.amazonaws.com", "*.ec2.amazonaws.com"} {
		if _, err := ParseAt("x.yaml", []byte(allowing(`{host: "`+host+`", ports: [443], protocol: tls}`)), testNow); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
}
