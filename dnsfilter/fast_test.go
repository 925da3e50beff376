package dnsfilter

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/miekg/dns"

	"tagout/internal/reason"
)

// sameAsFast fails where fast answers raw in another way than handle does, and returns fast's answer.
func sameAsFast(t testing.TB, f *Filter, k *kid, raw []byte) []byte {
	t.Helper()
	q := &query{raw: raw, src: netip.MustParseAddrPort(kidAddr + ":4000"), kid: k}
	quick := f.fast(q, make([]byte, 0, maxUDP))
	if quick == nil {
		return nil
	}
	var a, b dns.Msg
	if err := a.Unpack(quick); err != nil {
		t.Fatalf("%x is answered with %x: %v", raw, quick, err)
	}
	if err := b.Unpack(f.handle(q)); err != nil {
		t.Fatal(err)
	}
	a.Compress, b.Compress = false, false
	if !reflect.DeepEqual(a, b) {
		t.Fatalf("%x is answered with\n%v\nand by handle with\n%v", raw, &a, &b)
	}
	return quick
}

func TestFastIsTheSame(t *testing.T) {
	b := newBed(t).start(one(vendorRules()))
	k := b.filter.sessions.byKid("kid1")
	change := func(m *dns.Msg, fn func(*dns.Msg)) *dns.Msg { fn(m); return m }
	plain := func() *dns.Msg { return new(dns.Msg).SetQuestion("api.vendor.test.", dns.TypeA) }
	for name, c := range map[string]struct {
		msg  *dns.Msg
		fast bool
	}{
		"plain":           {plain(), true},
		"other case":      {new(dns.Msg).SetQuestion("aPi.Vendor.TEST.", dns.TypeA), true},
		"EDNS":            {question("api.vendor.test.", dns.TypeA), true},
		"EDNS with DO":    {plain().SetEdns0(4096, true), true},
		"EDNS of no size": {plain().SetEdns0(0, false), true},
		"flags":           {change(plain(), func(m *dns.Msg) { m.CheckingDisabled, m.AuthenticatedData, m.RecursionDesired = true, true, false }), true},
		"another flag":    {change(plain(), func(m *dns.Msg) { m.Zero = true }), false},
		"an opcode":       {change(plain(), func(m *dns.Msg) { m.Opcode = dns.OpcodeStatus }), false},
		"a cookie": {change(question("api.vendor.test.", dns.TypeA), func(m *dns.Msg) {
			m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: 10, Cookie: "0011223344556677"}}
		}), false},
		"EDNS version 1":         {change(question("api.vendor.test.", dns.TypeA), func(m *dns.Msg) { m.IsEdns0().SetVersion(1) }), false},
		"two questions":          {change(plain(), func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }), false},
		"an answer in it":        {change(plain(), func(m *dns.Msg) { m.Answer = []dns.RR{soa(m.Question[0])} }), false},
		"a class":                {change(plain(), func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }), false},
		"a type":                 {new(dns.Msg).SetQuestion("api.vendor.test.", dns.TypeAAAA), false},
		"a name under a star":    {new(dns.Msg).SetQuestion("a.cdn.test.", dns.TypeA), false},
		"a denied name":          {new(dns.Msg).SetQuestion("evil.test.", dns.TypeA), false},
		"the root":               {new(dns.Msg).SetQuestion(".", dns.TypeA), false},
		"an escaped dot":         {new(dns.Msg).SetQuestion(`api\.vendor.test.`, dns.TypeA), false},
		"a byte that is no name": {new(dns.Msg).SetQuestion(`api\000.vendor.test.`, dns.TypeA), false},
	} {
		raw, err := c.msg.Pack()
		if err != nil {
			t.Fatal(name, err)
		}
		if got := sameAsFast(t, b.filter, k, raw) != nil; got != c.fast {
			t.Errorf("%s: answered fast is %v, want %v", name, got, c.fast)
		}
		for n := range raw { // cut off anywhere
			if sameAsFast(t, b.filter, k, raw[:n]) != nil {
				t.Errorf("%s: answered although cut off after %d bytes", name, n)
			}
		}
		if sameAsFast(t, b.filter, k, append(raw, 0)) != nil {
			t.Errorf("%s: answered with a byte too many", name)
		}
		if b.filter.fast(&query{raw: raw}, make([]byte, 0, maxUDP)) != nil {
			t.Errorf("%s: answered to nobody", name)
		}
	}
}

// TestFastIsCountedAndLimited: what is answered fast is recorded and limited as the rest.
func TestFastIsCountedAndLimited(t *testing.T) {
	b := newBed(t).start(one(vendorRules()), func(c *Config) { c.Rate, c.Burst = 0.001, 100 })
	k := b.filter.sessions.byKid("kid1")
	raw, err := new(dns.Msg).SetQuestion("api.vendor.test.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	fast := 0
	for range 150 {
		q := &query{raw: raw, src: netip.MustParseAddrPort(kidAddr + ":4000"), kid: k}
		if b.filter.fast(q, make([]byte, 0, maxUDP)) != nil {
			fast++
		} else if reply := b.filter.handle(q); reply[3]&0xF != dns.RcodeRefused {
			t.Errorf("beyond the rate the answer is %x", reply)
		}
	}
	b.stop()
	recs, events := b.rec.lookups(reason.OK)
	if _, limited := b.rec.lookups(reason.RateLimit); fast != 100 || events != 100 || limited != 50 {
		t.Errorf("%d answered, %d recorded, %d refused and recorded; want 100, 100, 50", fast, events, limited)
	}
	if r := recs[0]; r.Rule != 7 || r.Dst.Name != "api.vendor.test" || !virtualNet.Contains(r.Dst.Addr) || r.Kid != "kid1" || r.Process == nil || r.Fields["type"] != "A" {
		t.Errorf("record %+v", r)
	}
}

// FuzzFast holds the two ways of answering against each other.
func FuzzFast(f *testing.F) {
	b := newBed(f).start(one(vendorRules()))
	for _, m := range []*dns.Msg{
		question("api.vendor.test.", dns.TypeA), new(dns.Msg).SetQuestion("FILES.vendor.test.", dns.TypeA), question("a.cdn.test.", dns.TypeA),
	} {
		raw, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	k := b.filter.sessions.byKid("kid1")
	f.Fuzz(func(t *testing.T, raw []byte) { sameAsFast(t, b.filter, k, raw) })
}

func BenchmarkFast(b *testing.B) {
	bed := newBed(b).start(one(vendorRules()), func(c *Config) { c.Rate, c.Burst = 1e9, 1e9 })
	raw, err := question("api.vendor.test.", dns.TypeA).Pack()
	if err != nil {
		b.Fatal(err)
	}
	q := &query{raw: raw, src: netip.MustParseAddrPort(kidAddr + ":4000"), kid: bed.filter.sessions.byKid("kid1")}
	buf := make([]byte, 0, maxUDP)
	b.ReportAllocs()
	for b.Loop() {
		if bed.filter.fast(q, buf) == nil {
			b.Fatal("not answered")
		}
	}
}
