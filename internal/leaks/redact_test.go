package leaks

import (
	"strings"
	"testing"
)

func TestKeysAreTakenOutOfTexts(t *testing.T) {
	r := NewRedactor("[gone]")
	key := "ghp_" + "x7Kq9ZpL2mWv4RtB8nYc3HdJ6sGf1AeU5oQi"
	for _, s := range []string{"deploy --token " + key, "a " + key + " and " + key, "x=" + key + "&y"} {
		for range 2 {
			got := r.Text(s)
			if strings.Contains(got, key[4:]) || !strings.Contains(got, "[gone]") || got[:2] != s[:2] {
				t.Errorf("%q became %q", s, got)
			}
		}
	}
	if len(r.seen) != 0 {
		t.Errorf("%d texts with keys are remembered", len(r.seen))
	}
	if s := "build number 0a1b2c3d4e"; r.Text(s) != s || !r.seen[s] || r.Text(s) != s {
		t.Errorf("%q is not remembered as clean", s)
	}
	for _, s := range []string{"", "/workspace/src/main.go", "looking up api.vendor.test: no rule names it", "198.19.0.3:43210"} {
		if mayHaveKey(s) || r.Text(s) != s {
			t.Errorf("%q was searched, or became %q", s, r.Text(s))
		}
	}
}

// What the short cut passes over, the rules would not have found either.
func FuzzShortCutOfKeys(f *testing.F) {
	d, err := New()
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{"curl -u joe:pw http://x", "password = 'hunter2hunter'", "-----BEGIN RSA PRIVATE KEY-----", "AKIAIOSFODNN7EXAMPLE", "key: abcdefghijk"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if found := d.Find(s); len(found) > 0 && !mayHaveKey(s) {
			t.Errorf("%q has a %s", s, found[0].Rule)
		}
	})
}

func BenchmarkRedactor(b *testing.B) {
	r := NewRedactor("[gone]")
	for name, s := range map[string]string{
		"name": "api.vendor.test", "path": "/workspace/project/node_modules/react/index.js",
		"arguments": `/bin/sh -c "cd /workspace && npm install --save react && ./build.sh --out dist/token"`,
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				r.Text(s)
			}
		})
	}
}
