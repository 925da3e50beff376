package dnsfilter

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// Most queries are the same one: one plain question for the address of a name that a rule spells out. Those are
// read and answered here without building a message. Whatever is unusual in any way is left to handle, which
// gives the same answer (TestFastIsTheSame, FuzzFast).

// exactName is a name that the session's rules spell out. Immutable.
type exactName struct {
	name  string
	addr  netip.Addr
	raw   [4]byte // addr
	group string  // of its lookups in the tally
	key   string  // of its A lookups in the tally
	rule  int     // line of the rule that allows it
}

// exactNames returns the names among doc.Names that the policy allows, by their canonical form. Neither the policy
// nor what is returned ever changes: a newer policy, and one of which a rule ran out, is another kid's.
func (k *kid) exactNames() map[string]*exactName {
	out := make(map[string]*exactName, len(k.exact))
	for name, addr := range k.exact {
		_, d := k.policy.Lookup(name)
		if d.Verdict != policy.Allow || checkWildcard(name, d.Rule.Host) != nil {
			continue
		}
		out[name] = &exactName{name: name, addr: addr, raw: addr.As4(), group: k.group(audit.OutcomeAllow), key: lookupKey("A", name), rule: d.Rule.Line}
	}
	return out
}

// group is where the session's lookups of one outcome are counted.
func (k *kid) group(outcome string) string { return k.doc.ID + " " + outcome }

// lookupKey tells one session's allowed lookups apart.
func lookupKey(qtype, name string) string { return qtype + " " + name }

const (
	maxFastName = 253 // bytes without the last dot; more is no name
	optLen      = 11  // of an OPT record without options (RFC 6891 section 6.1.2)
	flagAD      = 1 << 5
	flagCD      = 1 << 4
	flagRA      = 1 << 7
	pointerName = 0xC000 | headerLen // a compressed name: that of the question (RFC 1035 section 4.1.4)
	ednsDO      = 1 << 15
)

// fast answers a plain question into buf and returns the answer; nil where the question is not plain, or not
// one that is simply allowed. buf has room for it: maxUDP bytes.
func (f *Filter) fast(q *query, buf []byte) []byte {
	if q.kid == nil || len(q.raw) < headerLen {
		return nil
	}
	flags := binary.BigEndian.Uint16(q.raw[2:])
	if flags&^(flagRD|flagAD|flagCD) != 0 || binary.BigEndian.Uint32(q.raw[4:]) != 1<<16 || binary.BigEndian.Uint16(q.raw[8:]) != 0 {
		return nil
	}
	var folded [maxFastName + 1]byte
	n, end := foldName(q.raw, &folded)
	if n == 0 || len(q.raw) < end+4 || binary.BigEndian.Uint32(q.raw[end:]) != uint32(dns.TypeA)<<16|dns.ClassINET {
		return nil
	}
	end += 4
	edns, do, ok := plainOPT(q.raw[end:], binary.BigEndian.Uint16(q.raw[10:]))
	if !ok {
		return nil
	}
	hit := q.kid.ready[string(folded[:n])]
	if hit == nil || !q.kid.limit.allow(time.Now()) {
		return nil // a refusal takes no second token: there is none
	}
	f.recordFast(q, hit)
	return packFast(append(buf[:0], q.raw[:end]...), flags, hit, edns, do)
}

// foldName reads the question's name into out, in lower case and without its last dot, and returns its length
// and where the name ends in raw; 0 where it is not made of plain labels.
func foldName(raw []byte, out *[maxFastName + 1]byte) (n, end int) {
	for at := headerLen; at < len(raw); {
		l := int(raw[at])
		at++
		if l == 0 {
			return max(n-1, 0), at
		}
		if l > 63 || at+l > len(raw) || n+l+1 > len(out) {
			return 0, 0
		}
		for _, c := range raw[at : at+l] {
			switch {
			case 'A' <= c && c <= 'Z':
				c += 'a' - 'A'
			case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_':
			default:
				return 0, 0
			}
			out[n] = c
			n++
		}
		out[n] = '.'
		n++
		at += l
	}
	return 0, 0
}

// plainOPT reads what follows the question: nothing, or one OPT record of version 0 without options.
func plainOPT(rest []byte, records uint16) (edns, do, ok bool) {
	switch {
	case records == 0:
		return false, false, len(rest) == 0
	case records != 1 || len(rest) != optLen || rest[0] != 0 || binary.BigEndian.Uint16(rest[1:]) != dns.TypeOPT:
		return false, false, false
	}
	ttl, length := binary.BigEndian.Uint32(rest[5:]), binary.BigEndian.Uint16(rest[9:])
	return true, ttl&ednsDO != 0, ttl&^ednsDO == 0 && length == 0
}

// packFast turns out, the question's header and question, into its answer.
func packFast(out []byte, flags uint16, hit *exactName, edns, do bool) []byte {
	binary.BigEndian.PutUint16(out[2:], flagQR|flagRA|flags&(flagRD|flagCD))
	binary.BigEndian.PutUint16(out[6:], 1)
	binary.BigEndian.PutUint16(out[10:], 0)
	out = binary.BigEndian.AppendUint16(out, pointerName)
	out = binary.BigEndian.AppendUint32(out, uint32(dns.TypeA)<<16|dns.ClassINET)
	out = binary.BigEndian.AppendUint32(out, ttl)
	out = append(binary.BigEndian.AppendUint16(out, 4), hit.raw[:]...)
	if !edns {
		return out
	}
	binary.BigEndian.PutUint16(out[10:], 1)
	out = binary.BigEndian.AppendUint16(append(out, 0), dns.TypeOPT)
	out = binary.BigEndian.AppendUint16(out, maxUDP)
	var bits uint32
	if do {
		bits = ednsDO
	}
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint32(out, bits), 0)
}

// recordFast counts the lookup; the first of a window is recorded as any other.
func (f *Filter) recordFast(q *query, hit *exactName) {
	if !f.tally.Again(hit.group, hit.key) {
		f.record(q, &answer{code: reason.OK, name: hit.name, qtype: "A", rule: hit.rule, addr: hit.addr})
		return
	}
	f.cfg.Metrics.Answered(q.proto(), reason.OK)
}
