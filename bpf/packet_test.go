package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"tagout/internal/reason"
	"tagout/internal/testroot"
)

// packet is a frame to be crafted.
type packet struct {
	src, dst     netip.Addr
	proto        uint8
	sport, dport uint16
	flags        uint8  // TCP
	frag         uint16 // fragment field
	options      bool   // IP options
	cut          int    // bytes taken off the end
	etherType    uint16 // instead of what the addresses say
}

const (
	tcp  = unix.IPPROTO_TCP
	udp  = unix.IPPROTO_UDP
	icmp = unix.IPPROTO_ICMP
	syn  = 0x02
	ack  = 0x10
)

func (p packet) bytes() []byte {
	l4 := make([]byte, 20)
	binary.BigEndian.PutUint16(l4, p.sport)
	binary.BigEndian.PutUint16(l4[2:], p.dport)
	l4[12], l4[13] = 5<<4, p.flags
	frame := make([]byte, 14)
	if p.dst.Is4() {
		ip := make([]byte, 20)
		ip[0] = 0x45
		if p.options {
			ip = append(ip, 1, 1, 1, 0)
			ip[0] = 0x46
		}
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(l4)))
		binary.BigEndian.PutUint16(ip[6:], p.frag)
		ip[8], ip[9] = 64, p.proto
		copy(ip[12:], p.src.AsSlice())
		copy(ip[16:], p.dst.AsSlice())
		binary.BigEndian.PutUint16(frame[12:], 0x0800)
		frame = append(frame, ip...)
	} else {
		ip := make([]byte, 40)
		ip[0] = 6 << 4
		binary.BigEndian.PutUint16(ip[4:], uint16(len(l4)))
		ip[6], ip[7] = p.proto, 64
		copy(ip[8:], p.src.AsSlice())
		copy(ip[24:], p.dst.AsSlice())
		binary.BigEndian.PutUint16(frame[12:], 0x86dd)
		frame = append(frame, ip...)
	}
	if p.etherType != 0 {
		binary.BigEndian.PutUint16(frame[12:], p.etherType)
	}
	frame = append(frame, l4...)
	return frame[:len(frame)-p.cut]
}

func (p packet) String() string {
	return fmt.Sprintf("%v:%d > %v:%d proto %d flags %#x frag %#x options %v cut %d type %#x",
		p.src, p.sport, p.dst, p.dport, p.proto, p.flags, p.frag, p.options, p.cut, p.etherType)
}

// bench runs single programs on crafted packets, attached to nothing. Its kid is whoever runs the test (the
// root cgroup) and the link is the loopback link.
type bench struct {
	coll *ebpf.Collection
	maps *Maps
}

const rootCgroup = 1 // the id of the v2 hierarchy's root

func newBench(t testing.TB, change func(*constants)) *bench {
	t.Helper()
	testroot.Require(t)
	c := constants{
		gateway: netip.PrefixFrom(tGateway, 32), kidNet: tKidNet, virtual: tVirtual, boxMark: tBoxMark,
		kidLevel: 0, budget: 1 << 30,
	}
	if change != nil {
		change(&c)
	}
	coll, err := load(c, nil)
	must(t, err)
	t.Cleanup(coll.Close)
	must(t, seed(coll, c))
	b := &bench{coll: coll, maps: &Maps{maps: coll.Maps}}
	must(t, b.maps.PutSession(tMark, SessionEntry{State: StateActive, Addr: tKid}))
	must(t, b.maps.GrantLease(tMark, soonOver()))
	must(t, b.maps.PutKid(rootCgroup, 1, tMark))
	must(t, b.maps.AllowPort(tMark, tcp, tPort))
	return b
}

var passes = map[string]uint32{
	tagoutProgTagoutKidUp: 1, tagoutProgTagoutKidDown: 1, tagoutProgTagoutDmnUp: 1, tagoutProgTagoutDmnDown: 1,
	tagoutProgTagoutLinkUp: ^uint32(0), tagoutProgTagoutLinkDn: ^uint32(0),
}

// run returns whether the program lets the frame pass.
func (b *bench) run(t testing.TB, prog string, frame []byte) bool {
	t.Helper()
	got, err := b.coll.Programs[prog].Run(&ebpf.RunOptions{Data: frame})
	if err != nil {
		t.Fatalf("running %s: %v", prog, err)
	}
	drop := uint32(0)
	if passes[prog] != 1 {
		drop = 2
	}
	if got != passes[prog] && got != drop {
		t.Fatalf("%s returned %d", prog, got)
	}
	return got == passes[prog]
}

// judge returns the reason for which the up program refuses the frame.
func (b *bench) judge(t testing.TB, prog string, frame []byte) reason.Code {
	t.Helper()
	before := b.denied(t)
	passed := b.run(t, prog, frame)
	after := b.denied(t)
	code := reason.OK
	for i, n := range after {
		if n != before[i] {
			code = reason.Code(i)
		}
	}
	if passed != (code == reason.OK) {
		t.Fatalf("%s passed=%v with reason %v", prog, passed, code)
	}
	return code
}

func (b *bench) denied(t testing.TB) (sum [32]uint64) {
	t.Helper()
	for _, mark := range []uint32{0, tMark} {
		var raw tagoutTally
		if err := b.coll.Maps[tagoutMapCounters].Lookup(mark, &raw); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Fatal(err)
		}
		for i, n := range raw.Denied {
			sum[i] += n
		}
	}
	return sum
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// upCases are packets from the kid, with what both the cgroup hook and the link must say.
var upCases = []struct {
	name string
	p    packet
	want reason.Code
}{
	{"dns udp", packet{dst: tGateway, proto: udp, dport: 53}, reason.OK},
	{"dns tcp", packet{dst: tGateway, proto: tcp, dport: 53}, reason.OK},
	{"explicit proxy", packet{dst: tGateway, proto: tcp, dport: 3128, flags: syn}, reason.OK},
	{"allowed port of a name", packet{dst: tName, proto: tcp, dport: tPort, flags: syn}, reason.OK},
	{"allowed port, udp", packet{dst: tName, proto: udp, dport: tPort}, reason.QUIC},
	{"other port of a name", packet{dst: tName, proto: tcp, dport: 8443}, reason.PortNotAllowed},
	{"raw address", packet{dst: tWorld, proto: tcp, dport: 443}, reason.RawAddress},
	{"neighbour of the virtual net", packet{dst: addr("198.18.239.255"), proto: tcp, dport: 443}, reason.RawAddress},
	{"other resolver", packet{dst: tWorld, proto: udp, dport: 53}, reason.DNSBypass},
	{"other resolver tcp", packet{dst: tWorld, proto: tcp, dport: 53}, reason.DNSBypass},
	{"neighbour's dns", packet{dst: addr("198.19.240.9"), proto: udp, dport: 53}, reason.DNSBypass},
	{"dot", packet{dst: tWorld, proto: tcp, dport: 853}, reason.DoT},
	{"doq", packet{dst: tWorld, proto: udp, dport: 853}, reason.DoT},
	{"dot to the gateway", packet{dst: tGateway, proto: tcp, dport: 853}, reason.DoT},
	{"quic", packet{dst: tWorld, proto: udp, dport: 443}, reason.QUIC},
	{"udp", packet{dst: tWorld, proto: udp, dport: 123}, reason.UDPNotAllowed},
	{"metadata", packet{dst: addr("169.254.169.254"), proto: tcp, dport: 80}, reason.Metadata},
	{"metadata dns", packet{dst: addr("169.254.169.253"), proto: udp, dport: 53}, reason.Metadata},
	{"metadata ping", packet{dst: addr("169.254.169.254"), proto: icmp}, reason.Metadata},
	{"metadata alibaba", packet{dst: addr("100.100.100.200"), proto: tcp, dport: 80}, reason.Metadata},
	{"metadata azure", packet{dst: addr("168.63.129.16"), proto: tcp, dport: 80}, reason.Metadata},
	{"metadata v6", packet{dst: addr("fd00:ec2::254"), proto: tcp, dport: 80}, reason.Metadata},
	{"ipv6", packet{dst: addr("2001:db8::1"), proto: tcp, dport: 443}, reason.IPv6},
	{"ipv6 dns", packet{dst: addr("2001:db8::1"), proto: udp, dport: 53}, reason.IPv6},
	{"v4-mapped on the wire", packet{dst: addr("::ffff:198.19.240.1"), proto: tcp, dport: 3128}, reason.IPv6},
	{"multicast", packet{dst: addr("224.0.0.251"), proto: udp, dport: 5353}, reason.Multicast},
	{"broadcast", packet{dst: addr("255.255.255.255"), proto: udp, dport: 67}, reason.Multicast},
	{"transparent port asked directly", packet{dst: tGateway, proto: tcp, dport: 3129}, reason.HostAddress},
	{"explicit proxy over udp", packet{dst: tGateway, proto: udp, dport: 3128}, reason.HostAddress},
	{"ssh of the box", packet{dst: tHost, proto: tcp, dport: 22}, reason.HostAddress},
	{"another kid", packet{dst: addr("198.19.240.5"), proto: tcp, dport: 80}, reason.HostAddress},
	{"ping", packet{dst: tGateway, proto: icmp}, reason.Protocol},
	{"sctp", packet{dst: tName, proto: unix.IPPROTO_SCTP, dport: tPort}, reason.Protocol},
	{"gre", packet{dst: tWorld, proto: unix.IPPROTO_GRE}, reason.Protocol},
	{"first fragment", packet{dst: tGateway, proto: udp, dport: 53, frag: 0x2000}, reason.Fragment},
	{"later fragment", packet{dst: tGateway, proto: udp, dport: 53, frag: 0x0010}, reason.Fragment},
	{"source route", packet{dst: tGateway, proto: tcp, dport: 3128, options: true}, reason.Malformed},
	{"cut in the tcp header", packet{dst: tGateway, proto: tcp, dport: 3128, cut: 12}, reason.Malformed},
	{"cut in the ports", packet{dst: tGateway, proto: udp, dport: 53, cut: 18}, reason.Malformed},
	{"no ip at all", packet{dst: tGateway, proto: tcp, dport: 3128, etherType: 0x88cc}, reason.Protocol},
}

func (p packet) fromKid() packet {
	p.src = tKid
	if !p.dst.Is4() {
		p.src = addr("fe80::1")
	}
	p.sport = 40000
	return p
}

func TestVerdictsUp(t *testing.T) {
	b := newBench(t, nil)
	for _, c := range upCases {
		frame := c.p.fromKid().bytes()
		for _, prog := range []string{tagoutProgTagoutKidUp, tagoutProgTagoutLinkUp} {
			if got := b.judge(t, prog, frame); got != c.want {
				t.Errorf("%s: %s says %v, want %v", c.name, prog, got, c.want)
			}
		}
	}
}

// Where the two must differ: loopback exists only inside the kid, and only the link knows a forged source.
func TestVerdictsThatDependOnThePlace(t *testing.T) {
	b := newBench(t, nil)
	for _, c := range []struct {
		name      string
		p         packet
		kid, link reason.Code
	}{
		{"loopback", packet{src: tKid, dst: addr("127.0.0.1"), proto: tcp, dport: 80}, reason.OK, reason.HostAddress},
		{"loopback dns", packet{src: tKid, dst: addr("127.0.0.53"), proto: udp, dport: 53}, reason.OK, reason.DNSBypass},
		{"loopback v6", packet{src: addr("::1"), dst: addr("::1"), proto: tcp, dport: 80}, reason.OK, reason.IPv6},
		{"own address", packet{src: tKid, dst: tKid, proto: tcp, dport: 80}, reason.OK, reason.HostAddress},
		{"forged source", packet{src: addr("198.19.240.5"), dst: tGateway, proto: udp, dport: 53}, reason.OK, reason.SpoofedSource},
	} {
		if got := b.judge(t, tagoutProgTagoutKidUp, c.p.bytes()); got != c.kid {
			t.Errorf("%s: the cgroup says %v, want %v", c.name, got, c.kid)
		}
		if got := b.judge(t, tagoutProgTagoutLinkUp, c.p.bytes()); got != c.link {
			t.Errorf("%s: the link says %v, want %v", c.name, got, c.link)
		}
	}
}

// downCases are packets towards the kid, with what both the cgroup hook and the link must say.
var downCases = []struct {
	name string
	p    packet
	want bool
}{
	{"dns answer", packet{src: tGateway, sport: 53, proto: udp}, true},
	{"proxy answer", packet{src: tGateway, sport: 3128, proto: tcp, flags: syn | ack}, true},
	{"answer of a name", packet{src: tName, sport: tPort, proto: tcp, flags: ack}, true},
	{"connection opened from outside", packet{src: tGateway, sport: 3128, proto: tcp, flags: syn}, false},
	{"other port of the gateway", packet{src: tGateway, sport: 22, proto: tcp, flags: ack}, false},
	{"other port of a name", packet{src: tName, sport: 80, proto: tcp, flags: ack}, false},
	{"the host's end", packet{src: tHost, sport: 53, proto: udp}, false},
	{"the world", packet{src: tWorld, sport: 443, proto: tcp, flags: ack}, false},
	{"icmp", packet{src: tGateway, proto: icmp}, false},
	{"ipv6", packet{src: addr("fe80::2"), dst: addr("fe80::1"), sport: 53, proto: udp}, false},
	{"fragment", packet{src: tGateway, sport: 53, proto: udp, frag: 0x2000}, false},
}

func (p packet) toKid() packet {
	p.dport = 40000
	if !p.dst.IsValid() {
		p.dst = tKid
	}
	return p
}

func TestVerdictsDown(t *testing.T) {
	b := newBench(t, nil)
	for _, c := range downCases {
		for _, prog := range []string{tagoutProgTagoutKidDown, tagoutProgTagoutLinkDn} {
			if got := b.run(t, prog, c.p.toKid().bytes()); got != c.want {
				t.Errorf("%s: %s passes %v, want %v", c.name, prog, got, c.want)
			}
		}
	}
	wrong := packet{src: tGateway, sport: 53, proto: udp, dst: addr("198.19.240.5")}
	if b.run(t, tagoutProgTagoutLinkDn, wrong.bytes()) {
		t.Error("a packet for another address passes the link")
	}
}

// TestSessionComesFirst: whatever the packet, an unusable session is the reason, in the agreed order.
func TestSessionComesFirst(t *testing.T) {
	b := newBench(t, nil)
	good := packet{dst: tGateway, proto: udp, dport: 53}.fromKid().bytes()
	bad := packet{dst: tWorld, proto: tcp, dport: 1, cut: 12}.fromKid().bytes()
	expect := func(step string, want reason.Code) {
		t.Helper()
		for _, prog := range []string{tagoutProgTagoutKidUp, tagoutProgTagoutLinkUp} {
			if got := b.judge(t, prog, good); got != want {
				t.Errorf("%s: %s says %v of a good packet, want %v", step, prog, got, want)
			}
			if got := b.judge(t, prog, bad); want != reason.OK && got != want {
				t.Errorf("%s: %s says %v of a bad packet, want %v", step, prog, got, want)
			}
		}
		for _, prog := range []string{tagoutProgTagoutKidDown, tagoutProgTagoutLinkDn} {
			answer := packet{src: tGateway, dst: tKid, sport: 53, proto: udp}.bytes()
			if got := b.run(t, prog, answer); got != (want == reason.OK) {
				t.Errorf("%s: %s passes an answer: %v", step, prog, got)
			}
		}
	}
	expect("active", reason.OK)
	must(t, b.maps.remove(tagoutMapLeases, uint32(tMark)))
	expect("no lease", reason.LeaseExpired)
	must(t, b.maps.GrantLease(tMark, soonOver()))
	expect("lease running", reason.OK)
	must(t, b.maps.GrantLease(tMark, time.Duration(bootNow())))
	expect("lease over", reason.LeaseExpired)
	renewed(t, b.maps, 1)
	expect("lease renewed", reason.OK)
	must(t, b.maps.GrantLease(tMark, 0))
	expect("lease of nothing", reason.LeaseExpired)
	must(t, b.maps.StopAll(true))
	expect("global stop over lease", reason.Stopped)
	must(t, b.maps.StopAll(false))
	expect("flag off again", reason.LeaseExpired)
	must(t, b.maps.StopSession(tMark))
	expect("stop over lease", reason.Stopped)
	must(t, b.maps.DeleteSession(tMark))
	must(t, b.maps.StopAll(true))
	expect("unknown over global stop", reason.UnknownSession)
	must(t, b.maps.StopAll(false))
	must(t, b.maps.PutSession(tMark, SessionEntry{State: StateActive, Addr: tKid}))
	renewed(t, b.maps, 0)
	expect("a new session that inherits no lease", reason.LeaseExpired)
	must(t, b.maps.GrantLease(tMark, soonOver()))
	expect("a new session", reason.OK)
	must(t, b.maps.DeleteKid(rootCgroup, 1))
	expect("unknown kid", reason.UnknownSession)
}

// An unreadable state is not active.
func TestOddStateDenies(t *testing.T) {
	b := newBench(t, nil)
	for _, state := range []uint32{0, StateStopped, 3, 99} {
		raw := tagoutSession{State: state, Addr: wire(tKid)}
		must(t, b.coll.Maps[tagoutMapSessions].Put(uint32(tMark), &raw))
		frame := packet{dst: tGateway, proto: udp, dport: 53}.fromKid().bytes()
		if got := b.judge(t, tagoutProgTagoutKidUp, frame); got != reason.Stopped {
			t.Errorf("state %d: %v", state, got)
		}
	}
}

// A writer that looked before the stop and writes after it does not undo the stop.
func TestLateWriteDoesNotUndoAStop(t *testing.T) {
	b := newBench(t, nil)
	frame := packet{dst: tGateway, proto: udp, dport: 53}.fromKid().bytes()
	must(t, b.maps.StopSession(tMark))
	late := SessionEntry{State: StateActive, Addr: tKid}.raw()
	must(t, b.coll.Maps[tagoutMapSessions].Put(uint32(tMark), &late))
	for _, prog := range []string{tagoutProgTagoutKidUp, tagoutProgTagoutLinkUp} {
		if got := b.judge(t, prog, frame); got != reason.Stopped {
			t.Errorf("%s: %v", prog, got)
		}
	}
}

// TestParityOnRandomPackets drives both places with the same hostile packets and compares them with each other
// and with the three things that a kid may do, said again here in Go.
func TestParityOnRandomPackets(t *testing.T) {
	b := newBench(t, nil)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 6000 {
		p := randomPacket(rng)
		frame := p.bytes()
		kid, link := b.judge(t, tagoutProgTagoutKidUp, frame), b.judge(t, tagoutProgTagoutLinkUp, frame)
		if kid != link {
			t.Fatalf("%v: the cgroup says %v, the link %v", p, kid, link)
		}
		if allowed := p.mayPass(); allowed != (kid == reason.OK) {
			t.Fatalf("%v: verdict %v, may pass %v", p, kid, allowed)
		}
	}
}

// Frames of noise may only be dropped, and must not upset the programs.
func TestRandomBytes(t *testing.T) {
	b := newBench(t, nil)
	rng := rand.New(rand.NewPCG(3, 4))
	for range 3000 {
		frame := make([]byte, 14+40+rng.IntN(80)) // the kernel's test run refuses less
		for i := range frame {
			frame[i] = byte(rng.Uint32())
		}
		if rng.IntN(2) == 0 {
			copy(frame[12:], []byte{8, 0, 0x45})
		}
		frame[26], frame[30] = 9, 9 // neither end on loopback, where the kid and the daemons are free
		for prog := range passes {
			if b.run(t, prog, frame) {
				t.Fatalf("%s passes %x", prog, frame)
			}
		}
	}
}

func randomPacket(rng *rand.Rand) packet {
	pick := func(n int) bool { return rng.IntN(n) == 0 }
	dsts := []netip.Addr{
		tGateway, tGateway, tGateway, tName, tName, tName, addr("198.18.240.0"), addr("198.18.255.255"), addr("198.19.0.1"),
		tHost, tWorld, addr("169.254.1.1"), addr("224.0.0.1"), addr("10.0.0.1"), addr("0.0.0.0"), addr("2001:db8::1"),
		addr("::ffff:198.19.240.1"), addr("fd00:ec2::254"),
	}
	p := packet{dst: dsts[rng.IntN(len(dsts))], proto: []uint8{tcp, tcp, udp, icmp, 0, 255}[rng.IntN(6)]}
	p.dport = []uint16{53, 443, 3128, 3129, 853, 80, 0, 65535}[rng.IntN(8)]
	p.flags = uint8(rng.IntN(64)) // below 64
	if pick(8) {
		b := [4]byte{byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32())}
		if b[0] != 127 {
			p.dst = netip.AddrFrom4(b)
		}
	}
	if pick(10) {
		p.frag = uint16(rng.Uint32()) // any 16 bits
	}
	p.options = pick(20)
	if pick(20) {
		p.cut = rng.IntN(20)
	}
	return p.fromKid()
}

func (p packet) mayPass() bool {
	header := map[uint8]int{tcp: 14, udp: 4}[p.proto]
	if !p.dst.Is4() || p.options || p.frag&0x3fff != 0 || header == 0 || 20-p.cut < header {
		return false
	}
	switch {
	case p.dst == tGateway && p.dport == 53:
		return true
	case p.dst == tGateway:
		return p.proto == tcp && p.dport == 3128
	}
	return tVirtual.Contains(p.dst) && p.proto == tcp && p.dport == tPort
}

func TestARP(t *testing.T) {
	b := newBench(t, nil)
	frame := func(sender netip.Addr) []byte {
		f := make([]byte, 14+28)
		copy(f[12:], []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1})
		copy(f[14+14:], sender.AsSlice())
		copy(f[14+24:], tHost.AsSlice())
		return f
	}
	if got := b.judge(t, tagoutProgTagoutLinkUp, frame(tKid)); got != reason.OK {
		t.Errorf("the kid's own ARP: %v", got)
	}
	if got := b.judge(t, tagoutProgTagoutLinkUp, frame(addr("198.19.240.5"))); got != reason.SpoofedSource {
		t.Errorf("ARP with a forged sender: %v", got)
	}
	if !b.run(t, tagoutProgTagoutLinkDn, frame(tHost)) {
		t.Error("the host's ARP does not reach the kid")
	}
	must(t, b.maps.StopSession(tMark))
	if b.run(t, tagoutProgTagoutLinkUp, frame(tKid)) || b.run(t, tagoutProgTagoutLinkDn, frame(tHost)) {
		t.Error("ARP passes although the session is stopped")
	}
}

// A kernel without the current-process helpers gets programs that the verifier accepts all the same.
func TestLoadsWithoutCurrentProcess(t *testing.T) {
	testroot.Require(t)
	spec := mustSpec(t)
	must(t, spec.Variables[tagoutVarHaveCurrent].Set(uint8(0)))
	coll, err := ebpf.NewCollection(spec)
	must(t, err)
	coll.Close()
}
