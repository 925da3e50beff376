package authority

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/oklog/ulid/v2"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Actions that an order can ask for.
const (
	ActionStop    = "stop"
	ActionRelease = "release"
	ActionGrant   = "grant"        // open a door for a kid
	ActionUngrant = "ungrant"      // take a grant back
	ActionPolicy  = "policy"       // give a kid another card's egress rules
	ActionSpawn   = "spawn"        // make a kid of a card
	ActionHost    = "host-network" // let the kid that is made of a card live on the machine's own network
)

// roleOf is the role that an action needs.
var roleOf = map[string]string{
	ActionStop: RoleStop, ActionRelease: RoleRelease, ActionGrant: RoleGrant, ActionUngrant: RoleGrant, ActionPolicy: RoleGrant,
	ActionSpawn: RoleSpawn, ActionHost: RoleHost,
}

// ViaFleet says that an order came through a fleet's channel and not from an operator at the box.
const ViaFleet = "fleet"

const (
	// Life is how long an order is good for unless its signer says otherwise.
	Life = 5 * time.Minute
	// MaxLife is the longest life that an order may have.
	MaxLife = time.Hour
	// Skew is how far ahead the signer's clock may be.
	Skew = time.Minute
	// HostLife is the longest life of an approval of the machine's network, and HostSkew how far ahead its signer's clock
	// may be.
	HostLife = 2 * time.Minute
	HostSkew = 5 * time.Second
	// MaxNote bounds a signed order's bytes.
	MaxNote = 16 << 10

	header  = "tagout-order/v1"
	maxText = 1024 // bytes of a name or reason
)

// limits bound an order in time.
type limits struct{ life, skew time.Duration }

// limitsOf returns the limits of the orders that ask for an action.
func limitsOf(action string) limits {
	if action == ActionHost {
		return limits{HostLife, HostSkew}
	}
	return limits{MaxLife, Skew}
}

// Order is what a person signs. Its times are wall clock, because they were read on another machine; they are
// whole seconds in UTC.
type Order struct {
	Action  string       `json:"action"`
	Box     string       `json:"box"`              // the id of the only box that may carry it out
	Scope   wire.Scope   `json:"scope,omitzero"`   // of a stop
	Layers  []wire.Layer `json:"layers,omitempty"` // of a stop; empty: all three
	Stop    string       `json:"stop,omitempty"`   // the tag that a release is about
	Kid     string       `json:"kid,omitempty"`    // whose egress is changed, or the name of the kid to make; empty: any
	Door    Door         `json:"door,omitzero"`    // of a grant
	Grant   string       `json:"grant,omitempty"`  // the id of the grant that is taken back
	Card    string       `json:"card,omitempty"`   // of a policy, a spawn or an approval: the SHA-256 of the card's text, hex
	By      string       `json:"by"`               // the signer's name on the box's authority list
	Reason  string       `json:"reason"`           // of a spawn or an approval: the kid's purpose
	ID      string       `json:"id"`               // ULID; an order is carried out once
	Via     string       `json:"via,omitempty"`
	Issued  time.Time    `json:"issued"`
	Expires time.Time    `json:"expires"`
}

// Door is what a grant opens.
type Door struct {
	Host     string        `json:"host"`
	Port     uint16        `json:"port"`
	Protocol string        `json:"protocol,omitempty"` // empty: as sandboxd chooses for the port
	For      time.Duration `json:"for_ns"`             // from when the order is carried out
}

// New completes an order: it gets an id of its own and is good from now for life.
func New(o Order, now time.Time, life time.Duration) Order {
	o.ID = ulid.MustNew(ulid.Timestamp(now), rand.Reader).String()
	o.Issued = now.UTC().Truncate(time.Second)
	o.Expires = o.Issued.Add(life).Truncate(time.Second)
	return o
}

// text is what is signed: a line that says what it is, and one line of JSON in the one form that encoding/json
// gives it.
func (o Order) text() ([]byte, error) {
	raw, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "%s\n%s\n", header, raw), nil
}

// parse reads what text wrote and nothing else: a text that says the same in other bytes is not an order.
func parse(text []byte) (Order, error) {
	head, rest, ok := bytes.Cut(text, []byte("\n"))
	if !ok || string(head) != header {
		return Order{}, refuse(reason.OrderInvalid, "this is no order that this version understands: it does not begin with %s", header)
	}
	var o Order
	if err := json.Unmarshal(rest, &o); err != nil {
		return Order{}, refuse(reason.OrderInvalid, "the order cannot be read: %v", err)
	}
	same, err := o.text()
	if err != nil || !bytes.Equal(same, text) {
		return Order{}, refuse(reason.OrderInvalid, "the order is not in its canonical form: make it with --key of the command that it is about")
	}
	if err := o.check(); err != nil {
		return Order{}, err
	}
	return o, nil
}

// check says whether the order can be understood. Who gave it, and whether now, is judged elsewhere.
func (o Order) check() error {
	if id, err := ulid.ParseStrict(o.ID); err != nil || id.String() != o.ID {
		return refuse(reason.OrderInvalid, "the order's id is no ULID")
	}
	for what, s := range map[string]string{"name": o.By, "reason": o.Reason} {
		if !plain(s) {
			return refuse(reason.OrderInvalid, "the order's %s is empty, longer than %d bytes or holds control characters", what, maxText)
		}
	}
	for _, at := range []time.Time{o.Issued, o.Expires} {
		if at.Location() != time.UTC || !at.Equal(at.Truncate(time.Second)) {
			return refuse(reason.OrderInvalid, "the order's times are not whole seconds in UTC")
		}
	}
	if o.Via != "" && o.Via != ViaFleet {
		return refuse(reason.OrderInvalid, "the order came via %q, which is no known way", clip(o.Via))
	}
	switch o.Action {
	case ActionGrant, ActionUngrant, ActionPolicy:
		return o.checkChange()
	case ActionSpawn, ActionHost:
		return o.checkSpawn()
	}
	if o.Kid != "" || o.Door != (Door{}) || o.Grant != "" || o.Card != "" {
		return refuse(reason.OrderInvalid, "a %s changes no kid's egress", clip(o.Action))
	}
	switch o.Action {
	case ActionStop:
		return o.checkStop()
	case ActionRelease:
		if o.Scope != (wire.Scope{}) || len(o.Layers) > 0 {
			return refuse(reason.OrderInvalid, "a release names the tag of a stop, and neither scope nor layers")
		}
		if id, err := ulid.ParseStrict(o.Stop); err != nil || id.String() != o.Stop {
			return refuse(reason.OrderInvalid, "the release does not say of which stop: `tagout tags` lists the tags that hang")
		}
		return nil
	}
	return refuse(reason.OrderInvalid, "an order cannot ask for %q: only for %s, %s, %s, %s, %s, %s or %s", clip(o.Action),
		ActionStop, ActionRelease, ActionGrant, ActionUngrant, ActionPolicy, ActionSpawn, ActionHost)
}

// checkChange is about the orders that change what a kid may reach: each says exactly what its action needs.
func (o Order) checkChange() error {
	if o.Scope != (wire.Scope{}) || len(o.Layers) > 0 || o.Stop != "" || o.Via != "" || !plain(o.Kid) {
		return refuse(reason.OrderInvalid, "a %s names one kid, and nothing that a stop or a release does", o.Action)
	}
	door, grant, card := o.Door != (Door{}), o.Grant != "", o.Card != ""
	if door != (o.Action == ActionGrant) || grant != (o.Action == ActionUngrant) || card != (o.Action == ActionPolicy) {
		return refuse(reason.OrderInvalid, "the order says something else than a %s needs", o.Action)
	}
	switch {
	case door && (!plain(o.Door.Host) || o.Door.Port == 0):
		return refuse(reason.OrderInvalid, "a grant names a host and a port")
	case grant && !plain(o.Grant):
		return refuse(reason.OrderInvalid, "the id of the grant holds control characters or is too long")
	case card:
		return o.checkCard()
	}
	return nil
}

func (o Order) checkCard() error {
	if len(o.Card) != 2*sha256.Size || strings.Trim(o.Card, "0123456789abcdef") != "" {
		return refuse(reason.OrderInvalid, "the order does not name a card by its SHA-256")
	}
	return nil
}

func (o Order) checkSpawn() error {
	if o.Scope != (wire.Scope{}) || len(o.Layers) > 0 || o.Stop != "" || o.Via != "" || o.Door != (Door{}) || o.Grant != "" {
		return refuse(reason.OrderInvalid, "a %s names a card and a kid, and nothing that another order does", o.Action)
	}
	if o.Kid == "" && o.Action == ActionHost {
		return refuse(reason.OrderInvalid, "an approval of the machine's network names one kid: give it a name")
	}
	if o.Kid != "" && !plain(o.Kid) {
		return refuse(reason.OrderInvalid, "the kid's name holds control characters or is too long")
	}
	return o.checkCard()
}

// CardSum is how an order names a card: the SHA-256 of its text, hex.
func CardSum(card string) string {
	sum := sha256.Sum256([]byte(card))
	return hex.EncodeToString(sum[:])
}

// Purpose makes one plain line of a text, as an order's reason has to be.
func Purpose(text string) string {
	line := strings.Join(strings.Fields(strings.ToValidUTF8(text, "?")), " ")
	for len(line) > maxText {
		_, last := utf8.DecodeLastRuneInString(line)
		line = line[:len(line)-last]
	}
	return line
}

// Peek says what a signed order asks for, if it is one. Nothing is verified: it tells a courier where to bring it.
func Peek(raw []byte) (action string) { return PeekOrder(raw).Action }

// PeekOrder returns what a signed order says of itself, as far as it can be read; Peek's caution holds.
func PeekOrder(raw []byte) (o Order) {
	_, rest, _ := bytes.Cut(raw, []byte("\n"))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	json.Unmarshal(line, &o) // not an order: whoever gets it says so
	return o
}

func (o Order) checkStop() error {
	n := 0
	for _, set := range []bool{o.Scope.Kid != "", o.Scope.Card != "", o.Scope.All} {
		if set {
			n++
		}
	}
	if n != 1 || o.Stop != "" {
		return refuse(reason.OrderInvalid, "the scope of a stop is exactly one of kid, card and all")
	}
	for _, l := range o.Layers {
		if !slices.Contains(wire.AllLayers(), l) {
			return refuse(reason.OrderInvalid, "no layer is called %q: use session, network or credential", clip(string(l)))
		}
	}
	return nil
}

// plain says whether a text may be shown to people as it is.
func plain(s string) bool {
	return strings.TrimSpace(s) != "" && len(s) <= maxText && utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}

// clip bounds what a message repeats of somebody else's text.
func clip(s string) string {
	if r := []rune(s); len(r) > 40 {
		return string(r[:40]) + "…"
	}
	return s
}
