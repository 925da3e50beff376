// Package authority judges orders: who may stop what, who may take which tag off, and whether an order is what a
// listed person signed for this box, now and for the first time.
//
// An order is a signed note (golang.org/x/mod/sumdb/note, ed25519). What the package promises: Verify returns an
// order only if its bytes are the canonical ones, exactly one key of the list signed them, the key's owner is the
// one whom the order names and holds the role, and the order is for this box and not out of date. That it is used
// once is Used's promise. What it does not promise: that whoever holds a key is its owner, and anything against a
// root user who edits the list.
//
// Invariant 10 of docs/threat-model.md rests on it. It imports little, because killswitchd is built on it, and reads files only where it is told to.
package authority

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/reason"
)

// Roles that a person can hold.
const (
	RoleSpawn   = "spawn"
	RoleGrant   = "grant"
	RoleStop    = "stop"
	RoleRelease = "release"
	RoleHost    = "host-network" // approve a kid on the machine's own network
)

// Person is one entry of the list.
type Person struct {
	Name       string    `json:"name"`
	Roles      []string  `json:"roles"`
	Key        string    `json:"key,omitempty"`        // note verifier key; empty: this person signs nothing
	ValidUntil time.Time `json:"valid_until,omitzero"` // wall clock; zero: no end
}

// May says whether the person holds the role and has not ended at now.
func (p Person) May(role string, now time.Time) bool {
	return slices.Contains(p.Roles, role) && !p.ended(now)
}

// MaySign says whether the person can sign an order that needs the role at now.
func (p Person) MaySign(role string, now time.Time) bool { return p.Key != "" && p.May(role, now) }

func (p Person) ended(now time.Time) bool { return !p.ValidUntil.IsZero() && !now.Before(p.ValidUntil) }

// List is the box's authority list. The zero value knows nobody.
type List struct {
	Box    string   `json:"box"` // ULID of the box
	People []Person `json:"people"`
}

// Find returns the person of that name.
func (l List) Find(name string) (Person, bool) {
	i := slices.IndexFunc(l.People, func(p Person) bool { return p.Name == name })
	if i < 0 {
		return Person{}, false
	}
	return l.People[i], true
}

// Signers returns the names of those who can sign an order that needs the role at now, in the list's order.
func (l List) Signers(role string, now time.Time) []string {
	var out []string
	for _, p := range l.People {
		if p.MaySign(role, now) {
			out = append(out, p.Name)
		}
	}
	return out
}

// Refusal is why an order is not carried out.
type Refusal struct {
	Code reason.Code
	Text string // for the one who gave it
}

func (r *Refusal) Error() string { return r.Text }

func refuse(code reason.Code, format string, args ...any) *Refusal {
	return &Refusal{code, fmt.Sprintf(format, args...)}
}

// Signed is an order that Verify has accepted.
type Signed struct {
	Order
	Key  string // id of the key that signed it; see KeyID
	Note string // the bytes that were signed, with the signature: anybody can check them later
}

// Verify reads a signed order and judges everything about it that needs no memory. now is the wall clock. An error
// is a *Refusal; what could be read of the order is returned with it where the signature was good.
func (l List) Verify(raw []byte, now time.Time) (Signed, error) {
	return verifier{open: note.Open, checks: checks}.verify(l, raw, now)
}

// verifier is what Verify is made of. Tests leave a part out, to see that nothing else does its work.
type verifier struct {
	open   func(raw []byte, known note.Verifiers) (*note.Note, error)
	checks []check
}

func (v verifier) verify(l List, raw []byte, now time.Time) (Signed, error) {
	if len(raw) > MaxNote {
		return Signed{}, refuse(reason.OrderInvalid, "the order is longer than %d bytes", MaxNote)
	}
	known, err := l.verifiers()
	if err != nil {
		return Signed{}, err
	}
	n, err := v.open(raw, known)
	if err != nil {
		no := explain(err)
		if no.Code == reason.OrderKey { // what the order asks for cannot be believed, so all who could give one are named
			no.Text += fmt.Sprintf("; stop: %s; release: %s; grant: %s", l.whoMay(RoleStop, now), l.whoMay(RoleRelease, now), l.whoMay(RoleGrant, now))
		}
		return Signed{}, no
	}
	if len(n.Sigs) != 1 || len(n.UnverifiedSigs) != 0 {
		return Signed{}, refuse(reason.OrderInvalid, "an order carries one signature: %d were found", len(n.Sigs)+len(n.UnverifiedSigs))
	}
	o, err := parse([]byte(n.Text))
	if err != nil {
		return Signed{}, err
	}
	s := Signed{Order: o, Key: SignatureID(n.Sigs[0]), Note: string(raw)}
	p, _ := l.Find(s.By) // nobody holds no key: the first check says so
	for _, c := range v.checks {
		if no := c.refuses(l, p, s, now); no != nil {
			return s, no
		}
	}
	return s, nil
}

// check is one part of the judgement whether the named person may give an order here and now. Its signature is good.
type check struct {
	name    string
	refuses func(l List, p Person, s Signed, now time.Time) *Refusal // nil: it does not
}

var checks = []check{
	{"owner", notTheOwner}, {"box", anotherBox}, {"future", fromTheFuture}, {"life", livesTooLong}, {"expiry", expired},
	{"role", withoutTheRole}, {"end", personEnded},
}

func notTheOwner(l List, p Person, s Signed, _ time.Time) *Refusal {
	if p.Key != "" && KeyID(p.Key) == s.Key {
		return nil
	}
	i := slices.IndexFunc(l.People, func(p Person) bool { return KeyID(p.Key) == s.Key })
	if i < 0 {
		return refuse(reason.OrderKey, "no listed person has the key %s", s.Key)
	}
	return refuse(reason.OrderKey, "the order says that %s gives it, and %s signed it", s.By, l.People[i].Name)
}

func anotherBox(l List, _ Person, s Signed, _ time.Time) *Refusal {
	if l.Box == "" || s.Box != l.Box {
		return refuse(reason.OrderBox, "the order is for another box: this one is %s", l.Box)
	}
	return nil
}

func fromTheFuture(_ List, _ Person, s Signed, now time.Time) *Refusal {
	if s.Issued.After(now.Add(limitsOf(s.Action).skew)) {
		return refuse(reason.OrderExpired, "the order was issued %v in the future: compare the clocks of both machines", s.Issued.Sub(now).Round(time.Second))
	}
	return nil
}

func livesTooLong(_ List, _ Person, s Signed, _ time.Time) *Refusal {
	if most := limitsOf(s.Action).life; !s.Expires.After(s.Issued) || s.Expires.Sub(s.Issued) > most {
		return refuse(reason.OrderExpired, "an order of this kind is good for at most %v: sign one that ends earlier", most)
	}
	return nil
}

func expired(_ List, _ Person, s Signed, now time.Time) *Refusal {
	if !now.Before(s.Expires) {
		return refuse(reason.OrderExpired, "the order expired at %s, %v ago: sign a new one", s.Expires.Format(time.RFC3339), now.Sub(s.Expires).Round(time.Second))
	}
	return nil
}

func withoutTheRole(l List, p Person, s Signed, now time.Time) *Refusal {
	if role := roleOf[s.Action]; !slices.Contains(p.Roles, role) {
		return refuse(reason.OrderRole, "%s does not hold the role %s on this box: %s", p.Name, role, l.whoMay(role, now))
	}
	return nil
}

func personEnded(l List, p Person, s Signed, now time.Time) *Refusal {
	if p.ended(now) {
		return refuse(reason.OrderRole, "%s was an authority until %s: %s", p.Name, p.ValidUntil.UTC().Format(time.RFC3339), l.whoMay(roleOf[s.Action], now))
	}
	return nil
}

// whoMay names those who could sign instead.
func (l List) whoMay(role string, now time.Time) string {
	names := l.Signers(role, now)
	if len(names) == 0 {
		return "nobody with a key does"
	}
	return strings.Join(names, ", ") + " may"
}

// verifiers are the keys of everybody on the list, of those whose time is over too: their orders are refused by
// name.
func (l List) verifiers() (note.Verifiers, error) {
	var out []note.Verifier
	for _, p := range l.People {
		if p.Key == "" {
			continue
		}
		v, err := note.NewVerifier(p.Key)
		if err != nil {
			return nil, refuse(reason.OrderKey, "the key of %s on the authority list cannot be read (%v): run `tagout setup` again", p.Name, err)
		}
		out = append(out, v)
	}
	if len(out) == 0 {
		return nil, refuse(reason.OrderKey, "this box knows no key: put `key:` lines under authorities in its configuration and run `tagout setup`")
	}
	return note.VerifierList(out...), nil
}

func explain(err error) *Refusal {
	var unknown *note.UnverifiedNoteError
	var bad *note.InvalidSignatureError
	switch {
	case errors.As(err, &unknown):
		id := ""
		if sigs := unknown.Note.UnverifiedSigs; len(sigs) > 0 {
			id = " " + clip(SignatureID(sigs[0]))
		}
		return refuse(reason.OrderKey, "the key%s that signed the order is not on this box's authority list", id)
	case errors.As(err, &bad):
		return refuse(reason.OrderKey, "the signature of %s does not fit the order: it was changed, or signed with another key", bad.Name)
	}
	return refuse(reason.OrderInvalid, "this is no signed order: %v", err)
}
