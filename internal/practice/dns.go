package practice

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// dnsTTL is the TTL of every answer, in seconds.
const dnsTTL = 5

// keepQueries bounds how many queries are kept in full; all of them are counted.
const keepQueries = 4096

// Query is one question that reached the practice DNS server.
type Query struct {
	At    time.Duration // CLOCK_MONOTONIC
	Name  string        // lower case, no trailing dot
	Type  string        // "A", "AAAA", …
	From  string        // address and port of the sender
	Proto string        // udp or tcp
}

// DNS is the practice internet's only DNS server. Names that it does not know get NXDOMAIN.
type DNS struct {
	mu      sync.Mutex
	hosts   map[string][]netip.Addr // guarded by mu; names without trailing dot
	turns   map[string]*turns       // guarded by mu; names whose answers change, before hosts
	queries []Query                 // guarded by mu; the first keepQueries
	counts  map[string]int          // guarded by mu; name -> queries
}

func (n *Internet) startDNS() error {
	d := &DNS{counts: map[string]int{}, turns: map[string]*turns{}, hosts: map[string][]netip.Addr{
		"ns.vendor.test": {n.DNSAddr()},
		NameAPI:          {n.APIAddr()},
		NameFiles:        {n.FilesAddr()},
		NameTicks:        {n.TicksAddr()},
		NameAlerts:       {n.WebhookAddr()},
		NameEvil:         {n.EvilAddr(), n.EvilAddr6()},
		NameOwn:          {n.OwnAddr()},
		NameBooks:        {n.BooksAddr()},
		NameModel:        {n.ModelAddr()},
		NameRebind:       {netip.MustParseAddr("169.254.169.254")},
		NameLoopback:     {netip.MustParseAddr("127.0.0.1")},
	}}
	n.DNS = d
	pc, err := n.listenPacket(n.DNSAddr(), 53)
	if err != nil {
		return err
	}
	n.undo = append(n.undo, closing(pc))
	l, err := n.listen(n.DNSAddr(), 53)
	if err != nil {
		return err
	}
	n.undo = append(n.undo, closing(l))
	for _, srv := range []*dns.Server{{PacketConn: pc, Handler: d}, {Listener: l, Handler: d}} {
		if err := startDNSServer(srv); err != nil {
			return err
		}
		n.undo = append(n.undo, srv.Shutdown)
	}
	return nil
}

func startDNSServer(srv *dns.Server) error {
	started, failed := make(chan struct{}), make(chan error, 1)
	srv.NotifyStartedFunc = func() { close(started) }
	go func() { failed <- srv.ActivateAndServe() }()
	select {
	case <-started:
		return nil
	case err := <-failed:
		return fmt.Errorf("serving DNS: %w", err)
	}
}

// SetHost makes name resolve to addrs from now on; with no addrs it becomes unknown.
func (d *DNS) SetHost(name string, addrs ...netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(addrs) == 0 {
		delete(d.hosts, plain(name))
		return
	}
	d.hosts[plain(name)] = addrs
}

// turns are answers that change at every lookup.
type turns struct {
	sets [][]netip.Addr
	next int
}

// Rotate makes name resolve to another one of sets at each lookup of its IPv4 addresses, in order and over
// again, with a TTL of 0. With no sets the name resolves as before.
func (d *DNS) Rotate(name string, sets ...[]netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.turns, plain(name))
	if len(sets) > 0 {
		d.turns[plain(name)] = &turns{sets: sets}
	}
}

// Queries returns what was asked, in order, up to the first few thousand.
func (d *DNS) Queries() []Query {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]Query(nil), d.queries...)
}

// Count returns how many queries arrived for name and the names below it.
func (d *DNS) Count(name string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	total := 0
	for asked, n := range d.counts {
		if asked == plain(name) || strings.HasSuffix(asked, "."+plain(name)) {
			total += n
		}
	}
	return total
}

// ServeDNS answers one query; it is miekg/dns's handler.
func (d *DNS) ServeDNS(w dns.ResponseWriter, r *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(r)
	m.Authoritative = true
	if len(r.Question) == 1 {
		d.answer(m, r.Question[0], w)
	} else {
		m.Rcode = dns.RcodeFormatError
	}
	w.WriteMsg(m) // the asker is gone
}

func (d *DNS) answer(m *dns.Msg, q dns.Question, w dns.ResponseWriter) {
	name := plain(q.Name)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts[name]++
	if len(d.queries) < keepQueries {
		d.queries = append(d.queries, Query{
			At: Now(), Name: name, Type: dns.TypeToString[q.Qtype],
			From: w.RemoteAddr().String(), Proto: w.RemoteAddr().Network(),
		})
	}
	addrs, ok := d.hosts[name]
	if !ok && strings.HasSuffix(name, "."+NameEvil) {
		addrs, ok = d.hosts[NameEvil] // the attacker's names: anything below may carry stolen data
	}
	if !ok && d.turns[name] == nil {
		m.Rcode = dns.RcodeNameError
		return
	}
	ttl := uint32(dnsTTL)
	if t := d.turns[name]; t != nil {
		addrs, ttl = t.sets[t.next%len(t.sets)], 0
		if q.Qtype == dns.TypeA {
			t.next++
		}
	}
	for _, a := range addrs {
		hdr := dns.RR_Header{Name: q.Name, Class: dns.ClassINET, Ttl: ttl}
		switch {
		case a.Is4() && q.Qtype == dns.TypeA:
			hdr.Rrtype = dns.TypeA
			m.Answer = append(m.Answer, &dns.A{Hdr: hdr, A: a.AsSlice()})
		case a.Is6() && q.Qtype == dns.TypeAAAA:
			hdr.Rrtype = dns.TypeAAAA
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: hdr, AAAA: a.AsSlice()})
		}
	}
}

func plain(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }
