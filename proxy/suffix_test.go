package proxy

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// TestNamesUnderAnotherPublicSuffixAreRefused: a pattern above public suffixes, as a session of an older Tagout may have,
// opens no name that anybody can have: by way of the explicit proxy it is refused before anything is asked for. The
// owner's own name passes under the same rule.
func TestNamesUnderAnotherPublicSuffixAreRefused(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Names = claims{c.Names.(*fakeNames), func(context.Context, uint32, string) error { return nil }}
	})
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule("**.amazonaws.com", at.Port(), policy.TCP))
	for _, name := range []string{"evil.s3.amazonaws.com", "ec2.amazonaws.com"} {
		w.dns.set(name, serverAddr)
	}
	before := w.dns.asked.Load()
	for _, name := range []string{"evil.s3.amazonaws.com", "Evil.S3.amazonaws.com."} {
		c, head := w.connect(fmt.Sprintf("%s:%d", name, at.Port()))
		c.Close()
		if !strings.Contains(head, " 403 ") {
			t.Errorf("%s: %s", name, head)
		}
	}
	if rec := w.wantRefused(reason.PublicSuffix); !strings.Contains(rec.Detail, "s3.amazonaws.com") {
		t.Errorf("the record says %q", rec.Detail)
	}
	if n := w.dns.asked.Load() - before; n != 0 {
		t.Errorf("%d queries were sent", n)
	}
	c, head := w.connect(fmt.Sprintf("ec2.amazonaws.com:%d", at.Port()))
	defer c.Close()
	if !strings.Contains(head, " 200 ") {
		t.Errorf("the owner's own name: %s", head)
	}
}
