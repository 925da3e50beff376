package config

import (
	"strings"
	"testing"
	"time"
)

func TestTokensLifetime(t *testing.T) {
	const head = "apiVersion: tagout/v1\nkind: Box\nresolvers: [\"192.0.2.53:53\"]\n"
	for text, want := range map[string]time.Duration{"": 0, "tokens: {lifetime: 90s}\n": 90 * time.Second, "tokens: {lifetime: 720h}\n": 720 * time.Hour} {
		b, err := Parse("box.yaml", []byte(head+text))
		if err != nil || b.TokenLifetime != want {
			t.Fatalf("%q: %v %v", text, b, err)
		}
		raw, err := b.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if again, err := Parse("box.yaml", raw); err != nil || again.TokenLifetime != want {
			t.Errorf("%q came back as %q: %v", text, raw, err)
		}
	}
	for _, bad := range []string{"0s", "999ms", "721h", "-1h", "forever", "3600"} {
		if _, err := Parse("box.yaml", []byte(head+"tokens: {lifetime: "+bad+"}\n")); err == nil || !strings.Contains(err.Error(), "box.yaml:4:") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
