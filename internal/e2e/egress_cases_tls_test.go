package e2e

import (
	"encoding/binary"
	"fmt"
	"strings"

	"tagout/internal/audit"
	"tagout/internal/practice"
	"tagout/internal/reason"
)

// clientHello is a ClientHello to build by hand, so that it may be as wrong as a case likes.
type clientHello struct {
	name     string // server_name; "": none
	versions []uint16
	legacy   uint16
	share    int // bytes of a key share in front of the name
	ech      bool
}

func extension(kind uint16, body []byte) []byte {
	out := binary.BigEndian.AppendUint16(nil, kind)
	return append(binary.BigEndian.AppendUint16(out, uint16(len(body))), body...)
}

// message returns the handshake message.
func (h clientHello) message() []byte {
	exts := extension(0x2a2a, nil) // GREASE
	if h.share > 0 {
		exts = append(exts, extension(51, append([]byte{byte((h.share + 4) >> 8), byte(h.share + 4), 0x5a, 0x5a, byte(h.share >> 8), byte(h.share)}, make([]byte, h.share)...))...)
	}
	if h.name != "" {
		n := uint16(len(h.name))
		sni := binary.BigEndian.AppendUint16(nil, n+3)
		sni = binary.BigEndian.AppendUint16(append(sni, 0), n)
		exts = append(exts, extension(0, append(sni, h.name...))...)
	}
	if h.versions != nil {
		list := []byte{byte(2 * len(h.versions))}
		for _, v := range h.versions {
			list = binary.BigEndian.AppendUint16(list, v)
		}
		exts = append(exts, extension(43, list)...)
	}
	if h.ech {
		exts = append(exts, extension(0xfe0d, []byte{0, 0, 1, 0, 1, 0, 0, 0, 0, 0})...)
	}
	exts = append(exts, extension(0xdada, []byte{0})...) // GREASE
	body := binary.BigEndian.AppendUint16(nil, h.legacy)
	body = append(body, make([]byte, 33)...) // random, and no session id
	body = append(body, 0, 4, 0x1a, 0x1a, 0x13, 1, 1, 0)
	body = append(binary.BigEndian.AppendUint16(body, uint16(len(exts))), exts...)
	return append([]byte{1, byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body))}, body...)
}

// inRecords cuts message into n handshake records.
func inRecords(message []byte, n int) []byte {
	var out []byte
	for i := range n {
		part := message[i*len(message)/n : (i+1)*len(message)/n]
		out = append(append(out, 22, 3, 1, byte(len(part)>>8), byte(len(part))), part...)
	}
	return out
}

// inSegments cuts raw into n pieces, to be sent one by one.
func inSegments(raw []byte, n int) [][]byte {
	out := make([][]byte, n)
	for i := range n {
		out[i] = raw[i*len(raw)/n : (i+1)*len(raw)/n]
	}
	return out
}

func modern(name string) clientHello {
	return clientHello{name: name, versions: []uint16{0x1a1a, 0x0304, 0x0303}, legacy: 0x0303}
}

// E11. The first handshake is a real one and comes to its end; to the other, whose key share is made up, the
// server itself answers with an alert.
func (c *cases) splitHello() {
	late := modern(practice.NameOwn)
	late.share = 1800
	out := c.attack(c.kid.Name,
		step{Kind: "pieces", Host: practice.NameOwn, Port: 443, Records: 3, Segments: 20},
		step{Kind: "tcp", Host: practice.NameOwn, Port: 443, Send: inSegments(inRecords(late.message(), 3), 20)})
	if out[0].End != "TLSv1.3" {
		c.t.Errorf("a real handshake in pieces: %+v", out[0])
	}
	if d := out[1].Data; len(d) < 7 || d[0] != 21 {
		c.t.Errorf("a name behind a large key share: %+v", out[1])
	}
	c.box.Until(soon, "both are recorded as allowed", func() error {
		if n := len(c.box.Records(func(r *audit.Record) bool {
			return r.Session == c.kid.Session && r.Event == audit.EventConnOpened && r.Outcome == audit.OutcomeAllow && named(practice.NameOwn)(r)
		})); n != 2 {
			return fmt.Errorf("%d are", n)
		}
		return nil
	})
}

// h2Get is an HTTP/2 connection's start with one request for path at authority.
func h2Get(authority, path string) []byte {
	var block []byte
	for _, f := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":path", path}, {":authority", authority}} {
		block = append(append(block, 0, byte(len(f[0]))), f[0]...) // a literal, never indexed (RFC 7541, 6.2.2)
		block = append(append(block, byte(len(f[1]))), f[1]...)
	}
	out := append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 0, 0, 0, 4, 0, 0, 0, 0, 0) // and empty SETTINGS
	out = append(out, 0, byte(len(block)>>8), byte(len(block)), 1, 5, 0, 0, 0, 1)        // HEADERS, whole and last
	return append(out, block...)
}

// E12. Each has a twin whose names agree, which passes. Where nobody looks, a mismatch gets through.
func (c *cases) namesThatDisagree() {
	get := func(host string) [][]byte {
		return [][]byte{[]byte("GET /v1/hello HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n")}
	}
	inspected := step{Kind: "tls", Host: practice.NameAPI, Port: 443}
	one, two := inspected, inspected
	one.ALPN, two.ALPN = []string{"http/1.1"}, []string{"h2"}
	with := func(s step, send [][]byte, until string) step {
		s.Send, s.Until = send, []byte(until)
		return s
	}
	c.web.take()
	earlier := uint64(len(c.denied(c.kid, code(reason.SNIMismatch))))
	out := c.attack(c.kid.Name,
		step{Kind: "tcp", Host: practice.NameOwn, Port: 443, Send: [][]byte{inRecords(modern("evil.test").message(), 1)}},
		step{Kind: "tcp", Host: practice.NameAPI, Port: 443, Send: [][]byte{inRecords(modern("evil.test").message(), 1)}},
		step{Kind: "tcp", Host: "plain.vendor.test", Port: portWeb, Send: get("evil.test")},
		with(one, get("evil.test"), ""), with(two, [][]byte{h2Get("evil.test", "/v1/hello")}, "host-mismatch"),
		step{Kind: "tcp", Host: "plain.vendor.test", Port: portWeb, Send: get(fmt.Sprintf("plain.vendor.test:%d", portWeb))},
		with(one, get(practice.NameAPI), ""), with(two, [][]byte{h2Get(practice.NameAPI, "/v1/hello")}, "hello from"))
	for i, o := range out[:2] {
		if len(o.Data) > 0 && o.Data[0] != 21 { // an alert, or nothing
			c.t.Errorf("SNI of another, way %d: %+v", i, o)
		}
	}
	c.wantProblem("Host of another", out[2], reason.HostMismatch)
	c.wantProblem("Host of another, inspected", out[3], reason.HostMismatch)
	if out[4].ALPN != "h2" || out[4].End != "found" {
		c.t.Errorf(":authority of another: %+v %q", out[4], out[4].Data)
	}
	for i, want := range []string{"arrived", "hello from", "hello from"} {
		if o := out[5+i]; !strings.Contains(string(o.Data), want) {
			c.t.Errorf("names that agree, way %d: %+v %q", i, o, o.Data)
		}
	}
	if seen := c.web.take(); len(seen) != 1 {
		c.t.Errorf("the server got %q", seen)
	}
	c.passesUnchecked("SNI of another", practice.NameOwn, 443, inRecords(modern("evil.test").message(), 1))
	c.passesUnchecked("Host of another", "plain.vendor.test", portWeb, get("evil.test")[0])
	if seen := c.web.take(); len(seen) != 1 || !strings.HasPrefix(seen[0], "GET evil.test") {
		c.t.Errorf("unchecked, the server got %q", seen)
	}
	c.bothNames(reason.SNIMismatch, earlier+2, practice.NameOwn, practice.NameAPI)
	c.bothNames(reason.HostMismatch, 3, "plain.vendor.test", practice.NameAPI)
}

// bothNames checks that the n records of the code name evil.test and one of the right names.
func (c *cases) bothNames(want reason.Code, n uint64, right ...string) {
	c.t.Helper()
	for _, r := range c.waitDenied(want.String(), c.kid, n, code(want)) {
		told := r.Detail + " " + fmt.Sprint(r.Fields)
		if r.Dst != nil {
			told += " " + r.Dst.Name
		}
		if !strings.Contains(told, "evil.test") || !strings.Contains(told, right[0]) && !strings.Contains(told, right[len(right)-1]) {
			c.t.Errorf("%v: the record names not both: %q", want, told)
		}
	}
}

// E13. A hello that is as it should be passes in E11, and each of these does where nobody looks.
func (c *cases) badHellos() {
	nameless, old, ech := modern(""), clientHello{name: practice.NameOwn, legacy: 0x0301}, modern(practice.NameOwn)
	ech.ech = true
	sslv2 := []byte{0x80, 0x2e, 1, 0, 2, 0, 0x15, 0, 0, 0, 0x10, 1, 0, 0x80, 2, 0, 0x80, 3, 0, 0x80, 4, 0, 0x80, 5, 0, 0x80, 6, 0, 0x40, 7, 0, 0xc0}
	sslv2 = append(sslv2, make([]byte, 0x30-len(sslv2))...)
	random := noise(300)
	random[0] = 0x47
	for _, tc := range []struct {
		what string
		raw  []byte
		want reason.Code
	}{
		{"no SNI", inRecords(nameless.message(), 1), reason.SNIMissing}, {"ECH", inRecords(ech.message(), 1), reason.ECH},
		{"TLS 1.0", inRecords(old.message(), 1), reason.TLSVersion}, {"SSLv2", sslv2, reason.SSLv2}, {"random bytes", random, reason.NotTLS},
	} {
		o := c.attack(c.kid.Name, step{Kind: "tcp", Host: practice.NameOwn, Port: 443, Send: [][]byte{tc.raw}})[0]
		if len(o.Data) > 0 && o.Data[0] != 21 && tc.want != reason.NotTLS {
			c.t.Errorf("%s: %+v", tc.what, o)
		}
		c.waitDenied(tc.what, c.kid, 1, func(r *audit.Record) bool { return r.Reason == tc.want && named(practice.NameOwn)(r) })
		c.passesUnchecked(tc.what, practice.NameOwn, 443, tc.raw)
	}
}
