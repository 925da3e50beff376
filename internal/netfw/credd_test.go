package netfw

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
	"tagout/internal/testroot"
)

// as has what a namespace's thread opens belong to uid (the owner match reads the fsuid of who made a socket).
func (s *space) as(uid int, fn func()) {
	s.t.Helper()
	set := func(uid int) {
		s.do(func() error {
			unix.RawSyscall(unix.SYS_SETFSUID, uintptr(uid), 0, 0) // it returns the one before, and no error
			return nil
		})
	}
	set(uid)
	defer set(0)
	fn()
}

// TestCreddCallsItsProvidersOnly: what credd may call is answered, all else is not, and TCP is told so at once, loopback included; others
// are not touched. The control is the moment before the rules are there.
func TestCreddCallsItsProvidersOnly(t *testing.T) {
	testroot.Require(t)
	i := inst(t, "tfwc", 6)
	box, out := newSpace(t), newSpace(t)
	link(t, box, "wan", []string{"203.0.113.1/24"}, out, "eth0", []string{"203.0.113.9/24", "203.0.113.8/24"})
	for _, at := range []string{"203.0.113.9:8200", "203.0.113.8:8200", "203.0.113.9:443", "203.0.113.9:53"} {
		out.serve("tcp", at, at)
	}
	out.serve("udp", "203.0.113.9:53", "dns")
	out.serve("udp", "203.0.113.9:9999", "leak")
	box.serve("tcp", "127.0.0.1:9103", "box")
	bao := netip.MustParseAddr("203.0.113.9")
	calls := []Call{{To: bao, Port: 8200}, {To: bao, Port: 53}, {To: bao, Port: 53, UDP: true}}
	look := func(uid int) map[string]string {
		got := map[string]string{}
		box.as(uid, func() {
			for _, at := range []string{"tcp 203.0.113.9:8200", "tcp 203.0.113.8:8200", "tcp 203.0.113.9:443", "udp 203.0.113.9:53", "udp 203.0.113.9:9999", "tcp 127.0.0.1:9103"} {
				got[at] = reach(box, at[:3], at[4:])
			}
		})
		return got
	}
	open := map[string]string{"tcp 203.0.113.9:8200": "203.0.113.9:8200", "tcp 203.0.113.8:8200": "203.0.113.8:8200", "tcp 203.0.113.9:443": "203.0.113.9:443",
		"udp 203.0.113.9:53": "dns", "udp 203.0.113.9:9999": "leak", "tcp 127.0.0.1:9103": "box"}
	same := func(what string, got, want map[string]string) {
		t.Helper()
		for at, who := range want {
			if got[at] != who && (who != "unanswered" || got[at] != "refused" && got[at] != "silent") {
				t.Errorf("%s: %s answers %q, want %q", what, at, got[at], who)
			}
		}
	}
	credd := i.UID(instance.Credd)
	reach(box, "tcp", "203.0.113.9:8200") // the neighbours find each other
	reach(box, "tcp", "203.0.113.8:8200")
	same("without rules", look(credd), open)
	box.do(func() error { return Ensure(i, calls...) })
	box.do(func() error {
		if ok, err := Check(i, calls...); err != nil || !ok {
			t.Errorf("the rules do not read back as they were written: %v", err)
		}
		return nil
	})
	same("credd", look(credd), map[string]string{"tcp 203.0.113.9:8200": "203.0.113.9:8200", "tcp 203.0.113.8:8200": "refused", "tcp 203.0.113.9:443": "refused",
		"udp 203.0.113.9:53": "dns", "udp 203.0.113.9:9999": "unanswered", "tcp 127.0.0.1:9103": "refused"})
	same("somebody else", look(0), open)
	box.do(func() error { return Ensure(i) })
	same("a box without providers", look(credd), map[string]string{"tcp 203.0.113.9:8200": "refused", "udp 203.0.113.9:53": "unanswered"})
}
