package bpf

import (
	"context"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/reason"
)

const (
	v4     = unix.AF_INET
	v6     = unix.AF_INET6
	stream = unix.SOCK_STREAM
	dgram  = unix.SOCK_DGRAM
)

func mapped(a netip.Addr) netip.Addr { return netip.AddrFrom16(a.As16()) }

// follow collects events until the test ends.
func follow(t testing.TB, m *Maps) <-chan Event {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out := make(chan Event, 4096)
	done := make(chan error, 1)
	go func() { done <- m.Events(ctx, func(e Event) { out <- e }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("reading events: %v", err)
		}
	})
	return out
}

func next(t testing.TB, events <-chan Event) Event {
	t.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(5 * time.Second):
		t.Fatal("no event came")
		return Event{}
	}
}

// kidCalls are calls that a kid makes, with the reason for which each is refused.
var kidCalls = []struct {
	name        string
	domain, typ int
	send        bool // sendto instead of connect
	to          netip.AddrPort
	want        reason.Code
	hook        Hook
}{
	{"raw address", v4, stream, false, at(tWorld, 443), reason.RawAddress, HookConnect4},
	{"other port", v4, stream, false, at(tName, 25), reason.PortNotAllowed, HookConnect4},
	{"transparent port", v4, stream, false, at(tGateway, 3129), reason.HostAddress, HookConnect4},
	{"metadata", v4, stream, false, at(addr("169.254.169.254"), 80), reason.Metadata, HookConnect4},
	{"dot", v4, stream, false, at(tWorld, 853), reason.DoT, HookConnect4},
	{"dns, connected", v4, dgram, false, at(tWorld, 53), reason.DNSBypass, HookConnect4},
	{"dns, sent", v4, dgram, true, at(tWorld, 53), reason.DNSBypass, HookSendmsg4},
	{"quic, sent", v4, dgram, true, at(tWorld, 443), reason.QUIC, HookSendmsg4},
	{"udp, sent", v4, dgram, true, at(tWorld, 9), reason.UDPNotAllowed, HookSendmsg4},
	{"multicast", v4, dgram, true, at(addr("239.1.1.1"), 9), reason.Multicast, HookSendmsg4},
	{"ipv6", v6, stream, false, at(addr("2001:db8::1"), 443), reason.IPv6, HookConnect6},
	{"ipv6, sent", v6, dgram, true, at(addr("2001:db8::1"), 53), reason.IPv6, HookSendmsg6},
	{"metadata v6", v6, stream, false, at(addr("fd00:ec2::254"), 80), reason.Metadata, HookConnect6},
	{"v4-mapped raw address", v6, stream, false, at(mapped(tWorld), 443), reason.RawAddress, HookConnect6},
	{"v4-mapped metadata", v6, stream, false, at(mapped(addr("169.254.169.254")), 80), reason.Metadata, HookConnect6},
	{"v4-mapped dns, sent", v6, dgram, true, at(mapped(tWorld), 53), reason.DNSBypass, HookSendmsg4},
}

func (h *helper) attempt(domain, typ int, send bool, to netip.AddrPort) syscall.Errno {
	h.t.Helper()
	if !send {
		fd, errno := h.dial(domain, typ, to)
		h.call(request{Op: "close", FD: fd})
		return errno
	}
	fd := h.socket(domain, typ)
	errno := h.call(request{Op: "sendto", FD: fd, Addr: to, Len: 10}).Errno
	h.call(request{Op: "close", FD: fd})
	return errno
}

func TestRefusedCalls(t *testing.T) {
	s, m := installed(t, "tbpf1")
	w := newWorld(t)
	kid := w.start(t, s.kid)
	events := follow(t, m)
	for i, c := range kidCalls {
		start := time.Now()
		if errno := kid.attempt(c.domain, c.typ, c.send, c.to); errno != unix.EPERM {
			t.Errorf("%s: %v, want EPERM", c.name, errno)
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("%s: refused after %v, want at once", c.name, took)
		}
		e := next(t, events)
		want := at(c.to.Addr().Unmap(), c.to.Port())
		if e.Reason != c.want || e.Hook != c.hook || e.Dst != want {
			t.Errorf("%s: event %v at %v to %v, want %v at %v to %v", c.name, e.Reason, e.Hook, e.Dst, c.want, c.hook, want)
		}
		if e.PID != kid.cmd.Process.Pid || e.Comm != "exe" || e.UID != 0 || e.Mark != tMark || e.CgroupID != cgroupID(t, s.kid) {
			t.Errorf("%s: event names pid %d comm %q uid %d mark %#x cgroup %d", c.name, e.PID, e.Comm, e.UID, e.Mark, e.CgroupID)
		}
		if e.Boot <= 0 || uint64(e.Boot) > bootNow() {
			t.Errorf("%s: event at boot time %v", c.name, e.Boot)
		}
		if got, err := m.Counters(tMark); err != nil || got.Refused != uint64(i+1) {
			t.Errorf("%s: %d calls counted (%v), want %d", c.name, got.Refused, err, i+1)
		}
	}
}

// The control: with the programs off, the very same calls get out. Without it the test above would prove nothing.
func TestCallsSucceedWithoutPrograms(t *testing.T) {
	s, _ := installed(t, "tbpf2")
	w := newWorld(t)
	echoTCP(t, at(tWorld, 443))
	echoTCP(t, at(addr("2001:db8::1"), 443))
	echoUDP(t, at(tWorld, 53))
	kid := w.start(t, s.kid)
	calls := func(want syscall.Errno) {
		t.Helper()
		for _, c := range []struct {
			domain, typ int
			send        bool
			to          netip.AddrPort
		}{
			{v4, stream, false, at(tWorld, 443)}, {v6, stream, false, at(mapped(tWorld), 443)},
			{v6, stream, false, at(addr("2001:db8::1"), 443)}, {v4, dgram, true, at(tWorld, 53)},
			{v4, dgram, false, at(tWorld, 53)}, {v6, dgram, true, at(mapped(tWorld), 53)},
		} {
			if errno := kid.attempt(c.domain, c.typ, c.send, c.to); errno != want {
				t.Errorf("%+v: %v, want %v", c, errno, want)
			}
		}
		if a := kid.call(request{Op: "socket", Domain: v4, Type: unix.SOCK_RAW, Proto: icmp}); a.Errno != want {
			t.Errorf("raw socket: %v, want %v", a.Errno, want)
		}
	}
	calls(unix.EPERM)
	must(t, Uninstall(s.cfg.PinDir, s.cfg.KidsCgroup, s.cfg.DaemonCgroups))
	calls(0)
	must(t, Install(s.cfg))
	if _, errno := kid.dialLate(); errno != unix.EPERM { // unknown now
		t.Errorf("a call after a fresh installation: %v, want EPERM", errno)
	}
}

func TestSocketTypes(t *testing.T) {
	s, m := installed(t, "tbpf3")
	kid := startHelper(t, s.kid)
	events := follow(t, m)
	for _, c := range []struct {
		name               string
		domain, typ, proto int
		allowed            bool
		recorded           uint8
	}{
		{"tcp", v4, stream, 0, true, 0}, {"udp", v4, dgram, 0, true, 0},
		{"tcp6", v6, stream, tcp, true, 0}, {"udp6", v6, dgram, udp, true, 0},
		{"raw icmp", v4, unix.SOCK_RAW, icmp, false, icmp}, {"raw", v4, unix.SOCK_RAW, unix.IPPROTO_RAW, false, 255},
		{"raw6", v6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6, false, unix.IPPROTO_ICMPV6},
		{"raw tcp", v4, unix.SOCK_RAW, tcp, false, tcp},
		{"udplite", v4, dgram, unix.IPPROTO_UDPLITE, false, unix.IPPROTO_UDPLITE},
		{"mptcp", v4, stream, unix.IPPROTO_MPTCP, false, 255},
	} {
		a := kid.call(request{Op: "socket", Domain: c.domain, Type: c.typ, Proto: c.proto})
		if a.Errno == unix.EPROTONOSUPPORT || a.Errno == unix.ESOCKTNOSUPPORT {
			t.Logf("%s: this kernel has none", c.name)
			continue
		}
		if c.allowed != (a.Errno == 0) || (!c.allowed && a.Errno != unix.EPERM) {
			t.Errorf("%s: %v", c.name, a.Errno)
		}
		if c.allowed {
			continue
		}
		if e := next(t, events); e.Reason != reason.RawSocket || e.Hook != HookSocket || e.Proto != c.recorded || e.PID != kid.cmd.Process.Pid {
			t.Errorf("%s: event %+v", c.name, e)
		}
	}
}

// What a kid may do works, through every hook and the link, and says who did it.
func TestAllowedTrafficAndAttribution(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		s, m := installed(t, "tbpf4")
		w := newWorld(t)
		must(t, m.AttachLink(w.link))
		must(t, m.PutKid(0, w.link, tMark))
		echoTCP(t, at(tName, tPort))
		from := echoUDP(t, at(tGateway, 53))
		kid := w.start(t, s.kid)
		events := follow(t, m)

		for _, domain := range []int{v4, v6} {
			to, dns, any4 := at(tName, tPort), at(tGateway, 53), at(netip.IPv4Unspecified(), 41000)
			if domain == v6 {
				to, dns, any4 = at(mapped(tName), tPort), at(mapped(tGateway), 53), at(netip.IPv6Unspecified(), 41001)
			}
			fd := kid.socket(domain, stream)
			kid.call(request{Op: "bind", FD: fd, Addr: any4}) // a port chosen by the kid itself
			kid.expect(request{Op: "connect", FD: fd, Addr: to})
			kid.expect(request{Op: "send", FD: fd, Len: 100})
			if a := kid.call(request{Op: "recv", FD: fd}); a.N != 100 {
				t.Errorf("echo came back with %d bytes, %v", a.N, a.Errno)
			}
			checkProcess(t, m, kid, at(tKid, any4.Port()), tcp)

			for _, connected := range []bool{true, false} {
				fd := kid.socket(domain, dgram)
				if connected {
					kid.expect(request{Op: "connect", FD: fd, Addr: dns})
					kid.expect(request{Op: "send", FD: fd, Len: 30})
				} else {
					kid.expect(request{Op: "sendto", FD: fd, Addr: dns, Len: 30})
				}
				if a := kid.call(request{Op: "recv", FD: fd}); a.N != 30 {
					t.Errorf("dns answer of %d bytes, %v", a.N, a.Errno)
				}
				checkProcess(t, m, kid, <-from, udp)
			}
		}
		c, err := m.Counters(tMark)
		must(t, err)
		for name, tr := range map[string]Traffic{"kid": c.Kid, "link": c.Link} {
			if tr.PassedUp.Packets < 10 || tr.PassedDown.Packets < 8 || tr.PassedUp.Bytes < 200+4*(30+28) || tr.LastPass == 0 {
				t.Errorf("%s counted %+v", name, tr)
			}
		}
		if _, ok := m.Process(at(tKid, 1), tcp); ok {
			t.Error("a port that nobody used has a process")
		}
		for len(events) > 0 {
			if e := <-events; e.Family == v4 {
				t.Errorf("allowed traffic made an event: %+v", e)
			}
		}
	})
}

func (h *helper) expect(r request) answer {
	h.t.Helper()
	a := h.call(r)
	if a.Errno != 0 {
		h.t.Fatalf("%+v: %v", r, a.Errno)
	}
	return a
}

func checkProcess(t *testing.T, m *Maps, h *helper, from netip.AddrPort, proto uint8) {
	t.Helper()
	p, ok := m.Process(from, proto)
	if !ok || p.PID != h.cmd.Process.Pid || p.Comm != "exe" {
		t.Errorf("%v/%d belongs to %+v (%v), want pid %d", from, proto, p, ok, h.cmd.Process.Pid)
	}
}

// A kid's own loopback works while its session is active, and only then; nobody gets in from outside.
func TestLoopbackAndInbound(t *testing.T) {
	s, m := installed(t, "tbpf5")
	w := newWorld(t)
	kid := w.start(t, s.kid)
	other := w.start(t, s.kid)
	for _, c := range []struct {
		domain   int
		bind, to netip.Addr
	}{
		{v4, addr("127.0.0.1"), addr("127.0.0.1")}, {v6, addr("::1"), addr("::1")}, {v4, addr("0.0.0.0"), tKid},
		{v4, addr("0.0.0.0"), addr("0.0.0.0")}, {v6, addr("::"), addr("::")}, {v6, addr("::"), mapped(addr("127.0.0.1"))},
	} {
		ln := kid.socket(c.domain, stream)
		kid.expect(request{Op: "bind", FD: ln, Addr: at(c.bind, 8080)})
		kid.expect(request{Op: "listen", FD: ln})
		fd, errno := other.dial(c.domain, stream, at(c.to, 8080))
		if errno != 0 {
			t.Errorf("connecting to %v: %v", c.to, errno)
		}
		if a := kid.call(request{Op: "accept", FD: ln}); a.Errno != 0 {
			t.Errorf("accepting from %v: %v", c.to, a.Errno)
		}
		other.call(request{Op: "close", FD: fd})
		kid.call(request{Op: "close", FD: ln})
	}

	ln := kid.socket(v4, stream)
	kid.expect(request{Op: "bind", FD: ln, Addr: at(netip.IPv4Unspecified(), 8081)})
	kid.expect(request{Op: "listen", FD: ln})
	before, err := m.Counters(tMark)
	must(t, err)
	outside := startHelper(t, makeCgroup(t, "tagout.tbpf5/outside")) // in the box's namespace
	if _, errno := outside.dial(v4, stream, at(tKid, 8081)); errno == 0 {
		t.Error("a connection from outside got into the kid")
	}
	after, err := m.Counters(tMark)
	must(t, err)
	if after.Kid.DroppedDown.Packets == before.Kid.DroppedDown.Packets {
		t.Error("the dropped packets from outside were not counted")
	}

	must(t, m.StopSession(tMark))
	if _, errno := kid.dialLate(); errno != unix.EPERM {
		t.Errorf("a stopped kid's call: %v, want EPERM", errno)
	}
}

// dialLate makes a socket call that is refused before anything is sent.
func (h *helper) dialLate() (int, syscall.Errno) {
	a := h.call(request{Op: "socket", Domain: v4, Type: stream})
	return a.N, a.Errno
}
