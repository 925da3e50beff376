package dnsfilter

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"

	"tagout/internal/policy"
)

// FuzzHandle sends arbitrary messages: a query gets exactly one well-formed answer with its id, an answer or
// a scrap gets none, and only allowed names ever get an address.
func FuzzHandle(f *testing.F) {
	b := newBed(f).start(one(vendorRules()))
	for _, m := range []*dns.Msg{
		question("api.vendor.test.", dns.TypeA), question("evil.test.", dns.TypeANY), question("1.0.18.198.in-addr.arpa.", dns.TypePTR),
		new(dns.Msg).SetNotify("x."), new(dns.Msg).SetUpdate("x."), new(dns.Msg).SetAxfr("x."),
	} {
		raw, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	k := b.filter.sessions.byKid("kid1")
	f.Fuzz(func(t *testing.T, raw []byte) {
		q := &query{raw: raw, src: netip.MustParseAddrPort(kidAddr + ":4000"), kid: k}
		reply := b.filter.handle(q)
		if len(raw) < headerLen || raw[2]&0x80 != 0 {
			if reply != nil {
				t.Fatalf("answered with %x", reply)
			}
			return
		}
		var r dns.Msg
		if err := r.Unpack(reply); err != nil {
			t.Fatalf("answered with %x: %v", reply, err)
		}
		if r.Id != binary.BigEndian.Uint16(raw) || !r.Response || len(reply) > maxUDP || r.Rcode == dns.RcodeServerFailure {
			t.Fatalf("answered with %v", &r)
		}
		for _, rr := range r.Answer {
			if _, d := k.policy.Lookup(rr.Header().Name); d.Verdict != policy.Allow && rr.Header().Rrtype != dns.TypePTR {
				t.Fatalf("answered for a denied name: %v", rr)
			}
		}
	})
}

func BenchmarkHandle(b *testing.B) {
	bed := newBed(b).start(one(vendorRules()), func(c *Config) { c.Rate, c.Burst = 1e9, 1e9 })
	for name, m := range map[string]*dns.Msg{"allowed": question("api.vendor.test.", dns.TypeA), "denied": question("evil.test.", dns.TypeA)} {
		raw, err := m.Pack()
		if err != nil {
			b.Fatal(err)
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					q := &query{raw: raw, src: netip.MustParseAddrPort(kidAddr + ":4000"), kid: bed.filter.sessions.byKid("kid1")}
					bed.filter.handle(q)
				}
			})
		})
	}
}

// BenchmarkExchange is the latency that a kid sees, socket to socket.
func BenchmarkExchange(b *testing.B) {
	bed := newBed(b).start(one(vendorRules()), func(c *Config) { c.Rate, c.Burst = 1e9, 1e9 })
	conn, err := from(kidAddr, "udp").Dial(bed.addr)
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close() // nothing is buffered
	m := question("api.vendor.test.", dns.TypeA)
	for b.Loop() {
		conn.SetDeadline(time.Now().Add(5 * time.Second)) // the read fails then
		if err := conn.WriteMsg(m); err != nil {
			b.Fatal(err)
		}
		if _, err := conn.ReadMsg(); err != nil {
			b.Fatal(err)
		}
	}
}
