package authority

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestOrdersThatMakeKids: a spawn names a card and nothing that another order does, and takes the role spawn.
func TestOrdersThatMakeKids(t *testing.T) {
	t.Parallel()
	ada, bob := makePerson(t, "ada", RoleSpawn), makePerson(t, "bob", RoleStop, RoleRelease, RoleGrant)
	list := List{Box: box, People: []Person{ada.Person, bob.Person}}
	order := func(by string) Order {
		return New(Order{Action: ActionSpawn, Box: box, Card: CardSum("card"), By: by, Reason: "r"}, now, Life)
	}
	raw, err := Sign(order("ada"), ada.private)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := list.Verify(raw, now); err != nil || s.Card != CardSum("card") || Peek(raw) != ActionSpawn {
		t.Errorf("%+v, %v; peeked %q", s, err, Peek(raw))
	}
	if raw, err = Sign(order("bob"), bob.private); err != nil {
		t.Fatal(err)
	}
	if _, err := list.Verify(raw, now); err == nil || refusalOf(t, err).Code != reason.OrderRole || !strings.Contains(err.Error(), "ada may") {
		t.Errorf("without the role: %v", err)
	}
	for name, change := range map[string]func(*Order){
		"a stop's scope":   func(o *Order) { o.Scope = wire.Scope{All: true} },
		"a stop's layers":  func(o *Order) { o.Layers = wire.AllLayers() },
		"a release's tag":  func(o *Order) { o.Stop = stop1 },
		"through a fleet":  func(o *Order) { o.Via = ViaFleet },
		"a kid that hides": func(o *Order) { o.Kid = "k\x1b" },
		"a door":           func(o *Order) { o.Door = Door{Host: "a.test", Port: 443, For: time.Hour} },
		"a grant":          func(o *Order) { o.Grant = stop1 },
		"no card":          func(o *Order) { o.Card = "" },
		"half a card":      func(o *Order) { o.Card = o.Card[:32] },
		"a shouted card":   func(o *Order) { o.Card = strings.Repeat("A0", 32) },
	} {
		o := order("ada")
		change(&o)
		raw := signText(t, text(t, o), ada.private)
		if _, err := list.Verify(raw, now); err == nil || refusalOf(t, err).Code != reason.OrderInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPurposeIsOnePlainLine(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":                       "",
		" a\n\tb  c\r\n":         "a b c",
		"\xff":                   "?",
		strings.Repeat("é", 600): strings.Repeat("é", 512),
	} {
		if got := Purpose(in); got != want || !utf8.ValidString(got) || got != "" && !plain(got) {
			t.Errorf("Purpose(%q) = %q", in, got)
		}
	}
}
