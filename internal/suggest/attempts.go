package suggest

import (
	"net/netip"
	"strings"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// attempt is something that was refused; the same thing counts once, however often it was tried.
type attempt struct {
	code   reason.Code
	name   string // as it was recorded; empty for an address that no name stands for
	addr   netip.Addr
	port   uint16 // 0 for a lookup
	proto  policy.Protocol
	method string // a request
	path   string
	cutOff bool // the record does not hold the whole path
}

// tried is what a session was refused, in the order in which it came up first.
type tried struct {
	order []attempt
	count map[attempt]uint64
}

func (t *tried) add(a attempt, n uint64) {
	if t.count[a] == 0 {
		t.order = append(t.order, a)
	}
	t.count[a] += max(n, 1)
}

// collect reads the refusals out of a session's records. Virtual addresses get the names back that they were
// given out for.
func collect(records []audit.Record) tried {
	t := tried{count: map[attempt]uint64{}}
	names := map[netip.Addr]string{}
	for i := range records {
		r := &records[i]
		if r.Event == audit.EventLookup && r.Outcome == audit.OutcomeAllow && r.Dst != nil && r.Dst.Addr.IsValid() {
			names[r.Dst.Addr] = r.Dst.Name
		}
		if a, ok := attemptOf(r, names); ok {
			t.add(a, r.Count)
		}
	}
	return t
}

func attemptOf(r *audit.Record, names map[netip.Addr]string) (attempt, bool) {
	if r.Outcome != audit.OutcomeDeny {
		return attempt{}, false
	}
	a := attempt{code: r.Reason}
	if r.Dst != nil {
		a.name, a.addr, a.port = r.Dst.Name, r.Dst.Addr, r.Dst.Port
	}
	switch r.Event {
	case audit.EventLookup:
		a.addr, a.port = netip.Addr{}, 0
	case audit.EventConnectDenied:
		a.name = names[a.addr]
	case audit.EventConnOpened:
		a.proto = protocolOf(r)
	case audit.EventRequest:
		a.proto = protocolOf(r)
		a.method, a.path = r.Fields["method"], pathOf(r.Fields["path"])
		a.cutOff = strings.HasSuffix(a.path, "…")
	default:
		return attempt{}, false
	}
	if a.name != "" {
		a.addr = netip.Addr{}
	}
	return a, true
}

func protocolOf(r *audit.Record) policy.Protocol {
	switch p := policy.Protocol(r.Dst.Proto); p {
	case policy.TLS, policy.HTTP, policy.TCP:
		return p
	}
	return ""
}

// pathOf takes scheme and authority off a target in absolute form.
func pathOf(target string) string {
	if _, rest, found := strings.Cut(target, "://"); found && !strings.HasPrefix(target, "/") {
		if i := strings.IndexByte(rest, '/'); i >= 0 {
			return rest[i:]
		}
		return "/"
	}
	return target
}
