package bpf

import (
	"errors"
	"net/netip"
	"sync"
	"testing"
	"time"

	"tagout/internal/reason"
	"tagout/internal/session"
)

// exchange sends on a connected socket and says whether the echo came back.
func (h *helper) exchange(fd int) bool {
	h.t.Helper()
	if h.call(request{Op: "send", FD: fd, Len: 50}).N != 50 {
		return false
	}
	return h.call(request{Op: "recv", FD: fd}).N == 50
}

// cut sends on a connected socket and says whether no echo came back for a while.
func (h *helper) cut(fd int) bool {
	h.t.Helper()
	h.call(request{Op: "send", FD: fd, Len: 50})
	return h.call(request{Op: "wait", FD: fd, Len: 300}).N == 0
}

// silentSince checks that nothing passed after the given time, at any point that is fed.
func silentSince(t *testing.T, m *Maps, since uint64) {
	t.Helper()
	c, err := m.Counters(tMark)
	must(t, err)
	if c.LastPass == 0 || uint64(c.LastPass) > since { // boot time
		t.Errorf("last packet passed at %v, the stop was at %v", c.LastPass, time.Duration(since)) // boot time
	}
}

// An established connection falls silent with one write, at the kid's sockets.
func TestStopOfAnEstablishedConnection(t *testing.T) {
	for name, c := range map[string]struct {
		stop   func(*Maps) error
		reason reason.Code
	}{
		"session":  {func(m *Maps) error { return m.StopSession(tMark) }, reason.Stopped},
		"all":      {func(m *Maps) error { return m.StopAll(true) }, reason.Stopped},
		"lease":    {func(m *Maps) error { return m.GrantLease(tMark, 1) }, reason.LeaseExpired},
		"no lease": {func(m *Maps) error { return m.remove(tagoutMapLeases, uint32(tMark)) }, reason.LeaseExpired},
		"deleted":  {func(m *Maps) error { return m.remove(tagoutMapSessions, uint32(tMark)) }, reason.UnknownSession},
	} {
		t.Run(name, func(t *testing.T) {
			s, m := installed(t, "tbpf6")
			w := newWorld(t)
			echoTCP(t, at(tName, tPort))
			kid := w.start(t, s.kid)
			events := follow(t, m)
			fd, errno := kid.dial(v4, stream, at(tName, tPort))
			if errno != 0 || !kid.exchange(fd) {
				t.Fatalf("no connection to stop: %v", errno)
			}
			must(t, c.stop(m))
			since := bootNow()
			if !kid.cut(fd) {
				t.Error("the connection works although it is stopped")
			}
			if e := next(t, events); e.Reason != c.reason || e.Hook != HookKidEgress || e.PID != kid.cmd.Process.Pid || e.Dst != at(tName, tPort) {
				t.Errorf("event %+v", e)
			}
			if name == "session" || name == "all" {
				silentSince(t, m, since)
			}
			if counters, err := m.Counters(tMark); err != nil || counters.Kid.DroppedUp.Packets == 0 {
				t.Errorf("dropped packets were not counted: %+v, %v", counters, err)
			}
		})
	}
}

// The link stops what no cgroup hook sees: here a process outside the kid's cgroup sends from the kid's
// namespace, as gVisor does.
func TestStopOnTheLink(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		s, m := installed(t, "tbpf7")
		w := newWorld(t)
		echoTCP(t, at(tName, tPort))
		echoTCP(t, at(tWorld, 443))
		sentry := w.start(t, makeCgroup(t, "tagout.tbpf7/outside"))
		fd, errno := sentry.dial(v4, stream, at(tWorld, 443)) // the control: no program on the link yet
		if errno != 0 || !sentry.exchange(fd) {
			t.Fatalf("without programs on the link nothing comes through: %v", errno)
		}

		must(t, m.AttachLink(w.link))
		if !sentry.cut(fd) {
			t.Error("a link that stands for nobody passes packets")
		}
		must(t, m.PutKid(0, w.link, tMark))
		fd, errno = sentry.dial(v4, stream, at(tName, tPort))
		if errno != 0 || !sentry.exchange(fd) {
			t.Fatalf("an allowed connection does not work: %v", errno)
		}
		events := follow(t, m)
		if _, errno := sentry.dial(v4, stream, at(tWorld, 443)); errno == 0 {
			t.Error("the link let a connection to a raw address through")
		}
		eventually(t, "an event of the link", func() bool {
			e := next(t, events)
			return e.Hook == HookLinkUp && e.Reason == reason.RawAddress && e.IfIndex == w.link && e.Src.Addr() == tKid && e.Dst == at(tWorld, 443)
		})
		must(t, m.StopSession(tMark))
		since := bootNow()
		if !sentry.cut(fd) {
			t.Error("the connection works although it is stopped")
		}
		silentSince(t, m, since)
		if c, err := m.Counters(tMark); err != nil || c.Link.DroppedUp.Packets == 0 {
			t.Errorf("dropped packets were not counted: %+v, %v", c, err)
		}
		must(t, m.DeleteKid(cgroupID(t, s.kid), w.link))
	})
}

// The upstream half: the daemons' sockets are held to the session of their mark.
func TestDaemonMarks(t *testing.T) {
	s, m := installed(t, "tbpf8")
	newWorld(t)
	echoTCP(t, at(tWorld, 443))
	echoTCP(t, at(tGateway, 3128))
	echoTCP(t, at(addr("127.0.0.1"), 9090))
	proxy := startHelper(t, s.daemon)
	dial := func(mark int, to netip.AddrPort) (int, bool) {
		fd := proxy.socket(v4, stream)
		proxy.expect(request{Op: "mark", FD: fd, Len: mark})
		errno := proxy.call(request{Op: "connect", FD: fd, Addr: to}).Errno
		return fd, errno == 0 && proxy.exchange(fd)
	}
	for _, c := range []struct {
		name string
		mark int
		to   netip.AddrPort
		want bool
	}{
		{"no mark to the world", 0, at(tWorld, 443), false},
		{"no mark to the kid net", 0, at(tGateway, 3128), true},
		{"no mark to loopback", 0, at(addr("127.0.0.1"), 9090), true},
		{"box mark", tBoxMark, at(tWorld, 443), true},
		{"unknown mark", tMark + 1, at(tWorld, 443), false},
		{"another instance's box mark", tBoxMark - 1<<20, at(tWorld, 443), false},
	} {
		if _, ok := dial(c.mark, c.to); ok != c.want {
			t.Errorf("%s: %v, want %v", c.name, ok, c.want)
		}
	}
	fd, ok := dial(tMark, at(tWorld, 443))
	if !ok {
		t.Fatal("a session's own mark does not pass")
	}
	box, ok := dial(tBoxMark, at(tWorld, 443))
	if !ok {
		t.Fatal("the box mark does not pass")
	}
	must(t, m.StopSession(tMark))
	since := bootNow()
	if !proxy.cut(fd) {
		t.Error("the upstream connection works although its session is stopped")
	}
	silentSince(t, m, since)
	if c, err := m.Counters(tMark); err != nil || c.Upstream.DroppedUp.Packets == 0 || c.Upstream.PassedDown.Packets == 0 {
		t.Errorf("counted %+v, %v", c.Upstream, err)
	}
	if !proxy.exchange(box) {
		t.Error("the stop of one session cut the daemons' own traffic")
	}
	must(t, m.StopAll(true))
	if _, ok := dial(0, at(tGateway, 3128)); ok {
		t.Error("kid-side connections of the proxy work although everything is stopped")
	}
}

// What the sockets send that carry a secret stops with one write, established connections and new ones; the session's
// other sockets go on, and so do other sessions' secrets.
func TestRevokedSecrets(t *testing.T) {
	s, m := installed(t, "tbpfsec")
	newWorld(t)
	echoTCP(t, at(tWorld, 443))
	const other = tMark + 1
	must(t, m.PutSession(other, SessionEntry{State: StateActive, Addr: tKid.Next()}))
	must(t, m.GrantLease(other, soonOver()))
	proxy := startHelper(t, s.daemon)
	dial := func(mark int) (int, bool) {
		fd := proxy.socket(v4, stream)
		proxy.expect(request{Op: "mark", FD: fd, Len: mark})
		errno := proxy.call(request{Op: "connect", FD: fd, Addr: at(tWorld, 443)}).Errno
		return fd, errno == 0 && proxy.exchange(fd)
	}
	open := map[string]int{}
	for name, mark := range map[string]int{"secret": tMark | session.SecretBit, "plain": tMark, "other": other | session.SecretBit} {
		fd, ok := dial(mark)
		if !ok {
			t.Fatalf("%s: no connection", name)
		}
		open[name] = fd
	}
	on, last, err := m.Secrets(tMark)
	if on || last == 0 || err != nil {
		t.Errorf("before: %v %v %v", on, last, err)
	}
	must(t, m.RevokeSecrets(tMark))
	since := time.Duration(bootNow())
	if !proxy.cut(open["secret"]) {
		t.Error("a secret still passes")
	}
	if on, last, err = m.Secrets(tMark); !on || last == 0 || last > since || err != nil {
		t.Errorf("revoked %v, last packet %v, revoked at %v, %v", on, last, since, err)
	}
	for _, name := range []string{"plain", "other"} {
		if !proxy.exchange(open[name]) {
			t.Errorf("%s was cut too", name)
		}
	}
	if _, ok := dial(tMark | session.SecretBit); ok {
		t.Error("a new socket with a secret passes")
	}
	if _, ok := dial(tMark); !ok {
		t.Error("a new socket without one does not")
	}
	must(t, m.StopSession(other))
	if !proxy.cut(open["other"]) {
		t.Error("a stopped session's secrets pass")
	}
	must(t, m.DeleteSession(tMark))
	if on, _, err := m.Secrets(tMark); on || err != nil {
		t.Errorf("after the session: %v, %v", on, err)
	}
}

// The control of the above: outside the hooked cgroup no mark is looked at.
func TestMarksPassOutsideTheDaemonCgroups(t *testing.T) {
	installed(t, "tbpf9")
	newWorld(t)
	echoTCP(t, at(tWorld, 443))
	free := startHelper(t, makeCgroup(t, "tagout.tbpf9/outside"))
	fd, errno := free.dial(v4, stream, at(tWorld, 443))
	if errno != 0 || !free.exchange(fd) {
		t.Errorf("an unhooked process cannot connect: %v", errno)
	}
}

func TestStopsAreForGood(t *testing.T) {
	_, m := installed(t, "tbpfa")
	active := SessionEntry{State: StateActive, Addr: tKid}

	must(t, m.StopSession(tMark))
	if err := m.PutSession(tMark, active); !errors.Is(err, ErrStopped) {
		t.Errorf("a stopped session was made active: %v", err)
	}
	if e, err := m.Session(tMark); err != nil || e.State != StateStopped {
		t.Errorf("session %+v, %v", e, err)
	}
	renewed(t, m, 1)
	if e, err := m.Session(tMark); err != nil || e.State != StateStopped {
		t.Errorf("after its lease was renewed: %+v, %v", e, err)
	}

	const early = tMark + 1 // stopped before it exists
	must(t, m.StopSession(early))
	if err := m.PutSession(early, active); !errors.Is(err, ErrStopped) {
		t.Errorf("a session that was stopped early was added: %v", err)
	}
	if _, err := m.Session(early); !errors.Is(err, ErrNoSession) {
		t.Errorf("it is there: %v", err)
	}
	renewed(t, m, 1) // and none for the one that is not there

	must(t, m.DeleteSession(tMark))
	must(t, m.DeleteSession(tMark))
	if _, err := m.Counters(tMark); !errors.Is(err, ErrNoSession) {
		t.Errorf("counters of a deleted session: %v", err)
	}
	must(t, m.StopAll(true))
	if on, err := m.StoppedAll(); err != nil || !on {
		t.Errorf("the global flag reads %v, %v", on, err)
	}
}

// A stop must win against whoever writes the session at the same time.
func TestStopAgainstConcurrentWrites(t *testing.T) {
	_, m := installed(t, "tbpfb")
	for range 50 {
		must(t, m.DeleteSession(tMark))
		must(t, m.PutSession(tMark, SessionEntry{State: StateActive, Addr: tKid}))
		var wg sync.WaitGroup
		wg.Go(func() {
			for range 20 {
				_ = m.PutSession(tMark, SessionEntry{State: StateActive, Addr: tKid})
				_, _ = m.RenewLeases(2 * time.Hour)
			}
		})
		must(t, m.StopSession(tMark))
		wg.Wait()
		if e, err := m.Session(tMark); err != nil || e.State != StateStopped {
			t.Fatalf("the stop was undone: %+v, %v", e, err)
		}
	}
}

func TestBadSessions(t *testing.T) {
	_, m := installed(t, "tbpfc")
	for _, c := range []struct {
		mark uint32
		e    SessionEntry
	}{
		{0, SessionEntry{State: StateActive, Addr: tKid}},
		{5, SessionEntry{State: StateActive}},
		{5, SessionEntry{State: StateActive, Addr: addr("::1")}},
	} {
		if m.PutSession(c.mark, c.e) == nil {
			t.Errorf("%+v was taken", c)
		}
	}
	if m.PutKid(1, 1, 0) == nil || m.PutKid(1, -1, 5) == nil {
		t.Error("a kid without a mark or link was taken")
	}
	if m.GrantLease(0, time.Hour) == nil || m.GrantLease(5, -1) == nil {
		t.Error("a lease for nobody, or one before the boot, was taken")
	}
	must(t, m.AllowPort(8, tcp, 80))
	must(t, m.ForgetPorts(tMark))
	var one uint8
	if there, err := m.get(tagoutMapPorts, &tagoutPortKey{Mark: tMark, Proto: tcp, Port: tPort}, &one); err != nil || there {
		t.Errorf("the port is still there: %v", err)
	}
	if there, err := m.get(tagoutMapPorts, &tagoutPortKey{Mark: 8, Proto: tcp, Port: 80}, &one); err != nil || !there {
		t.Errorf("another session's port went too: %v", err)
	}
}
