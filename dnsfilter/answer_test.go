package dnsfilter

import (
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
)

func one(spec policy.Spec) []*session.Session { return []*session.Session{testSession(1, spec)} }

func TestAllowedNameGetsItsVirtualAddress(t *testing.T) {
	b := newBed(t).start(one(vendorRules()))
	for _, network := range []string{"udp", "tcp"} {
		r := b.exchange(question("Api.VENDOR.test.", dns.TypeA), kidAddr, network)
		if addr := addrOf(t, r); !virtualNet.Contains(addr) {
			t.Errorf("%s: address %s is not virtual", network, addr)
		}
		if got := r.Answer[0].Header(); got.Name != "Api.VENDOR.test." || got.Ttl != ttl {
			t.Errorf("%s: the answer is for %s with TTL %d", network, got.Name, got.Ttl)
		}
		if r.Question[0].Name != "Api.VENDOR.test." || !r.RecursionAvailable {
			t.Errorf("%s: question %q, RA %v", network, r.Question[0].Name, r.RecursionAvailable)
		}
	}
	api, files := addrOf(t, b.ask("api.vendor.test.", dns.TypeA)), addrOf(t, b.ask("files.vendor.test.", dns.TypeA))
	if api == files {
		t.Errorf("two names share %s", api)
	}
	r := b.ask(reverse(api.String()), dns.TypePTR)
	if len(r.Answer) != 1 || r.Answer[0].(*dns.PTR).Ptr != "api.vendor.test." { // fails the test as well
		t.Errorf("reverse lookup: %v", r)
	}
	b.stop()
	recs, events := b.rec.lookups(reason.OK)
	if events != 5 {
		t.Errorf("%d allowed lookups recorded, want 5", events)
	}
	if p := recs[0].Process; p == nil || p.Comm != "proto17" || recs[0].Kid != "kid1" || recs[0].Dst.Name != "api.vendor.test" || recs[0].Rule != 7 {
		t.Errorf("record %+v", recs[0])
	}
}

func reverse(addr string) string {
	name, err := dns.ReverseAddr(addr)
	if err != nil {
		panic(err)
	}
	return name
}

// TestEmptyAllowlist is egress case E02, and E03 for TCP.
func TestEmptyAllowlist(t *testing.T) {
	b := newBed(t).start(one(policy.Spec{}))
	for _, network := range []string{"udp", "tcp"} {
		for _, name := range []string{"evil.test.", "api.vendor.test.", "com.", ".", "1.1.1.1.in-addr.arpa."} {
			start := time.Now()
			r := b.exchange(question(name, dns.TypeA), kidAddr, network)
			if took := time.Since(start); took > time.Second { // 10 ms is for make bench, this is for a busy machine
				t.Errorf("%s over %s took %v", name, network, took)
			}
			code, text := ede(r)
			if r.Rcode != dns.RcodeRefused || code != dns.ExtendedErrorCodeBlocked || !strings.HasPrefix(text, "name-") {
				t.Errorf("%s over %s: %s, extended error %d %q", name, network, dns.RcodeToString[r.Rcode], code, text)
			}
		}
	}
	b.stop()
	_, bad := b.rec.lookups(reason.NameInvalid)
	if _, denied := b.rec.lookups(reason.NameNotAllowed); denied+bad != 10 || bad == 0 {
		t.Errorf("%d refusals recorded, of them %d for invalid names; want 10 and some", denied+bad, bad)
	}
}

// TestNoDataForOtherTypes is egress case E06.
func TestNoDataForOtherTypes(t *testing.T) {
	b := newBed(t).start(one(vendorRules()))
	for _, qtype := range []uint16{dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeMX, dns.TypeTXT, dns.TypeSRV, dns.TypeNS, dns.TypeSOA,
		dns.TypeCNAME, dns.TypeDS, dns.TypeDNSKEY, dns.TypeCAA, dns.TypePTR, dns.TypeNAPTR, dns.TypeNULL, 65280} {
		r := b.ask("api.vendor.test.", qtype)
		if r.Rcode != dns.RcodeSuccess || len(r.Answer) != 0 || len(r.Ns) != 1 || r.Ns[0].Header().Rrtype != dns.TypeSOA {
			t.Errorf("type %s: %v", dns.Type(qtype), r)
		}
		if r := b.ask("evil.test.", qtype); r.Rcode != dns.RcodeRefused {
			t.Errorf("type %s for a denied name: %s", dns.Type(qtype), dns.RcodeToString[r.Rcode])
		}
	}
}

// TestOddQueries is egress case E05.
func TestOddQueries(t *testing.T) {
	b := newBed(t).start(one(vendorRules()))
	with := func(change func(m *dns.Msg)) *dns.Msg {
		m := question("api.vendor.test.", dns.TypeA)
		change(m)
		return m
	}
	cookie := with(func(m *dns.Msg) {
		m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0011223344556677"}}
	})
	for _, c := range []struct {
		name  string
		msg   *dns.Msg
		rcode int
	}{
		{"a cookie", cookie, dns.RcodeSuccess},
		{"payload size 4096", with(func(m *dns.Msg) { m.IsEdns0().SetUDPSize(4096) }), dns.RcodeSuccess},
		{"payload size 0", with(func(m *dns.Msg) { m.IsEdns0().SetUDPSize(0) }), dns.RcodeSuccess},
		{"no EDNS", new(dns.Msg).SetQuestion("api.vendor.test.", dns.TypeA), dns.RcodeSuccess},
		{"EDNS version 1", with(func(m *dns.Msg) { m.IsEdns0().SetVersion(1) }), dns.RcodeBadVers},
		{"two OPT records", with(func(m *dns.Msg) { m.Extra = append(m.Extra, m.Extra[0]) }), dns.RcodeFormatError},
		{"two questions", with(func(m *dns.Msg) {
			m.Question = append(m.Question, dns.Question{Name: "evil.test.", Qtype: dns.TypeA, Qclass: dns.ClassINET})
		}), dns.RcodeFormatError},
		{"an answer in the query", with(func(m *dns.Msg) {
			m.Answer = []dns.RR{&dns.A{Hdr: header(m.Question[0], dns.TypeA), A: []byte{1, 2, 3, 4}}}
		}), dns.RcodeFormatError},
		{"type 0", with(func(m *dns.Msg) { m.Question[0].Qtype = 0 }), dns.RcodeFormatError},
		{"class CH", with(func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }), dns.RcodeRefused},
		{"class ANY", with(func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassANY }), dns.RcodeRefused},
		{"AXFR", with(func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAXFR }), dns.RcodeRefused},
		{"an update", with(func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }), dns.RcodeNotImplemented},
		{"a notify", with(func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }), dns.RcodeNotImplemented},
	} {
		for _, network := range []string{"udp", "tcp"} {
			c.msg.Id = dns.Id()
			raw, err := c.msg.Pack()
			if err != nil {
				t.Fatal(err)
			}
			conn, err := from(kidAddr, network).Dial(b.addr)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write(raw); err != nil {
				t.Fatal(err)
			}
			conn.SetReadDeadline(time.Now().Add(5 * time.Second)) // the read fails then
			r, err := conn.ReadMsg()
			conn.Close() // read
			if err != nil || r.Rcode != c.rcode || r.Id != c.msg.Id {
				t.Errorf("%s over %s: %v, %v; want %s", c.name, network, r, err, dns.RcodeToString[c.rcode])
			}
		}
	}
	any := b.ask("api.vendor.test.", dns.TypeANY)
	if any.Rcode != dns.RcodeSuccess || len(any.Answer) != 1 || any.Answer[0].Header().Rrtype != dns.TypeHINFO {
		t.Errorf("ANY: %v", any)
	}
	if got := b.exchange(new(dns.Msg).SetQuestion("evil.test.", dns.TypeA), kidAddr, "udp"); got.IsEdns0() != nil {
		t.Error("an OPT record in the answer to a query without one")
	}
}

// TestNames is egress cases E07, E08 and the DNS part of E16.
func TestNames(t *testing.T) {
	spec := vendorRules()
	spec.Allow = append(spec.Allow,
		policy.Rule{Host: "xn--bcher-kva.test", Ports: []uint16{443}, Protocol: policy.TLS},
		policy.Rule{Host: "metadata", Ports: []uint16{80}, Protocol: policy.HTTP})
	spec.Deny = []policy.DenyRule{{Host: "bad.cdn.test", Line: 13}}
	b := newBed(t).start(one(spec))
	for name, want := range map[string]int{
		"API.Vendor.Test.":              dns.RcodeSuccess,
		"xn--bcher-kva.test.":           dns.RcodeSuccess,
		"XN--BCHER-KVA.TEST.":           dns.RcodeSuccess,
		"b\\195\\188cher.test.":         dns.RcodeRefused, // UTF-8 on the wire: the card's name is the A-label
		"metadata.":                     dns.RcodeSuccess, // the card names it
		"localhost.":                    dns.RcodeRefused,
		"kubernetes.":                   dns.RcodeRefused,
		"evil\\000.api.vendor.test.":    dns.RcodeRefused,
		"api\\.vendor.test.":            dns.RcodeRefused, // a dot inside a label
		"api.vendor.test.evil.test.":    dns.RcodeRefused,
		"xapi.vendor.test.":             dns.RcodeRefused,
		"a.cdn.test.":                   dns.RcodeSuccess,
		"a.b.cdn.test.":                 dns.RcodeRefused, // a wildcard stands for one label
		"cdn.test.":                     dns.RcodeRefused,
		"xcdn.test.":                    dns.RcodeRefused,
		"bad.cdn.test.":                 dns.RcodeRefused,
		"a\\032b.cdn.test.":             dns.RcodeRefused,
		"*.cdn.test.":                   dns.RcodeRefused,
		strings.Repeat("a", 63) + ".t.": dns.RcodeRefused,
	} {
		if r := b.ask(name, dns.TypeA); r.Rcode != want {
			t.Errorf("%s: %s, want %s", name, dns.RcodeToString[r.Rcode], dns.RcodeToString[want])
		}
	}
	b.stop()
	if recs, _ := b.rec.lookups(reason.DenyRule); len(recs) != 1 || recs[0].Dst.Name != "bad.cdn.test" {
		t.Errorf("records of the deny rule: %+v", recs)
	}
}

// TestBytesThatAreNoQuery is egress cases E04 and the wire part of E07: nothing is answered that is not a
// query, everything else gets FORMERR, all of it is recorded and the filter goes on serving.
func TestBytesThatAreNoQuery(t *testing.T) {
	b := newBed(t).start(one(vendorRules()))
	query, err := question("api.vendor.test.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	label64 := append([]byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 64}, []byte(strings.Repeat("a", 64)+"\x04test\x00\x00\x01\x00\x01")...)
	name256 := []byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}
	for range 4 {
		name256 = append(append(name256, 63), strings.Repeat("a", 63)...)
	}
	name256 = append(name256, 0, 0, 1, 0, 1)
	loop := []byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xc0, 12, 0, 1, 0, 1}
	forged := func(change func(m []byte)) []byte {
		m := append([]byte(nil), query...)
		change(m)
		return m
	}
	for name, msg := range map[string][]byte{
		"a label of 64 bytes":     label64,
		"a name of 256 bytes":     name256,
		"a pointer to itself":     loop,
		"cut off in the question": query[:20],
		"only a header":           query[:12],
		"no question":             {0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"more records than bytes": forged(func(m []byte) { m[11] = 9 }),
		"random bytes":            forged(func(m []byte) { copy(m[12:], noise(len(m)-12)) }),
		"1,400 random bytes":      append(append([]byte(nil), query[:4]...), noise(1396)...),
	} {
		r := b.raw(msg, 5*time.Second)
		if len(r) < headerLen || binary.BigEndian.Uint16(r) != binary.BigEndian.Uint16(msg) || r[3]&0xF != dns.RcodeFormatError || r[2]&0x80 == 0 {
			t.Errorf("%s: answered with %x, want FORMERR", name, r)
		}
	}
	for name, msg := range map[string][]byte{
		"an empty datagram":    {},
		"half a header":        query[:11],
		"an answer":            forged(func(m []byte) { m[2] |= 0x80 }),
		"a random answer":      append([]byte{1, 2, 0x80}, noise(1397)...),
		"a truncated response": {0, 1, 0x82, 0, 0, 0, 0, 0, 0, 0, 0, 0},
	} {
		if r := b.raw(msg, 50*time.Millisecond); r != nil {
			t.Errorf("%s was answered with %x", name, r)
		}
	}
	addrOf(t, b.ask("api.vendor.test.", dns.TypeA))
	b.stop()
	if _, events := b.rec.lookups(reason.Malformed); events != 9+5 {
		t.Errorf("%d malformed messages recorded, want 14", events)
	}
}

func noise(n int) []byte {
	rng := rand.New(rand.NewPCG(1, 2)) // a test's noise, the same every time
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(rng.Uint32()) // the low byte is wanted
	}
	return out
}

func TestUnknownSourceIsRefused(t *testing.T) {
	b := newBed(t).start(one(vendorRules()))
	for _, network := range []string{"udp", "tcp"} {
		r := b.exchange(question("api.vendor.test.", dns.TypeA), "127.0.5.99", network)
		if code, text := ede(r); r.Rcode != dns.RcodeRefused || code != dns.ExtendedErrorCodeProhibited || !strings.HasPrefix(text, "unknown-session") {
			t.Errorf("%s: %v", network, r)
		}
	}
	b.stop()
	recs, events := b.rec.lookups(reason.UnknownSession)
	if events != 2 || recs[0].Outcome != audit.OutcomeDeny || !strings.HasPrefix(recs[0].Fields["source"], "127.0.5.99:") {
		t.Errorf("records %+v", recs)
	}
}

// TestUDPAnswersFitTheSize takes an answer that is too big for the sizes that a client can take.
func TestUDPAnswersFitTheSize(t *testing.T) {
	a := &answer{}
	m := new(dns.Msg).SetQuestion("api.vendor.test.", dns.TypeA)
	for i := range 200 {
		a.records = append(a.records, &dns.A{Hdr: header(m.Question[0], dns.TypeA), A: []byte{198, 18, 0, byte(i)}})
	}
	for _, c := range []struct {
		edns, limit int
		tcp         bool
	}{{0, 512, false}, {100, 512, false}, {900, 900, false}, {4096, maxUDP, false}, {0, dns.MaxMsgSize, true}} {
		if m.Extra = nil; c.edns > 0 {
			m.SetEdns0(uint16(c.edns), false)
		}
		raw, err := a.pack(m, c.tcp)
		if err != nil {
			t.Fatal(err)
		}
		truncated := raw[2]&2 != 0
		if len(raw) > c.limit || truncated == c.tcp {
			t.Errorf("%+v: %d bytes, truncated %v", c, len(raw), truncated)
		}
	}
}
