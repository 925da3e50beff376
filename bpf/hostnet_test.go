package bpf

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/reason"
)

const (
	openPort = 8443 // of the machine's loopback, in the kid's reach
	shutPort = 8444 // beside it
)

// onHost is a session whose kid lives in the box's own network namespace, with two servers on its loopback.
func onHost(t *testing.T, name string) (*Maps, *helper) {
	t.Helper()
	s, m := installed(t, name)
	newWorld(t)
	must(t, m.PutSession(tMark, SessionEntry{State: StateActive, Addr: tKid, HostNetwork: true}))
	for _, port := range []uint16{openPort, shutPort} {
		echoTCP(t, at(addr("127.0.0.1"), port))
		echoTCP(t, at(addr("::1"), port))
	}
	echoTCP(t, at(tWorld, tPort))
	return m, startHelper(t, s.kid)
}

func reach(t *testing.T, m *Maps, ranges ...string) {
	t.Helper()
	for _, r := range ranges {
		for _, port := range []uint16{openPort, tPort, 80} {
			must(t, m.AllowReach(tMark, netip.MustParsePrefix(r), port))
		}
	}
}

// On the machine's network nothing is the kid's own: neither loopback, nor its address, nor the machine's ports.
func TestHostNetwork(t *testing.T) {
	m, kid := onHost(t, "tbpf20")
	reach(t, m, "127.0.0.1/32", "169.254.0.0/16", "198.18.0.0/15", "203.0.113.128/25")
	events := follow(t, m)
	for _, c := range []struct {
		name        string
		domain, typ int
		to          netip.AddrPort
		want        reason.Code
		hook        Hook
	}{
		{"another port of loopback", v4, stream, at(addr("127.0.0.1"), shutPort), reason.NotInReach, HookConnect4},
		{"another address of loopback", v4, stream, at(addr("127.0.0.2"), openPort), reason.NotInReach, HookConnect4},
		{"this host", v4, stream, at(addr("0.0.0.0"), shutPort), reason.NotInReach, HookConnect4},
		{"v4-mapped", v6, stream, at(mapped(addr("127.0.0.1")), shutPort), reason.NotInReach, HookConnect6},
		{"IPv6's loopback", v6, stream, at(addr("::1"), openPort), reason.IPv6, HookConnect6},
		{"outside the range", v4, stream, at(addr("203.0.113.127"), tPort), reason.NotInReach, HookConnect4},
		{"metadata in the range", v4, stream, at(addr("169.254.169.254"), 80), reason.Metadata, HookConnect4},
		{"the gateway in the range", v4, stream, at(tGateway, 3128), reason.HostAddress, HookConnect4},
		{"a virtual address in the range", v4, stream, at(tName, tPort), reason.HostAddress, HookConnect4},
		{"another kid in the range", v4, stream, at(tKid, tPort), reason.HostAddress, HookConnect4},
	} {
		if errno := kid.attempt(c.domain, c.typ, false, c.to); errno != unix.EPERM {
			t.Errorf("%s: %v, want EPERM", c.name, errno)
		}
		if e := next(t, events); e.Reason != c.want || e.Hook != c.hook {
			t.Errorf("%s: event %v at %v, want %v at %v", c.name, e.Reason, e.Hook, c.want, c.hook)
		}
	}
	if a := kid.call(request{Op: "socket", Domain: v4, Type: dgram}); a.Errno != unix.EPERM {
		t.Errorf("a UDP socket: %v, want EPERM", a.Errno)
	}
	if e := next(t, events); e.Reason != reason.UDPNotAllowed || e.Hook != HookSocket {
		t.Errorf("a UDP socket: %+v", e)
	}
	for name, c := range map[string]struct {
		domain int
		to     netip.AddrPort
		hook   Hook
	}{
		"a port": {v4, at(netip.IPv4Unspecified(), 41005), HookBind4}, "any port": {v4, at(addr("127.0.0.1"), 0), HookBind4},
		"a port of IPv6": {v6, at(netip.IPv6Unspecified(), 41005), HookBind6},
	} {
		fd := kid.socket(c.domain, stream)
		if a := kid.call(request{Op: "bind", FD: fd, Addr: c.to}); a.Errno != unix.EPERM {
			t.Errorf("binding %s: %v, want EPERM", name, a.Errno)
		}
		if e := next(t, events); e.Reason != reason.HostPort || e.Hook != c.hook || e.Dst != c.to {
			t.Errorf("binding %s: %+v", name, e)
		}
	}
	for _, to := range []netip.AddrPort{at(addr("127.0.0.1"), openPort), at(tWorld, tPort)} {
		fd, errno := kid.dial(v4, stream, to)
		if errno != 0 || !kid.exchange(fd) {
			t.Errorf("in the card's reach: %v: %v", to, errno)
		}
		if a := kid.call(request{Op: "marked", FD: fd}); a.N != tMark {
			t.Errorf("the mark of its socket is %#x, %v: a stop would not find it", a.N, a.Errno)
		}
	}
}

// Nobody gets in, not even to a port that listen(2) took without a name.
func TestNothingServesOnTheHostNetwork(t *testing.T) {
	m, kid := onHost(t, "tbpf21")
	reach(t, m, "127.0.0.0/8")
	fd := kid.socket(v4, stream)
	kid.expect(request{Op: "listen", FD: fd})
	where := kid.expect(request{Op: "name", FD: fd}).Addr
	must(t, m.AllowReach(tMark, netip.MustParsePrefix("127.0.0.0/8"), where.Port()))
	outside := startHelper(t, makeCgroup(t, "tagout.tbpf21/outside"))
	if _, errno := outside.dial(v4, stream, at(addr("127.0.0.1"), where.Port())); errno == 0 {
		t.Error("a connection from outside got into the kid")
	}
}

// The control of both: the same calls of a kid that has a network of its own are let through, or refused for other reasons.
func TestWithoutTheFlagLoopbackIsTheKids(t *testing.T) {
	m, kid := onHost(t, "tbpf22")
	must(t, m.PutSession(tMark, SessionEntry{State: StateActive, Addr: tKid}))
	fd, errno := kid.dial(v4, stream, at(addr("127.0.0.1"), shutPort))
	if errno != 0 || !kid.exchange(fd) {
		t.Errorf("its loopback: %v", errno)
	}
	if a := kid.call(request{Op: "marked", FD: fd}); a.N != 0 {
		t.Errorf("its socket is marked %#x", a.N)
	}
	kid.expect(request{Op: "bind", FD: kid.socket(v4, stream), Addr: at(addr("127.0.0.1"), 41006)})
	kid.socket(v4, dgram)
}

// A stop falls on an established connection there as anywhere, and forgetting takes the reach away.
func TestStopOnTheHostNetwork(t *testing.T) {
	m, kid := onHost(t, "tbpf23")
	reach(t, m, "127.0.0.1/32")
	fd, errno := kid.dial(v4, stream, at(addr("127.0.0.1"), openPort))
	if errno != 0 || !kid.exchange(fd) {
		t.Fatalf("no connection to stop: %v", errno)
	}
	must(t, m.ForgetReach(tMark))
	if !kid.cut(fd) {
		t.Error("a connection outside of the reach goes on")
	}
	reach(t, m, "127.0.0.1/32")
	fd, errno = kid.dial(v4, stream, at(addr("127.0.0.1"), openPort))
	if errno != 0 || !kid.exchange(fd) {
		t.Fatalf("no connection to stop: %v", errno)
	}
	must(t, m.StopSession(tMark))
	since := bootNow()
	if !kid.cut(fd) {
		t.Error("a stopped kid's connection goes on")
	}
	silentSince(t, m, since)
	if e, err := m.Session(tMark); err != nil || !e.HostNetwork || e.State != StateStopped {
		t.Errorf("after the stop: %+v, %v", e, err)
	}
	must(t, m.Sweep(func(uint32) bool { return false }))
	var key tagoutReachKey
	var one uint8
	if it := m.maps[tagoutMapReach].Iterate(); it.Next(&key, &one) {
		t.Errorf("a sweep leaves %+v", key)
	}
}
