package authority

import (
	"strings"
	"testing"
)

// TestKeys makes many keys: the base64 of some holds a +, which also parts a key's fields.
func TestKeys(t *testing.T) {
	t.Parallel()
	plus := 0
	last := ""
	for range 64 {
		private, public, err := NewKey("Ada + Operator")
		if err != nil {
			t.Fatal(err)
		}
		if got, err := Public(private); err != nil || got != public {
			t.Fatalf("the public key of a private one is %q, %v, want %q", got, err, public)
		}
		if err := CheckKey(public, "Ada + Operator"); err != nil {
			t.Fatal(err)
		}
		if err := CheckKey(public, "Bob"); err == nil {
			t.Fatal("a key made for Ada is taken as Bob's")
		}
		if err := CheckKey(private, "Ada + Operator"); err == nil || !strings.Contains(err.Error(), "private key") {
			t.Fatalf("a private key: %v", err)
		}
		other := "Bob" + public[strings.Index(public, "+"):]
		if !SameKey(public, other) || SameKey(public, last) || SameKey("", "") {
			t.Fatalf("%q and %q", public, other)
		}
		if strings.Count(public, "+") > 2 {
			plus++
		}
		last = public
	}
	if plus == 0 {
		t.Error("no key had a + in its base64: the test has proved little")
	}
	if _, _, err := NewKey("Ada\x1b[31m"); err == nil {
		t.Error("a name with control characters got a key")
	}
}
