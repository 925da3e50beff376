package policy

import (
	"net/netip"
	"testing"
)

// TestCheckCall: what no rule may grant is called for nobody, in any disguise (invariant 2).
func TestCheckCall(t *testing.T) {
	for addr, want := range map[string]struct{ anybody, private bool }{
		"203.0.113.9": {true, true}, "2a00:1450::1": {true, true}, "8.8.8.8": {true, true},
		"127.0.0.1": {false, true}, "10.1.2.3": {false, true}, "::1": {false, true}, "::ffff:10.1.2.3": {false, true}, "fd00::1": {false, true},
		"169.254.169.254": {}, "::ffff:169.254.169.254": {}, "64:ff9b::a9fe:a9fe": {}, "fd00:ec2::254": {}, "100.100.100.200": {},
		"169.254.1.1": {}, "0.0.0.0": {}, "::": {}, "224.0.0.1": {}, "198.19.0.1": {}, "64:ff9b::a01:203": {}, "fe80::1": {},
	} {
		a := netip.MustParseAddr(addr)
		if got := CheckCall(a, false) == nil; got != want.anybody {
			t.Errorf("%s for anybody: called %v, want %v", addr, got, want.anybody)
		}
		if got := CheckCall(a, true) == nil; got != want.private {
			t.Errorf("%s for who may call private ones: called %v, want %v", addr, got, want.private)
		}
	}
}
