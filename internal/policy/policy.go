// Package policy decides: may this session look up this name, connect to this name and port, send this
// request, reach this upstream address? It is pure: no I/O, no clock, no globals. The proxy and the DNS
// filter both import it, so that there is one matcher and one way to spell a name.
package policy

import "net/netip"

// Protocol is what a rule lets a connection speak.
type Protocol string

// Protocols.
const (
	TLS  Protocol = "tls"
	HTTP Protocol = "http"
	TCP  Protocol = "tcp"
)

// Rule is one allow rule of a card's egress section, as the session document carries it.
type Rule struct {
	Host       string         `json:"host"`                 // canonical name; "*." and a suffix: one label more; "**." and a suffix: any number of labels more
	Ports      []uint16       `json:"ports"`                // never empty
	Protocol   Protocol       `json:"protocol"`             // never empty
	Inspect    bool           `json:"inspect,omitempty"`    // TLS only: decrypt and judge each request
	Methods    []string       `json:"methods,omitempty"`    // HTTP and inspected TLS only; empty means any
	Paths      []string       `json:"paths,omitempty"`      // globs on the canonical path; empty means any
	Credential string         `json:"credential,omitempty"` // the secret whose token may be swapped towards this host
	Addresses  []netip.Prefix `json:"addresses,omitempty"`  // private addresses that this host may resolve to
	MaxUp      int64          `json:"max_up,omitempty"`     // bytes from the kid on this rule in the whole session; 0: no limit
	MaxDown    int64          `json:"max_down,omitempty"`   // bytes to the kid, likewise
	Rate       int            `json:"rate,omitempty"`       // new connections a second, and requests where they are judged; 0: no limit
	Expires    int64          `json:"expires,omitempty"`    // CLOCK_BOOTTIME in ns from which on the rule is gone; 0: never
	Grant      string         `json:"grant,omitempty"`      // id of the grant that added the rule; empty: the card
	Line       int            `json:"line,omitempty"`       // in the card, for explanations
}

// Spec is the egress policy of one session. The zero value allows nothing.
type Spec struct {
	Allow  []Rule     `json:"allow,omitempty"` // of those for one host and port, the first that takes a request decides
	Deny   []DenyRule `json:"deny,omitempty"`  // always win
	Lapsed []Rule     `json:"-"`               // what At took out of Allow: opens nothing, explains refusals
}

// DenyRule refuses a host (exact, or a "*." or "**." pattern that means what it means in a Rule) or an address
// range, on some or all ports.
type DenyRule struct {
	Host    string       `json:"host,omitempty"`
	Address netip.Prefix `json:"address,omitzero"`
	Ports   []uint16     `json:"ports,omitempty"`  // empty means all
	Canary  bool         `json:"canary,omitempty"` // nobody has a reason to ask for the host: refused with a reason of its own
	Line    int          `json:"line,omitempty"`
}
