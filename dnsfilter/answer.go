package dnsfilter

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"

	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/tokenshape"
)

const (
	ttl        = 60   // seconds, of every answer
	headerLen  = 12   // RFC 1035 section 4.1.1
	maxUDP     = 1232 // what we send and say we take (DNS flag day 2020)
	flagQR     = 1 << 15
	flagRD     = 1 << 8
	opcodeMask = 0xF << 11
)

// soaNames stand in the SOA records of empty answers; .invalid never resolves (RFC 6761).
const (
	soaMaster = "dnsfilter.tagout.invalid."
	soaMail   = "nobody.tagout.invalid."
)

// query is one message that arrived.
type query struct {
	raw []byte // valid while the message is handled
	src netip.AddrPort
	tcp bool
	kid *kid // nil: no session owns the address
}

func (q *query) proto() string {
	if q.tcp {
		return "tcp"
	}
	return "udp"
}

// answer is what the filter decided. code is reason.OK for allowed lookups, empty ones included.
type answer struct {
	rcode  int
	code   reason.Code
	detail string

	name  string // for the record: canonical where there is such a form, else as it was asked
	qtype string
	rule  int // line in the card
	addr  netip.Addr

	records, authority []dns.RR
}

func refused(code reason.Code, detail string) *answer {
	return &answer{rcode: dns.RcodeRefused, code: code, detail: detail}
}

func formerr(detail string) *answer {
	return &answer{rcode: dns.RcodeFormatError, code: reason.Malformed, detail: detail}
}

// handle answers one message; nil means that there is nothing to answer. It may be called by any number of
// goroutines.
func (f *Filter) handle(q *query) (reply []byte) {
	if len(q.raw) < headerLen {
		f.drop(q, "shorter than a DNS header")
		return nil
	}
	if binary.BigEndian.Uint16(q.raw[2:])&flagQR != 0 {
		f.drop(q, "an answer, not a query")
		return nil
	}
	defer func() { // a hostile message must never end the filter for everybody else
		if p := recover(); p != nil {
			f.cfg.Log.Error("handling a message", "panic", fmt.Sprint(p), "source", q.src.String())
			f.record(q, refused(reason.Internal, "the message could not be handled"))
			reply = headerOnly(q.raw, dns.RcodeServerFailure)
		}
	}()
	var m dns.Msg
	err := m.Unpack(q.raw)
	a := f.judge(q, &m, err)
	f.record(q, a)
	if err != nil || len(m.Question) != 1 {
		return headerOnly(q.raw, a.rcode)
	}
	out, err := a.pack(&m, q.tcp)
	if err != nil {
		f.cfg.Log.Error("packing an answer", "error", err, "name", a.name)
		return headerOnly(q.raw, dns.RcodeServerFailure)
	}
	return out
}

// headerOnly answers a message whose body cannot be trusted: its id, opcode and RD bit, and a code.
func headerOnly(raw []byte, rcode int) []byte {
	out := make([]byte, headerLen)
	copy(out, raw[:2])
	flags := binary.BigEndian.Uint16(raw[2:])
	binary.BigEndian.PutUint16(out[2:], flagQR|flags&(opcodeMask|flagRD)|uint16(rcode)&0xF) // four bits
	return out
}

// judge decides. The order matters: who asks comes before what is asked.
func (f *Filter) judge(q *query, m *dns.Msg, unpackErr error) *answer {
	var a *answer
	switch {
	case q.kid == nil:
		a = refused(reason.UnknownSession, "")
	case !q.kid.limit.allow(time.Now()):
		a = refused(reason.RateLimit, fmt.Sprintf("more than %.0f queries a second", f.cfg.Rate))
	case unpackErr != nil:
		return formerr(unpackErr.Error())
	default:
		if a = checkForm(q.raw, m); a == nil {
			a = f.lookup(q.kid, m.Question[0])
		}
	}
	if len(m.Question) > 0 {
		if a.name == "" { // refused before anybody looked at the name
			a.name = strings.TrimSuffix(strings.ToLower(m.Question[0].Name), ".")
		}
		a.qtype = dns.Type(m.Question[0].Qtype).String()
	}
	return a
}

// checkForm refuses everything that is not one plain question (RFC 1035, 6891, 9619); nil means that it is.
func checkForm(raw []byte, m *dns.Msg) *answer {
	count := func(section int) uint16 { return binary.BigEndian.Uint16(raw[4+2*section:]) }
	if m.Opcode != dns.OpcodeQuery {
		return &answer{rcode: dns.RcodeNotImplemented, code: reason.QueryType, detail: fmt.Sprintf("opcode %d", m.Opcode)}
	}
	if count(0) != 1 || len(m.Question) != 1 {
		return formerr(fmt.Sprintf("%d questions", count(0)))
	}
	if count(1) != 0 || count(2) != 0 {
		return formerr("a query with answers in it")
	}
	if int(count(3)) != len(m.Extra) { // the library forgives a count that lies
		return formerr("fewer records than the header says")
	}
	opts := 0
	for _, rr := range m.Extra {
		if opt, ok := rr.(*dns.OPT); ok {
			opts++
			if opt.Hdr.Name != "." {
				return formerr("an OPT record with a name")
			}
		}
	}
	if opts > 1 {
		return formerr("more than one OPT record")
	}
	if opt := m.IsEdns0(); opt != nil && opt.Version() != 0 {
		return &answer{rcode: dns.RcodeBadVers, code: reason.QueryType, detail: fmt.Sprintf("EDNS version %d", opt.Version())}
	}
	return checkType(m.Question[0])
}

// checkType refuses the classes and types that ask for something else than records of a name.
func checkType(q dns.Question) *answer {
	switch {
	case q.Qtype == dns.TypeNone || q.Qtype == dns.TypeOPT || q.Qclass == 0:
		return formerr("a question without a type or class")
	case q.Qclass != dns.ClassINET:
		return refused(reason.QueryType, "class "+dns.Class(q.Qclass).String())
	case q.Qtype >= 128 && q.Qtype <= 255 && q.Qtype != dns.TypeANY: // RFC 6895 section 3.1: Q and meta types
		return refused(reason.QueryType, "a type that asks for more than records of a name")
	}
	return nil
}

// lookup answers a well-formed question of a known session.
func (f *Filter) lookup(k *kid, q dns.Question) *answer {
	if addr, ok := virtualPTR(q, f.cfg.Virtual); ok {
		return k.reverse(q, addr)
	}
	name, d := k.policy.Lookup(q.Name)
	if tokenshape.First(q.Name) != "" { // whatever else is said about it
		d = policy.Decision{Reason: reason.TokenScope, Detail: "a token in a name that is looked up"}
	}
	if d.Verdict != policy.Allow {
		a := refused(d.Reason, d.Detail)
		a.name = name
		if d.Rule != nil {
			a.rule = d.Rule.Line
		}
		return a
	}
	a := &answer{name: name, rule: d.Rule.Line}
	if err := checkWildcard(name, d.Rule.Host); err != nil { // whatever the type: one answer for one name
		a.rcode, a.code, a.detail = dns.RcodeRefused, reason.WildcardLimit, err.Error()
		return a
	}
	switch q.Qtype {
	case dns.TypeA:
		addr, code, err := k.address(name)
		if err != nil {
			a.rcode, a.code, a.detail = dns.RcodeRefused, code, err.Error()
			return a
		}
		a.addr = addr
		a.records = []dns.RR{&dns.A{Hdr: header(q, dns.TypeA), A: addr.AsSlice()}}
	case dns.TypeANY: // RFC 8482 section 4.2
		a.records = []dns.RR{&dns.HINFO{Hdr: header(q, dns.TypeHINFO), Cpu: "RFC8482"}}
	default:
		a.authority = []dns.RR{soa(q)}
	}
	return a
}

// virtualPTR returns the virtual address whose name q asks for.
func virtualPTR(q dns.Question, virtual netip.Prefix) (netip.Addr, bool) {
	if q.Qtype != dns.TypePTR {
		return netip.Addr{}, false
	}
	rest, ok := strings.CutSuffix(strings.ToLower(q.Name), ".in-addr.arpa.")
	octets := strings.Split(rest, ".")
	if !ok || len(octets) != 4 {
		return netip.Addr{}, false
	}
	addr, err := netip.ParseAddr(octets[3] + "." + octets[2] + "." + octets[1] + "." + octets[0])
	return addr, err == nil && virtual.Contains(addr)
}

func (k *kid) reverse(q dns.Question, addr netip.Addr) *answer {
	name, ok := k.nameOf(addr)
	if !ok {
		return refused(reason.VirtualUnknown, "")
	}
	return &answer{addr: addr, records: []dns.RR{&dns.PTR{Hdr: header(q, dns.TypePTR), Ptr: name + "."}}}
}

func header(q dns.Question, rrtype uint16) dns.RR_Header {
	return dns.RR_Header{Name: q.Name, Rrtype: rrtype, Class: dns.ClassINET, Ttl: ttl}
}

// soa makes an empty answer cacheable (RFC 2308).
func soa(q dns.Question) *dns.SOA {
	return &dns.SOA{Hdr: header(q, dns.TypeSOA), Ns: soaMaster, Mbox: soaMail, Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: ttl}
}

// pack makes the reply to m. The question goes back as it came, letter case included.
func (a *answer) pack(m *dns.Msg, tcp bool) ([]byte, error) {
	r := new(dns.Msg).SetReply(m)
	r.Rcode = a.rcode
	r.RecursionAvailable = true
	r.Answer, r.Ns = a.records, a.authority
	r.Compress = true
	size := dns.MinMsgSize
	if opt := m.IsEdns0(); opt != nil {
		r.Extra = []dns.RR{a.opt(opt.Do())}
		size = int(min(max(opt.UDPSize(), dns.MinMsgSize), maxUDP))
	}
	if tcp {
		size = dns.MaxMsgSize
	}
	r.Truncate(size)
	return r.Pack()
}

// opt is the OPT record of the reply, with the reason of a refusal in words (RFC 8914).
func (a *answer) opt(do bool) *dns.OPT {
	opt := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT}}
	opt.SetUDPSize(maxUDP)
	if do {
		opt.SetDo()
	}
	if a.rcode != dns.RcodeRefused {
		return opt
	}
	info := dns.ExtendedErrorCodeBlocked
	switch a.code {
	case reason.UnknownSession, reason.PolicyNotLoaded, reason.RateLimit, reason.QueryType, reason.Capacity, reason.Internal:
		info = dns.ExtendedErrorCodeProhibited
	}
	opt.Option = []dns.EDNS0{&dns.EDNS0_EDE{InfoCode: info, ExtraText: a.code.String() + ": " + a.code.Info().Text}}
	return opt
}
