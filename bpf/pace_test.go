package bpf

import (
	"net/netip"
	"syscall"
	"testing"

	"tagout/internal/reason"
)

// A kid that opens connections faster than it may is refused by the call itself, with an event; its own loopback is its
// own business. Without a bound nothing is refused.
func TestConnectRate(t *testing.T) {
	const perSecond = 10
	s, m := installed(t, "tbpfpace")
	w := newWorld(t)
	must(t, m.AttachLink(w.link))
	must(t, m.PutKid(0, w.link, tMark))
	echoTCP(t, at(tName, tPort))
	kid := w.start(t, s.kid)
	events := follow(t, m)
	own := at(netip.MustParseAddr("127.0.0.1"), 9) // nobody listens there

	opened := func(n int) (ok int) {
		t.Helper()
		for range n {
			switch errno := kid.attempt(v4, stream, false, at(tName, tPort)); errno {
			case 0:
				ok++
			case syscall.EPERM:
			default:
				t.Fatalf("connecting: %v", errno)
			}
		}
		return ok
	}
	if ok := opened(60); ok != 60 {
		t.Errorf("without a bound: %d of 60 connections opened", ok)
	}
	must(t, m.PutSession(tMark, SessionEntry{State: StateActive, Addr: tKid, OpensPerSecond: perSecond}))
	if e, err := m.Session(tMark); err != nil || e.OpensPerSecond != perSecond {
		t.Errorf("session %+v, %v: want the bound kept", e, err)
	}
	began := bootNow()
	ok := opened(60)
	took := float64(bootNow()-began) / 1e9
	if most := 2*perSecond + int(perSecond*took) + 1; ok < 2*perSecond || ok > most || ok == 60 {
		t.Errorf("%d of 60 connections opened in %.2f s, want from %d to %d", ok, took, 2*perSecond, most)
	}
	if e := next(t, events); e.Reason != reason.ConnectRate || e.Hook != HookConnect4 || e.PID != kid.cmd.Process.Pid {
		t.Errorf("event %+v", e)
	}
	for range 3 * perSecond {
		if errno := kid.attempt(v4, stream, false, own); errno != syscall.ECONNREFUSED {
			t.Fatalf("its own loopback: %v, want connection refused", errno)
		}
	}
	if errno := kid.attempt(v4, stream, false, at(tWorld, 443)); errno != syscall.EPERM {
		t.Errorf("a refused destination: %v", errno)
	}
	eventually(t, "one more connection", func() bool { return opened(1) == 1 })
	c, err := m.Counters(tMark)
	must(t, err)
	if n := c.Denied[reason.ConnectRate]; n < uint64(60-ok) {
		t.Errorf("%d denials counted, want at least %d", n, 60-ok)
	}
}
