// Package session holds the document that describes one living session, and the directory in which the
// documents lie. sandboxd alone writes it; every other daemon reads it when it starts and denies whatever is
// not there. A document carries no secret values.
package session

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"tagout/internal/policy"
	"tagout/internal/trip"
	"tagout/internal/wire"
)

// The networks of a session whose kid has not the usual one, a link to its gateway.
const (
	NetworkNone = "none" // no interface at all
	NetworkHost = "host" // the machine's own network namespace; a person has approved it
)

// Reach is what a kid on the machine's network may connect to.
type Reach struct {
	To   netip.Prefix `json:"to"` // IPv4
	Port uint16       `json:"port"`
}

// Version is the document version that this build writes and the only one that it reads.
const Version = 1

// SecretBit is set, beside the session's own mark, in the mark of every upstream socket whose requests carry a secret.
// The kernel drops what such a socket sends once the session's secrets are revoked there.
const SecretBit = 1 << 24

// Session is one kid's life from spawn to destroy.
type Session struct {
	Version    int            `json:"version"`
	ID         string         `json:"id"`  // ULID
	Kid        string         `json:"kid"` // unique among living kids of the instance
	Purpose    string         `json:"purpose"`
	Card       string         `json:"card"`               // the card's name
	CardHash   string         `json:"card_hash"`          // sha256 of the card's bytes, hex
	Index      int            `json:"index"`              // 1 to instance.MaxKids: address, link and uid range follow from it
	Mark       uint32         `json:"mark"`               // SO_MARK of the session's upstream sockets
	Addr       netip.Addr     `json:"addr"`               // the kid's own address
	HostAddr   netip.Addr     `json:"host_addr"`          // the other end of its /31
	Network    string         `json:"network,omitempty"`  // NetworkNone, NetworkHost, or empty
	Reach      []Reach        `json:"reach,omitempty"`    // with NetworkHost: all that it may connect to, by TCP
	Approval   *wire.Approval `json:"approval,omitempty"` // with NetworkHost: who approved it
	Link       string         `json:"link"`               // host-side interface; empty where it has none of its own
	NetNS      string         `json:"netns"`              // path of the pinned network namespace; empty with NetworkHost
	Cgroup     string         `json:"cgroup"`             // absolute directory of the kid's cgroup in the v2 hierarchy
	CgroupID   uint64         `json:"cgroup_id"`          // its inode number, which is its id in BPF
	Freezer    string         `json:"freezer,omitempty"`  // its directory in a v1 freezer hierarchy, on hybrid machines
	Generation uint64         `json:"generation"`         // grows with every policy change
	Egress     policy.Spec    `json:"egress"`
	Names      []string       `json:"names,omitempty"`   // exact host names in the order of their virtual addresses; only ever appended to
	Secrets    []Secret       `json:"secrets,omitempty"` // what the card's identity section asks for
	Mints      []Mint         `json:"mints,omitempty"`   // and the tokens of the box's own issuer
	Stop       Stop           `json:"stop"`
	Created    time.Time      `json:"created"`
	Boot       time.Duration  `json:"boot_ns"` // CLOCK_BOOTTIME when it was created: what counts towards deadlines
}

// Secret is one entry of a card's identity scope. The kid sees a token in Env; its value stays in credd.
type Secret struct {
	Name string `json:"name"` // in the vault
	Env  string `json:"env"`  // environment variable that carries the token
}

// Mint is one entry of a card's identity.mint: JWTs of the box's own issuer, for one service of the user's.
type Mint struct {
	Name     string        `json:"name"` // as a secret's, and no secret of the session has it
	Audience string        `json:"audience"`
	Scope    []string      `json:"scope,omitempty"`
	Lifetime time.Duration `json:"lifetime_ns,omitempty"` // of each JWT; 0: the box's own
	Hosts    []string      `json:"hosts,omitempty"`       // "name:port" where the proxy puts a JWT in the token's place; with Env
	Env      string        `json:"env,omitempty"`         // environment variable that carries an opaque token; empty with File
	File     string        `json:"file,omitempty"`        // absolute, below the workspace: holds a JWT itself; empty with Env
}

// NotKey says that something which looks like a long-lived key is none, in one file or one variable.
type NotKey struct {
	File   string `json:"file,omitempty"` // a path in the kid, or a path.Match pattern of paths; empty with Env
	Env    string `json:"env,omitempty"`  // a variable; empty with File
	Rule   string `json:"rule"`           // gitleaks' id of the rule that found it
	Reason string `json:"reason"`         // for the record
}

// Stop is the card's stop section.
type Stop struct {
	Authority string        `json:"authority"` // the named person
	MaxTime   time.Duration `json:"max_time"`  // nanoseconds; the SLA that drills judge against
	Trip      []trip.Rule   `json:"trip,omitempty"`
	Lease     Lease         `json:"lease,omitzero"`
}

// Lease says what happens when the lease on which the kid lives runs out.
type Lease struct {
	Fires []wire.Layer `json:"fires,omitempty"` // the layers that fire then; empty: all three
}

// Check says whether the document is whole. Readers refuse a session that fails it.
func (s *Session) Check() error {
	switch {
	case s.Version != Version:
		return fmt.Errorf("session %s: version %d, this build reads %d", s.ID, s.Version, Version)
	case s.ID == "" || s.Kid == "":
		return fmt.Errorf("session document without id or kid")
	case s.Mark == 0:
		return fmt.Errorf("session %s: no mark", s.ID)
	case !s.Addr.Is4() || !s.HostAddr.Is4():
		return fmt.Errorf("session %s: no IPv4 addresses", s.ID)
	case s.Network == NetworkHost && (s.Approval == nil || s.Approval.By == ""):
		return fmt.Errorf("session %s: it is on the machine's network, and nobody has approved that", s.ID)
	case s.Cgroup == "" || s.CgroupID == 0:
		return fmt.Errorf("session %s: no cgroup", s.ID)
	}
	return nil
}

// AddNames appends the hosts that are not in Names yet, in the order given. Names that a policy no longer
// allows stay: their addresses must never come to mean something else.
func (s *Session) AddNames(hosts []string) {
	for _, h := range hosts {
		if !slices.Contains(s.Names, h) {
			s.Names = append(s.Names, h)
		}
	}
}

// Canaries returns the deny rules that follow from trip rules.
func Canaries(rules []trip.Rule) []policy.DenyRule {
	var out []policy.DenyRule
	for _, r := range rules {
		for _, name := range r.Names {
			out = append(out, policy.DenyRule{Host: name, Canary: true})
		}
	}
	return out
}
