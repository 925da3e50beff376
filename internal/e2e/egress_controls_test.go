package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/bpf"
	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/netfw"
	"tagout/internal/practice"
	"tagout/internal/reason"
)

// A control does what its case does with the protection off, and fails the test unless it gets through there. The
// protection is off where nobody stands between: for a client that sits in the practice internet itself, for a kid
// whose card allows the thing, and at the very end, when the box's programs and firewall are taken away, for any
// kid. Nothing of this can leave the machine: see outside, and wallsDown.

// control runs off as a subtest of the case.
func (c *cases) control(t *testing.T, id string, off func(*cases)) {
	t.Run(id+", protection off", func(t *testing.T) { off(c.on(t)) })
}

// outside walks the steps from inside the practice internet, where nothing of Tagout is in between. Only addresses
// in there are dialled, and its only way out is the host's end of its link, which is checked to be ours.
func (c *cases) outside(steps ...step) []outcome {
	c.t.Helper()
	for _, s := range steps {
		if a, ok := numeric(s.Host); s.Kind == "lookup" || !ok || !c.box.Inst.PracticeNet().Contains(a) {
			c.t.Fatalf("a control would dial %q, which is not in the practice internet", s.Host)
		}
	}
	return c.walk(c.box.Net.Do, steps...)
}

// onHost walks steps towards unix sockets on the host.
func (c *cases) onHost(steps ...step) []outcome {
	c.t.Helper()
	for _, s := range steps {
		if s.Kind != "unix" {
			c.t.Fatalf("a control would do %q on the host", s.Kind)
		}
	}
	return c.walk(func(fn func() error) error { return fn() }, steps...)
}

// walk runs attack.py where in starts processes.
func (c *cases) walk(in func(func() error) error, steps ...step) []outcome {
	c.t.Helper()
	raw, err := json.Marshal(steps)
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(c.t.Context(), 30*time.Second)
	defer cancel()
	var out, said bytes.Buffer
	cmd := exec.CommandContext(ctx, "/usr/bin/python3", "-c", attackPy)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(raw), &out, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := in(cmd.Start); err != nil {
		c.t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		c.t.Fatalf("a control broke off: %v: %s", err, said.Bytes())
	}
	outs, err := outcomes(&out, len(steps))
	if err != nil {
		c.t.Fatalf("a control: %v: %s", err, said.Bytes())
	}
	return outs
}

// numeric reads an address as the C library does: in the usual way, v4-mapped, or as one number.
func numeric(host string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Unmap(), true
	}
	n, err := strconv.ParseUint(host, 0, 32)
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}), err == nil
}

// inside says whether addr, with its port, is a client's in the practice internet: a control's. Whatever comes from
// the box comes from the host's end of the link, or from a kid's own address.
func (c *cases) inside(addr string) bool {
	from, err := netip.ParseAddrPort(addr)
	return err == nil && c.box.Inst.PracticeNet().Contains(from.Addr()) && from.Addr() != c.box.Net.HostAddr()
}

// fromKids are the contacts of the attacker that no control made.
func (c *cases) fromKids() []practice.Contact {
	return slices.DeleteFunc(c.box.Net.Attacker.Contacts(), func(contact practice.Contact) bool { return c.inside(contact.From) })
}

// randomArrives: E04. Nobody between: the bytes are at the other resolver's, and what reads them there says nothing
// of a record.
func (c *cases) randomArrives() {
	evil := c.box.Net.EvilAddr().String()
	if o := c.outside(step{Kind: "udp", Host: evil, Port: 53, Send: [][]byte{noise(1400)}})[0]; o.Error != "" {
		c.t.Fatalf("sending: %+v", o)
	}
	c.box.Until(soon, "the noise is at the attacker's", func() error {
		for _, contact := range c.box.Net.Attacker.Contacts() {
			if contact.Proto == "udp" && contact.Local == evil+":53" && contact.Bytes == 1400 {
				return nil
			}
		}
		return fmt.Errorf("only %+v", c.box.Net.Attacker.Contacts())
	})
}

// oddQueriesAnswered: E05. An ordinary resolver takes queries that nobody should have to understand, and every one
// of them reaches it; what the kid asked in the same words did not.
func (c *cases) oddQueriesAnswered() {
	before := c.box.Net.DNS.Count(practice.NameAPI)
	c.oddQueries()
	if n := c.box.Net.DNS.Count(practice.NameAPI) - before; n != 0 {
		c.t.Errorf("%d of the kid's queries left the box", n)
	}
	plain, at := question([]string{practice.NameAPI}, typeA, classIN), c.box.Net.DNSAddr().String()
	queries := [][]byte{edns(plain, 1, 1232, nil), query(practice.NameAPI, typeA, classCH), query(practice.NameAPI, typeANY, classIN)}
	var steps []step
	for _, q := range queries {
		steps = append(steps, step{Kind: "udp", Host: at, Port: 53, Send: [][]byte{q}, Any: true})
	}
	for i, o := range c.outside(steps...) {
		if r, ok := readReply(queries[i], o.Data); !ok || r.rcode != rcodeOK {
			c.t.Errorf("query %d to the resolver itself: %+v %+v", i, r, o)
		}
	}
	if n := c.box.Net.DNS.Count(practice.NameAPI) - before; n != len(queries) {
		c.t.Errorf("%d queries reached the resolver, want %d", n, len(queries))
	}
}

// firstAddressOnly: E10. A client that takes the first address of each answer gets nowhere, and neither does the
// kid where the answer has no address that lives.
func (c *cases) firstAddressOnly() {
	for _, first := range []netip.Addr{c.deadAddr(), c.nobodyAddr(), c.box.Net.EvilAddr()} {
		ctx, cancel := context.WithTimeout(c.t.Context(), 300*time.Millisecond)
		conn, err := c.box.Net.Dial(ctx, "tcp4", netip.AddrPortFrom(first, portEcho).String())
		cancel()
		if err == nil {
			conn.Close()
			c.t.Errorf("%v serves: the case shows nothing", first)
		}
	}
	c.box.Net.DNS.SetHost("dead.turn.test", c.deadAddr())
	if o, ok := c.echoed("dead.turn.test"); ok {
		c.t.Errorf("without an address that lives: %+v", o)
	}
}

// splitHelloUnread: E11. The same pieces with another's name in them are refused, and get through where nobody
// puts them together. No piece tells the name: whoever looks at one by one sees nothing wrong.
func (c *cases) splitHelloUnread() {
	evil := modern(practice.NameEvil)
	evil.share = 1800
	raw := inRecords(evil.message(), 3)
	pieces := inSegments(raw, 20)
	if at := bytes.Index(raw, []byte(practice.NameEvil)); at >= 0 { // no record ends inside the name: let a segment
		pieces = append(inSegments(raw[:at+4], 19), raw[at+4:])
	}
	for _, piece := range pieces {
		if bytes.Contains(piece, []byte(practice.NameEvil)) {
			c.t.Errorf("one piece tells the name: %q", piece)
		}
	}
	before := uint64(len(c.denied(c.kid, func(r *audit.Record) bool { return named(practice.NameOwn)(r) })))
	o := c.attack(c.kid.Name, step{Kind: "tcp", Host: practice.NameOwn, Port: 443, Send: pieces})[0]
	if len(o.Data) > 0 && o.Data[0] != 21 {
		c.t.Errorf("another's name in pieces: %+v", o)
	}
	c.waitDenied("another's name in pieces", c.kid, before+1, named(practice.NameOwn))
	c.passesUnchecked("another's name in pieces", practice.NameOwn, 443, raw)
}

// connectAllowed: E15. The card of the other kid allows the name, the port, and any bytes: CONNECT leads there. For
// an address, which no card allows, a client without proxy stands for it.
func (c *cases) connectAllowed() {
	connect := func(target, then string) step {
		s := c.proxied("CONNECT " + target + " HTTP/1.1\r\nHost: x\r\n\r\n" + then)
		s.Shut = true
		return s
	}
	targets := []string{"elsewhere.test:7100", practice.NameAPI + ":22"}
	for _, target := range targets {
		if o := c.attack(c.kid.Name, connect(target, "hello"))[0]; !strings.HasPrefix(string(o.Data), "HTTP/1.1 403 ") {
			c.t.Errorf("CONNECT %s: %q", target, o.Data)
		}
		if o := c.attack(c.unchecked.Name, connect(target, "hello"))[0]; !strings.HasPrefix(string(o.Data), "HTTP/1.1 200 ") || !strings.HasSuffix(string(o.Data), "\r\n\r\nhello") {
			c.t.Errorf("CONNECT %s, allowed: %+v %q", target, o, o.Data)
		}
	}
	o := c.attack(c.unchecked.Name, connect(practice.NameOwn+":443", "GET /v1/hello HTTP/1.1\r\nHost: "+practice.NameOwn+"\r\n\r\n"))[0]
	if got := string(o.Data); !strings.Contains(got, "HTTP/1.1 200 ") || !strings.Contains(got, "HTTPS server") { // so says Go's
		c.t.Errorf("plain HTTP inside, unchecked: %+v %q", o, got)
	}
	files := c.box.Net.FilesAddr().String()
	if o := c.attack(c.kid.Name, connect(files+":7100", "hello"))[0]; !strings.HasPrefix(string(o.Data), "HTTP/1.1 403 ") {
		c.t.Errorf("CONNECT %s: %q", files, o.Data)
	}
	if o := c.outside(step{Kind: "tcp", Host: files, Port: portEcho, Send: [][]byte{[]byte("hello")}, Shut: true})[0]; string(o.Data) != "hello" {
		c.t.Errorf("%s, straight: %+v", files, o)
	}
}

// disguisesWork: E17. Each spelling of a server's address leads to it where nobody is in between; from the kid none
// does, neither straight nor by way of the proxy.
func (c *cases) disguisesWork() {
	a := c.box.Net.FilesAddr().As4()
	number := uint32(a[0])<<24 | uint32(a[1])<<16 | uint32(a[2])<<8 | uint32(a[3])
	c.web.take()
	for _, host := range []string{fmt.Sprint(number), fmt.Sprintf("0x%x", number), fmt.Sprintf("0%o", number), "::ffff:" + c.box.Net.FilesAddr().String()} {
		s := step{Kind: "tcp", Host: host, Port: portWeb, Send: [][]byte{[]byte("GET /v1/x HTTP/1.1\r\nHost: " + plainHost + "\r\nConnection: close\r\n\r\n")}}
		url := host
		if strings.Contains(host, ":") {
			url = "[" + host + "]"
		}
		out := c.attack(c.kid.Name, s, c.proxied(fmt.Sprintf("GET http://%s:%d/v1/x HTTP/1.1\r\nHost: %s:%d\r\nConnection: close\r\n\r\n", url, portWeb, url, portWeb)))
		if out[0].Error != "EPERM" || !strings.HasPrefix(string(out[1].Data), "HTTP/1.1 403 ") {
			c.t.Errorf("%s: %+v", host, out)
		}
		if seen := c.web.take(); len(seen) != 0 {
			c.t.Errorf("%s: the server got %q", host, seen)
		}
		if o := c.outside(s)[0]; !strings.HasSuffix(string(o.Data), "arrived\n") {
			c.t.Errorf("%s, straight: %+v", host, o)
		}
		if seen := c.web.take(); len(seen) != 1 {
			c.t.Errorf("%s, straight: the server got %q", host, seen)
		}
	}
}

// redirectFollowed: E21. The other kid's card allows the target, and what the client follows is delivered.
func (c *cases) redirectFollowed() {
	c.box.Net.DNS.SetHost("mirror.evil.test", c.box.Net.FilesAddr())
	defer c.box.Net.DNS.SetHost("mirror.evil.test")
	follow := "import urllib.request as u, urllib.error\ntry: print(u.urlopen('http://plain.vendor.test:8081/v1/second-half', timeout=20).status)\nexcept urllib.error.HTTPError as e: print(e.code, e.url)"
	out := c.box.Exec(c.unchecked.Name, "/usr/bin/env", "-u", "http_proxy", "/usr/bin/python3", "-c", follow)
	if !strings.HasPrefix(out.Stdout, "404 http://mirror.evil.test/") { // the file server's own answer
		c.t.Errorf("followed to %q %q", out.Stdout, out.Stderr)
	}
	c.box.WaitRecord("the request at the target", func(r *audit.Record) bool {
		return r.Session == c.unchecked.Session && r.Event == audit.EventRequest && r.Outcome == audit.OutcomeAllow && named("mirror.evil.test")(r)
	})
}

// naiveRelay: E26. A relay that takes the end of one direction for the end of both loses the answer of the same
// transfer; and of a transfer that is broken off, not as much is counted as there would have been.
func (c *cases) naiveRelay() {
	send := step{Kind: "tcp", Port: portSlow, Fill: 1 << 20, Shut: true}
	well, naive := send, send
	well.Host, naive.Host, naive.Port = "slow.vendor.test", "naive.vendor.test", portNaive
	c.box.Net.DNS.SetHost("slow.vendor.test", c.box.Net.FilesAddr()) // E10 has moved it
	c.letRead()
	many := step{Kind: "tcp", Host: "many.vendor.test", Port: portMany, Any: true, Drop: true}
	out := c.attack(c.kid.Name, well, naive, many)
	if string(out[0].Data) != fmt.Sprint(1<<20) {
		c.t.Errorf("half-closed: %+v", out[0])
	}
	if len(out[1].Data) != 0 {
		c.t.Errorf("half-closed, through a relay that does not honour it: %+v", out[1])
	}
	c.box.Until(soon, "the end of a transfer that was broken off is recorded", func() error {
		ends := c.box.Records(func(r *audit.Record) bool {
			return r.Session == c.kid.Session && r.Event == audit.EventConnClosed && named("many.vendor.test")(r)
		})
		for _, r := range ends {
			if r.Bytes != nil && r.Bytes.Down >= out[2].Size && r.Bytes.Down < manyBytes {
				return nil
			}
		}
		return fmt.Errorf("only %+v", ends)
	})
}

// serveNaive is naive.vendor.test: it relays to the slow server, badly.
func (c *cases) serveNaive(conn *net.TCPConn) {
	up, err := c.box.Net.Dial(context.Background(), "tcp4", netip.AddrPortFrom(c.box.Net.FilesAddr(), portSlow).String())
	if err != nil {
		return
	}
	io.Copy(up, conn)
	up.Close() // and the caller closes conn
}

// socketsAnswer: E23. On the host the daemons' sockets are there to be connected to.
func (c *cases) socketsAnswer() {
	var steps []step
	for _, daemon := range instance.Daemons() {
		steps = append(steps, step{Kind: "unix", Host: c.box.Inst.Socket(daemon)})
	}
	for i, o := range c.onHost(steps...) {
		if o.Error != "" {
			c.t.Errorf("%s: %+v", steps[i].Host, o)
		}
	}
}

// wallsDown is last: it takes the box's programs and its firewall away. What E03, E04, E22 and E23 try is then not refused
// any more: what is on the box itself is reached. Nothing is sent further: the box forwards no packets, which is
// checked, and every address is the box's own or the attacker's in the practice internet.
func (c *cases) wallsDown() {
	kid := c.box.Spawn(bareCard, nil)
	host, gateway := c.box.Net.HostAddr(), c.box.Inst.Gateway()
	var steps []step
	var here []*greeter
	for _, at := range []netip.AddrPort{netip.AddrPortFrom(gateway, 8081), netip.AddrPortFrom(host, 8080), netip.AddrPortFrom(gateway, 853), netip.AddrPortFrom(gateway, 22)} {
		here = append(here, c.greet(at))
		steps = append(steps, step{Kind: "tcp", Host: at.Addr().String(), Port: int(at.Port())})
	}
	steps = append(steps, step{Kind: "udp", Host: c.box.Net.EvilAddr().String(), Port: 53, Send: [][]byte{noise(1400)}})
	for i, o := range c.attack(kid.Name, steps...) {
		if o.Error != "EPERM" {
			c.t.Errorf("%s port %d: %+v", steps[i].Host, steps[i].Port, o)
		}
	}
	for _, g := range here {
		if n := g.met.Load(); n != 0 {
			c.t.Errorf("%v was reached", g.at)
		}
	}
	for _, s := range steps {
		c.mustStay(netip.MustParseAddr(s.Host))
	}
	thrown := c.throwAll(kid)
	pieces := c.listenTrap(netip.AddrPortFrom(gateway, 8083), 0)
	c.sendFragments(kid.Addr, kid.Name, pieces.at, "both")
	c.waitDenied("both pieces of a datagram", kid, 2, func(r *audit.Record) bool {
		return r.Reason == reason.Fragment && r.Dst != nil && r.Dst.Addr == gateway
	})
	if n := pieces.got.Load(); n != 0 {
		c.t.Errorf("%d bytes came in pieces", n)
	}
	c.takeWalls()
	c.sendFragments(kid.Addr, kid.Name, pieces.at, "both")
	c.box.Until(soon, "without the walls the pieces arrive as one datagram", func() error {
		if n := pieces.got.Load(); n != fragmented {
			return fmt.Errorf("%d bytes", n)
		}
		return nil
	})
	thrown.arrive()
	for i, o := range c.attack(kid.Name, steps...) {
		if i < len(here) && (o.Error != "" || string(o.Data) != "hello") || o.Error == "EPERM" {
			c.t.Errorf("without the walls, %s port %d: %+v", steps[i].Host, steps[i].Port, o)
		}
	}
}

// takeWalls takes the programs off the kids and their links, and the firewall's rules away. The box is of no use
// afterwards.
func (c *cases) takeWalls() {
	c.t.Helper()
	layout, err := cgroup.Detect()
	if err == nil {
		err = bpf.Uninstall(c.box.Inst.PinDir(), layout.V2(c.box.Inst.KidsCgroupRel()), nil)
	}
	if err == nil {
		err = netfw.Remove(c.box.Inst)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// mustStay fails the test unless packets to a end on this host or on the link to the practice internet.
func (c *cases) mustStay(a netip.Addr) {
	c.t.Helper()
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) != 1 {
		c.t.Fatalf("%v: %d routes: %v", a, len(routes), err)
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		c.t.Fatal(err)
	}
	if routes[0].Type != unix.RTN_LOCAL && link.Attrs().Name != c.box.Net.Link() {
		c.t.Fatalf("%v is reached through %s, not in the practice internet", a, link.Attrs().Name)
	}
}

// greeter is something on the box itself that no kid should reach.
type greeter struct {
	at  netip.AddrPort
	met atomic.Int64
}

// greet listens on an address of the host until the test ends, and says hello to whoever comes.
func (c *cases) greet(at netip.AddrPort) *greeter {
	c.t.Helper()
	l, err := net.Listen("tcp4", at.String())
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { l.Close() })
	g := &greeter{at: at}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			g.met.Add(1)
			io.WriteString(conn, "hello")
			conn.Close()
		}
	}()
	return g
}
