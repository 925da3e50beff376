package e2e

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"

	"tagout/internal/audit"
	"tagout/internal/practice"
	"tagout/internal/reason"
)

// echoed reports whether the kid gets its bytes back from name.
func (c *cases) echoed(name string) (outcome, bool) {
	c.t.Helper()
	o := c.attack(c.kid.Name, step{Kind: "tcp", Host: name, Port: portEcho, Send: [][]byte{[]byte("hello")}, Shut: true})[0]
	return o, string(o.Data) == "hello"
}

// E09. With a public answer the same name is reached: it is the answer that is refused. Only addresses of this machine and of the practice internet are answered: where the check is
// broken, nothing is sent to others. The whole list, metadata services included, is policy's TestUpstream.
func (c *cases) privateAnswers() {
	dns := c.box.Net.DNS
	public := c.box.Net.FilesAddr().String()
	for i, list := range [][]string{
		{"127.0.0.1"}, {c.gateway()}, {"0.0.0.0"}, {c.kid.Addr.String()},
		{"::1"}, {"::ffff:127.0.0.1"}, {"64:ff9b::7f00:1"},
		{public, "127.0.0.1"}, {"127.0.0.1", public},
	} {
		name, a := fmt.Sprintf("p%d.turn.test", i), strings.Join(list, ", ")
		var addrs []netip.Addr
		for _, one := range list {
			addrs = append(addrs, netip.MustParseAddr(one))
		}
		dns.SetHost(name, addrs...)
		if o, ok := c.echoed(name); ok || o.Error != "" && o.Error != "ECONNRESET" {
			c.t.Errorf("%s: %+v", a, o)
		}
		rec := c.box.WaitRecord(a, func(r *audit.Record) bool { return r.Event == audit.EventConnOpened && named(name)(r) })
		if rec.Reason != reason.PrivateAnswer || !strings.Contains(rec.Detail, a) {
			c.t.Fatalf("%s: refused as %v: %s", a, rec.Reason, rec.Detail)
		}
		c.box.WaitAlert(rec.ID)
	}
	dns.SetHost("public.turn.test", c.box.Net.FilesAddr())
	if o, ok := c.echoed("public.turn.test"); !ok {
		c.t.Errorf("a public answer: %+v", o)
	}
	c.grantedAddress()
}

// private is the address that casesCard grants to granted.test: another one on each box of this machine.
func (c *cases) private() string { return fmt.Sprintf("10.99.99.%d", 16+c.box.Inst.Slot()) }

// grantedAddress reaches a private address that the card grants to this host alone.
func (c *cases) grantedAddress() {
	private := c.private()
	run := func(argv ...string) {
		c.t.Helper()
		if raw, err := exec.Command("ip", argv...).CombinedOutput(); err != nil {
			c.t.Fatalf("ip %v: %v %s", argv, err, raw)
		}
	}
	if err := c.box.Net.Do(func() error {
		return exec.Command("ip", "addr", "add", private+"/32", "dev", "lo").Run()
	}); err != nil {
		c.t.Fatal(err)
	}
	c.serve(netip.MustParseAddr(private), portEcho, echo)
	run("route", "add", private, "via", c.box.Net.FilesAddr().String())
	defer run("route", "del", private, "via", c.box.Net.FilesAddr().String())
	for _, name := range []string{"granted.test", "other.turn.test"} {
		c.box.Net.DNS.SetHost(name, netip.MustParseAddr(private))
		if o, ok := c.echoed(name); ok != (name == "granted.test") {
			c.t.Errorf("%s: %+v", name, o)
		}
	}
}

// E10. Every lookup brings another set with a TTL of 0: with an address first that refuses, with one that nobody
// has, and with one of somebody else. A connection that stands lives through it.
func (c *cases) answersThatChange() {
	live, dead, nobody := c.box.Net.FilesAddr(), c.deadAddr(), c.nobodyAddr()
	c.box.Net.DNS.Rotate("a.turn.test", []netip.Addr{dead, live}, []netip.Addr{nobody, live}, []netip.Addr{c.box.Net.EvilAddr(), live})
	defer c.box.Net.DNS.Rotate("a.turn.test")
	long := make(chan []outcome, 1)
	before := c.box.Net.DNS.Count("a.turn.test")
	go func() {
		c.box.Net.DNS.SetHost("slow.vendor.test", live)
		out, err := c.tryAttack(c.kid.Name, step{Kind: "tcp", Host: "slow.vendor.test", Port: portSlow, Fill: 4 << 20, Shut: true})
		if err != nil {
			out = []outcome{{Error: err.Error()}}
		}
		long <- out
	}()
	c.box.WaitRecord("the long connection", func(r *audit.Record) bool {
		return r.Event == audit.EventConnOpened && r.Outcome == audit.OutcomeAllow && named("slow.vendor.test")(r)
	})
	c.box.Net.DNS.SetHost("slow.vendor.test", dead)
	for i := range 3 {
		if o, ok := c.echoed("a.turn.test"); !ok {
			c.t.Errorf("lookup %d: %+v", i, o)
		}
	}
	if n := c.box.Net.DNS.Count("a.turn.test") - before; n < 3 {
		c.t.Errorf("%d lookups for 3 connections: nothing rotated", n)
	}
	c.letRead()
	if o := (<-long)[0]; o.Error != "" || string(o.Data) != fmt.Sprint(4<<20) {
		c.t.Errorf("the long connection: %+v", o)
	}
	rec := c.box.WaitRecord("the end of the long connection", func(r *audit.Record) bool {
		return r.Event == audit.EventConnClosed && named("slow.vendor.test")(r)
	})
	if rec.Bytes == nil || rec.Bytes.Up != 4<<20 || rec.Bytes.Down != 7 || c.slow.Load() != 4<<20 {
		c.t.Errorf("a slow reader got %d bytes; counted are %+v", c.slow.Load(), rec.Bytes)
	}
}

// deadAddr is an address at which nothing listens; at nobodyAddr there is not even a machine.
func (c *cases) deadAddr() netip.Addr   { return c.box.Net.DNSAddr() }
func (c *cases) nobodyAddr() netip.Addr { return c.box.Net.OwnAddr().Next().Next() }

// E21. The first half comes, the second is at a host that no card names.
func (c *cases) deniedRedirect() {
	const name = "mirror.evil.test"
	get := func(url string) string {
		host := strings.SplitN(strings.TrimPrefix(url, "http://"), "/", 2)[0]
		return "GET " + url + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n"
	}
	o := c.attack(c.kid.Name, step{Kind: "tcp", Host: c.gateway(), Port: 3128, Until: []byte("name-not-allowed"),
		Send: [][]byte{[]byte(get("http://plain.vendor.test:8081/v1/first-half") + get("http://plain.vendor.test:8081/v1/second-half") + get("http://"+name+"/second-half"))}})[0]
	got := string(o.Data)
	refusal := strings.LastIndex(got, "HTTP/1.1 ")
	if !strings.Contains(got, "arrived\n") || !strings.Contains(got, "http://"+name) || o.End != "found" || refusal < 0 {
		c.t.Fatalf("by way of the proxy: %+v %q", o, got)
	}
	if last := got[refusal:]; !strings.HasPrefix(last, "HTTP/1.1 403 ") || !strings.Contains(last, "application/problem+json") {
		c.t.Errorf("the refusal: %q", last)
	}
	c.waitDenied("the redirect", c.kid, 1, named(name))
	// A program that knows nothing of a proxy follows by name.
	follow := "import urllib.request as u\ntry: u.urlopen('http://plain.vendor.test:8081/v1/second-half', timeout=20).read()\nexcept OSError as e: print(e)"
	if out := c.box.Exec(c.kid.Name, "/usr/bin/env", "-u", "http_proxy", "/usr/bin/python3", "-c", follow); !strings.Contains(out.Stdout, "not known") && !strings.Contains(out.Stdout, "resolution") {
		c.t.Errorf("without a proxy: %q %q", out.Stdout, out.Stderr)
	}
	c.box.WaitRecord("the lookup of the target", func(r *audit.Record) bool {
		return r.Session == c.kid.Session && r.Event == audit.EventLookup && r.Outcome == audit.OutcomeDeny && named(name)(r)
	})
	if n := c.box.Net.DNS.Count(name); n != 0 {
		c.t.Errorf("%d queries for the target left the box", n)
	}
}

// E26. The slow reader is in E10. Counts at intervals and the idle limit, with times that a test can wait for:
// proxy's TestLongConnectionsTellInterimCounts and TestIdleConnectionsEnd.
func (c *cases) countsAndHalfClose() {
	up := noise(300_000)
	out := c.attack(c.kid.Name,
		step{Kind: "tcp", Host: "echo.vendor.test", Port: portEcho, Send: [][]byte{up}, Shut: true, Drop: true},
		step{Kind: "tcp", Host: "many.vendor.test", Port: portMany, Drop: true})
	if out[0].Size != int64(len(up)) || out[0].End != "eof" {
		c.t.Errorf("after a half-close: %+v", out[0])
	}
	if out[1].Size != manyBytes || out[1].End != "eof" {
		c.t.Errorf("the long transfer: %+v", out[1])
	}
	for name, want := range map[string]audit.Bytes{
		"echo.vendor.test": {Up: int64(len(up)), Down: int64(len(up))}, "many.vendor.test": {Down: manyBytes},
	} {
		rec := c.box.WaitRecord("the end of "+name, func(r *audit.Record) bool {
			return r.Session == c.kid.Session && r.Event == audit.EventConnClosed && named(name)(r)
		})
		if rec.Bytes == nil || *rec.Bytes != want {
			c.t.Errorf("%s: counted %+v, want %+v", name, rec.Bytes, want)
		}
	}
	// As many bytes over HTTP, seen by a client that knows its count.
	size := c.box.Exec(c.kid.Name, "/usr/bin/curl", "-s", "--noproxy", "*", "-o", "/dev/null", "-w", "%{size_header} %{size_download}", "http://"+practice.NameFiles+"/bytes/20000001")
	var head, body int64
	fmt.Sscan(size.Stdout, &head, &body)
	rec := c.box.WaitRecord("the end of curl's", func(r *audit.Record) bool {
		return r.Session == c.kid.Session && r.Event == audit.EventConnClosed && named(practice.NameFiles)(r)
	})
	if body != 20_000_001 || rec.Bytes == nil || rec.Bytes.Down < body || rec.Bytes.Down > body+head+200 {
		c.t.Errorf("curl got %d+%d, counted are %+v: %q", head, body, rec.Bytes, size.Stderr)
	}
}
