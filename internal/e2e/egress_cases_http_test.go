package e2e

import (
	"fmt"
	"strings"

	"tagout/internal/audit"
	"tagout/internal/practice"
	"tagout/internal/reason"
)

const plainHost = "plain.vendor.test:8081"

// plain is raw HTTP to plain.vendor.test, the transparent way.
func plain(raw string) step {
	return step{Kind: "tcp", Host: "plain.vendor.test", Port: portWeb, Send: [][]byte{[]byte(raw)}}
}

// E14. Every case begins with a request that passes, and passes as a whole where nobody looks.
func (c *cases) ambiguousHTTP() {
	good := "GET /v1/good HTTP/1.1\r\nHost: " + plainHost + "\r\n\r\n"
	for _, tc := range []struct {
		what, raw string
		want      reason.Code
	}{
		{"the second for another host", "GET /v1/x HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n", reason.HostMismatch},
		{"an absolute target of another host", "GET http://evil.test/v1/x HTTP/1.1\r\nHost: " + plainHost + "\r\n\r\n", reason.AmbiguousHTTP},
		{"two lengths", "GET /v1/x HTTP/1.1\r\nHost: " + plainHost + "\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", reason.AmbiguousHTTP},
		{"Host twice", "GET /v1/x HTTP/1.1\r\nHost: " + plainHost + "\r\nHost: " + plainHost + "\r\n\r\n", reason.AmbiguousHTTP},
		{"bare line feeds", "GET /v1/x HTTP/1.1\nHost: " + plainHost + "\n\n", reason.AmbiguousHTTP},
	} {
		c.web.take()
		before := len(c.denied(c.kid, code(tc.want)))
		o := c.attack(c.kid.Name, plain(good+tc.raw))[0]
		first, second, ok := strings.Cut(string(o.Data), "arrived\n")
		if !ok || !strings.HasPrefix(first, "HTTP/1.1 200 ") {
			c.t.Errorf("%s: the good request: %+v %q", tc.what, o, o.Data)
		}
		o.Data = []byte(second)
		c.wantProblem(tc.what, o, tc.want)
		if seen := c.web.take(); len(seen) != 1 {
			c.t.Errorf("%s: the server got %q", tc.what, seen)
		}
		c.waitDenied(tc.what, c.kid, uint64(before)+1, code(tc.want))
		c.passesUnchecked(tc.what, "plain.vendor.test", portWeb, []byte(good+tc.raw))
	}
}

// E15. That CONNECT works where the card allows it is in E07.
func (c *cases) connectElsewhere() {
	connect := func(target string) string { return "CONNECT " + target + " HTTP/1.1\r\nHost: x\r\n\r\n" }
	for _, tc := range []struct {
		target string
		want   reason.Code
	}{
		{"evil.test:443", reason.NameNotAllowed}, {practice.NameAPI + ":22", reason.PortNotAllowed},
		{c.box.Net.EvilAddr().String() + ":443", reason.RawAddress}, {"169.254.169.254:443", reason.Metadata},
	} {
		c.wantProblem("CONNECT "+tc.target, c.attack(c.kid.Name, c.proxied(connect(tc.target)))[0], tc.want)
		c.box.WaitRecord("CONNECT "+tc.target, func(r *audit.Record) bool {
			return r.Session == c.kid.Session && r.Outcome == audit.OutcomeDeny && r.Reason == tc.want
		})
	}
	for _, host := range []string{practice.NameAPI, practice.NameOwn} { // inspected and not
		o := c.attack(c.kid.Name, c.proxied(connect(host+":443")+"GET /v1/hello HTTP/1.1\r\nHost: "+host+"\r\n\r\n"))[0]
		established, inner, _ := strings.Cut(string(o.Data), "\r\n\r\n")
		if !strings.HasPrefix(established, "HTTP/1.1 200 ") {
			c.t.Errorf("CONNECT %s: %q", host, o.Data)
		}
		o.Data = []byte(inner)
		c.wantProblem("plain HTTP inside", o, reason.NotTLS)
	}
}

// E17. The C library takes the first two for loopback, which is the kid's own; the others go nowhere.
func (c *cases) addressesInDisguise() {
	for i, o := range c.attack(c.kid.Name,
		step{Kind: "tcp", Host: "0x7f.1", Port: 80}, step{Kind: "tcp", Host: "2130706433", Port: 80},
		step{Kind: "tcp", Host: "::ffff:c0a8:101", Port: 80}, step{Kind: "tcp", Host: "64:ff9b::7f00:1", Port: 80}) {
		if want := []string{"ECONNREFUSED", "ECONNREFUSED", "EPERM", "EPERM"}[i]; o.Error != want {
			c.t.Errorf("straight, %d: %+v", i, o)
		}
	}
	c.waitDenied("a mapped address", c.kid, 1, to("192.168.1.1", 80))
	c.waitDenied("an embedded address", c.kid, 1, to("64:ff9b::7f00:1", 80))
	for _, host := range []string{"0x7f.1", "2130706433", "[::ffff:c0a8:101]", "[64:ff9b::7f00:1]", "0177.0.0.1", "[::1]"} {
		o := c.attack(c.kid.Name, c.proxied("GET http://"+host+"/ HTTP/1.1\r\nHost: "+host+"\r\nConnection: close\r\n\r\n"))[0]
		c.wantProblem(host, o, reason.RawAddress)
	}
	o := c.attack(c.kid.Name, c.proxied("GET http://0xa9fea9fe/ HTTP/1.1\r\nHost: 0xa9fea9fe\r\nConnection: close\r\n\r\n"))[0]
	c.wantProblem("a metadata address in hex", o, reason.Metadata)
}

// E18. The first of each is the twin that passes; the server sees it and nothing else.
func (c *cases) methodsAndPaths() {
	c.web.take()
	for _, tc := range []struct {
		method, path string
		want         reason.Code
	}{
		{"GET", "/v1/hello", reason.OK}, {"POST", "/v1/hello", reason.MethodDenied}, {"DELETE", "/v1/hello", reason.MethodDenied},
		{"GET", "/v1/../admin", reason.PathDenied}, {"GET", "/v1%2f..%2fadmin", reason.AmbiguousHTTP}, {"GET", "/admin", reason.PathDenied},
		{"GET", "/v1/%2e%2e/admin", reason.AmbiguousHTTP},
	} {
		raw := func(host string) []byte {
			return fmt.Appendf(nil, "%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", tc.method, tc.path, host)
		}
		out := c.attack(c.kid.Name, plain(string(raw(plainHost))),
			step{Kind: "tls", Host: practice.NameAPI, Port: 443, ALPN: []string{"http/1.1"}, Send: [][]byte{raw(practice.NameAPI)}})
		for i, o := range out {
			what := fmt.Sprintf("%s %s, inspected %v", tc.method, tc.path, i == 1)
			if tc.want != reason.OK {
				c.wantProblem(what, o, tc.want)
			} else if !strings.HasPrefix(string(o.Data), "HTTP/1.1 200 ") {
				c.t.Errorf("%s: %+v %q", what, o, o.Data)
			}
		}
	}
	if seen := c.web.take(); len(seen) != 1 || seen[0] != "GET "+plainHost+" /v1/hello" {
		c.t.Errorf("the server got %q", seen)
	}
	c.attack(c.unchecked.Name, plain("POST /v1/hello HTTP/1.1\r\nHost: "+plainHost+"\r\nConnection: close\r\n\r\n"), plain("GET /admin HTTP/1.1\r\nHost: "+plainHost+"\r\nConnection: close\r\n\r\n"))
	if seen := c.web.take(); len(seen) != 2 {
		c.t.Errorf("unchecked, the server got %q", seen)
	}
}
