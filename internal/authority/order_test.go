package authority

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

const (
	box   = "01JD0000000000000000000000"
	stop1 = "01JD0000000000000000000001"
)

// now is far from any real clock, so that nothing reads one.
var now = time.Date(2031, 5, 4, 3, 2, 1, 0, time.UTC)

// person is somebody with a key.
type person struct {
	Person
	private string
}

func makePerson(t testing.TB, name string, roles ...string) person {
	t.Helper()
	private, public, err := NewKey(name)
	if err != nil {
		t.Fatal(err)
	}
	return person{Person{Name: name, Roles: roles, Key: public}, private}
}

func stopOrder(by string) Order {
	return New(Order{Action: ActionStop, Box: box, Scope: wire.Scope{All: true}, By: by, Reason: "odd mails"}, now, Life)
}

func releaseOrder(by string) Order {
	return New(Order{Action: ActionRelease, Box: box, Stop: stop1, By: by, Reason: "found it"}, now, Life)
}

// signText signs any text, also what Sign would refuse.
func signText(t testing.TB, text string, private ...string) []byte {
	t.Helper()
	var signers []note.Signer
	for _, p := range private {
		s, err := note.NewSigner(p)
		if err != nil {
			t.Fatal(err)
		}
		signers = append(signers, s)
	}
	raw, err := note.Sign(&note.Note{Text: text}, signers...)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func text(t testing.TB, o Order) string {
	t.Helper()
	raw, err := o.text()
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func refusalOf(t testing.TB, err error) *Refusal {
	t.Helper()
	var no *Refusal
	if !errors.As(err, &no) {
		t.Fatalf("%v is no refusal", err)
	}
	return no
}

func TestVerify(t *testing.T) {
	t.Parallel()
	ada, bob := makePerson(t, "Ada Operator", RoleStop, RoleRelease), makePerson(t, "Bob", RoleStop)
	eve, gone := makePerson(t, "Eve", RoleStop), makePerson(t, "Gone", RoleStop, RoleRelease)
	gone.ValidUntil = now
	imposter := makePerson(t, "Ada Operator", RoleStop)
	list := List{Box: box, People: []Person{ada.Person, {Name: "No Key", Roles: []string{RoleRelease}}, bob.Person, gone.Person}}
	change := func(o Order, fn func(*Order)) Order { fn(&o); return o }
	for name, c := range map[string]struct {
		raw  []byte
		code reason.Code // OK: accepted
		text string
	}{
		"stop":             {signText(t, text(t, stopOrder("Ada Operator")), ada.private), reason.OK, ""},
		"release":          {signText(t, text(t, releaseOrder("Ada Operator")), ada.private), reason.OK, ""},
		"via a fleet":      {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Via = ViaFleet })), bob.private), reason.OK, ""},
		"one layer":        {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Layers = []wire.Layer{wire.LayerNetwork} })), bob.private), reason.OK, ""},
		"clock ahead":      {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { *o = shift(*o, Skew) })), bob.private), reason.OK, ""},
		"too far ahead":    {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { *o = shift(*o, Skew+time.Second) })), bob.private), reason.OrderExpired, "1m1s in the future"},
		"last moment":      {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { *o = shift(*o, time.Second-Life) })), bob.private), reason.OK, ""},
		"expired":          {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { *o = shift(*o, -Life) })), bob.private), reason.OrderExpired, "sign a new one"},
		"longest life":     {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Expires = o.Issued.Add(MaxLife) })), bob.private), reason.OK, ""},
		"too long":         {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Expires = o.Issued.Add(MaxLife + time.Second) })), bob.private), reason.OrderExpired, "at most 1h"},
		"ends first":       {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Expires = o.Issued })), bob.private), reason.OrderExpired, "at most 1h"},
		"another box":      {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Box = stop1 })), bob.private), reason.OrderBox, "this one is " + box},
		"no box":           {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Box = "" })), bob.private), reason.OrderBox, "another box"},
		"no role":          {signText(t, text(t, releaseOrder("Bob")), bob.private), reason.OrderRole, "Bob does not hold the role release on this box: Ada Operator may"},
		"ended":            {signText(t, text(t, releaseOrder("Gone")), gone.private), reason.OrderRole, "an authority until 2031-05-04T03:02:01Z"},
		"in another name":  {signText(t, text(t, stopOrder("Ada Operator")), bob.private), reason.OrderKey, "Bob signed it"},
		"on no list":       {signText(t, text(t, stopOrder("Eve")), eve.private), reason.OrderKey, "not on this box's authority list"},
		"a key made anew":  {signText(t, text(t, stopOrder("Ada Operator")), imposter.private), reason.OrderKey, "not on this box's authority list"},
		"two signatures":   {signText(t, text(t, stopOrder("Bob")), bob.private, ada.private), reason.OrderInvalid, "one signature: 2"},
		"an unknown too":   {signText(t, text(t, stopOrder("Bob")), bob.private, eve.private), reason.OrderInvalid, "one signature: 2"},
		"changed":          {bytes.Replace(signText(t, text(t, stopOrder("Bob")), bob.private), []byte("odd mails"), []byte("odd males"), 1), reason.OrderKey, "does not fit"},
		"no note":          {[]byte("stop everything\n"), reason.OrderInvalid, "no signed order"},
		"nothing":          {nil, reason.OrderInvalid, "no signed order"},
		"too many bytes":   {make([]byte, MaxNote+1), reason.OrderInvalid, "longer than"},
		"another header":   {signText(t, strings.Replace(text(t, stopOrder("Bob")), "/v1", "/v2", 1), bob.private), reason.OrderInvalid, "does not begin"},
		"some other note":  {signText(t, "go.sum database tree\n42\n", bob.private), reason.OrderInvalid, "does not begin"},
		"spaces":           {signText(t, strings.Replace(text(t, stopOrder("Bob")), `{"action"`, `{ "action"`, 1), bob.private), reason.OrderInvalid, "canonical"},
		"a second line":    {signText(t, text(t, stopOrder("Bob"))+"\n", bob.private), reason.OrderInvalid, "canonical"},
		"a field twice":    {signText(t, strings.Replace(text(t, stopOrder("Bob")), `{"action":"stop"`, `{"action":"release","action":"stop"`, 1), bob.private), reason.OrderInvalid, "canonical"},
		"unknown field":    {signText(t, strings.Replace(text(t, stopOrder("Bob")), `{"action"`, `{"x":1,"action"`, 1), bob.private), reason.OrderInvalid, "canonical"},
		"other case":       {signText(t, strings.Replace(text(t, stopOrder("Bob")), `"action"`, `"Action"`, 1), bob.private), reason.OrderInvalid, "canonical"},
		"local time":       {signText(t, strings.Replace(text(t, stopOrder("Bob")), "03:02:01Z", "04:02:01+01:00", 1), bob.private), reason.OrderInvalid, "UTC"},
		"unknown action":   {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Action = "promote" })), bob.private), reason.OrderInvalid, "only for stop, release, grant"},
		"two scopes":       {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Scope.Kid = "k1" })), bob.private), reason.OrderInvalid, "exactly one"},
		"no scope":         {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Scope = wire.Scope{} })), bob.private), reason.OrderInvalid, "exactly one"},
		"stop of a tag":    {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Stop = stop1 })), bob.private), reason.OrderInvalid, "exactly one"},
		"no such layer":    {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Layers = []wire.Layer{"mind"} })), bob.private), reason.OrderInvalid, "no layer is called"},
		"release of what":  {signText(t, text(t, change(releaseOrder("Bob"), func(o *Order) { o.Stop = "" })), bob.private), reason.OrderInvalid, "does not say of which stop"},
		"release of all":   {signText(t, text(t, change(releaseOrder("Bob"), func(o *Order) { o.Scope.All = true })), bob.private), reason.OrderInvalid, "neither scope nor layers"},
		"no id":            {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.ID = "" })), bob.private), reason.OrderInvalid, "no ULID"},
		"id, lower case":   {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.ID = strings.ToLower(o.ID) })), bob.private), reason.OrderInvalid, "no ULID"},
		"no reason":        {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Reason = " " })), bob.private), reason.OrderInvalid, "reason is empty"},
		"control bytes":    {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Reason = "\x1b[2J" })), bob.private), reason.OrderInvalid, "control characters"},
		"an unknown way":   {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Via = "pigeon" })), bob.private), reason.OrderInvalid, "no known way"},
		"half a second":    {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Issued = o.Issued.Add(time.Millisecond) })), bob.private), reason.OrderInvalid, "whole seconds"},
		"a reason in HTML": {signText(t, text(t, change(stopOrder("Bob"), func(o *Order) { o.Reason = "<b>&\u2028" })), bob.private), reason.OrderInvalid, "control characters"},
	} {
		got, err := list.Verify(c.raw, now)
		if c.code == reason.OK {
			if err != nil || got.By == "" || got.Key == "" || got.Note != string(c.raw) {
				t.Errorf("%s: %+v, %v", name, got, err)
			}
			continue
		}
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		if no := refusalOf(t, err); no.Code != c.code || !strings.Contains(no.Text, c.text) {
			t.Errorf("%s: %s %q, want %s %q", name, no.Code, no.Text, c.code, c.text)
		}
	}
	// Nobody is known, or the box has no id: nothing is accepted.
	raw := signText(t, text(t, stopOrder("Bob")), bob.private)
	for name, l := range map[string]List{"nobody": {Box: box}, "no id": {People: list.People}, "a broken key": {Box: box, People: []Person{{Name: "Bob", Roles: []string{RoleStop}, Key: "Bob+x"}}}} {
		if _, err := l.Verify(raw, now); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func shift(o Order, by time.Duration) Order {
	o.Issued, o.Expires = o.Issued.Add(by), o.Expires.Add(by)
	return o
}

// TestOneBitIsEnough: whatever bit of a signed order is turned, it is no longer accepted, or it says the same.
func TestOneBitIsEnough(t *testing.T) {
	t.Parallel()
	ada := makePerson(t, "ada", RoleStop)
	list := List{Box: box, People: []Person{ada.Person}}
	o := stopOrder("ada")
	raw, err := Sign(o, ada.private)
	if err != nil {
		t.Fatal(err)
	}
	for i := range raw {
		for bit := range 8 {
			bad := bytes.Clone(raw)
			bad[i] ^= 1 << bit
			got, err := list.Verify(bad, now)
			if err == nil && text(t, got.Order) != text(t, o) {
				t.Fatalf("bit %d of byte %d turned (%q) and accepted as another order", bit, i, bad[i])
			}
			if err != nil {
				refusalOf(t, err)
			}
		}
	}
}

// TestWhatIsSignedIsRead: any order that Sign signs, Verify reads back as it was.
func TestWhatIsSignedIsRead(t *testing.T) {
	t.Parallel()
	ada := makePerson(t, "ada", RoleStop, RoleRelease)
	list := List{Box: box, People: []Person{ada.Person}}
	r := rand.New(rand.NewPCG(1, 2))
	word := func() string {
		runes := []rune("ab é<>&\"\\'{}日— +")
		var b strings.Builder
		b.WriteRune('x')
		for range r.IntN(30) {
			b.WriteRune(runes[r.IntN(len(runes))])
		}
		return b.String()
	}
	for range 500 {
		o := Order{Action: ActionRelease, Box: box, By: "ada", Reason: word(), Stop: stop1}
		if r.IntN(2) == 0 {
			o.Action, o.Stop = ActionStop, ""
			o.Scope = []wire.Scope{{Kid: word()}, {Card: word()}, {All: true}}[r.IntN(3)]
			o.Layers = [][]wire.Layer{nil, {wire.LayerNetwork}, wire.AllLayers()}[r.IntN(3)]
		}
		o = New(o, now, time.Duration(1+r.IntN(3600))*time.Second)
		raw, err := Sign(o, ada.private)
		if err != nil {
			t.Fatalf("%+v: %v", o, err)
		}
		got, err := list.Verify(raw, now)
		if err != nil || text(t, got.Order) != text(t, o) {
			t.Fatalf("%+v\n%+v\n%v", got.Order, o, err)
		}
	}
}

// FuzzParse feeds the parser what a signer could have signed: it never panics, and what it takes it writes back in
// the same bytes.
func FuzzParse(f *testing.F) {
	f.Add([]byte(text(f, stopOrder("Ada Operator"))))
	f.Add([]byte(text(f, releaseOrder("Ada Operator"))))
	f.Add([]byte(header + "\n{}\n"))
	f.Add([]byte(header + "\nnull\n"))
	f.Add([]byte(header))
	f.Fuzz(func(t *testing.T, raw []byte) {
		o, err := parse(raw)
		if err != nil {
			refusalOf(t, err)
			return
		}
		if again := text(t, o); again != string(raw) {
			t.Fatalf("%q was read, and is written as %q", raw, again)
		}
		if !plain(o.By) || !plain(o.Reason) || o.ID == "" {
			t.Fatalf("accepted %+v", o)
		}
	})
}

// FuzzVerify feeds bytes as they come over the socket: without a signature nothing is accepted.
func FuzzVerify(f *testing.F) {
	ada := makePerson(f, "ada", RoleStop, RoleRelease)
	other := makePerson(f, "ada", RoleStop)
	list := List{Box: box, People: []Person{ada.Person}}
	f.Add(signText(f, text(f, stopOrder("ada")), other.private))
	f.Add([]byte("x\n\n— ada AAAAAA==\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if got, err := list.Verify(raw, now); err == nil {
			t.Fatalf("accepted %+v", got)
		} else {
			refusalOf(t, err)
		}
	})
}
