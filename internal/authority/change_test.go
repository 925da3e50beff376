package authority

import (
	"strings"
	"testing"
	"time"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestOrdersThatChangeEgress: each says exactly what its action needs, and takes the role grant.
func TestOrdersThatChangeEgress(t *testing.T) {
	t.Parallel()
	ada, bob := makePerson(t, "ada", RoleGrant), makePerson(t, "bob", RoleStop, RoleRelease, RoleSpawn)
	list := List{Box: box, People: []Person{ada.Person, bob.Person}}
	door := Door{Host: "a.test", Port: 443, For: time.Hour}
	good := map[string]Order{
		"grant":   {Action: ActionGrant, Kid: "k", Door: door},
		"ungrant": {Action: ActionUngrant, Kid: "k", Grant: stop1},
		"policy":  {Action: ActionPolicy, Kid: "k", Card: strings.Repeat("0f", 32)},
	}
	complete := func(o Order, by string) Order {
		o.Box, o.By, o.Reason = box, by, "r"
		return New(o, now, Life)
	}
	for name, o := range good {
		raw, err := Sign(complete(o, "ada"), ada.private)
		if err != nil {
			t.Fatal(err)
		}
		if s, err := list.Verify(raw, now); err != nil || s.Kid != "k" || Peek(raw) != o.Action {
			t.Errorf("%s: %+v, %v; peeked %q", name, s, err, Peek(raw))
		}
		raw, err = Sign(complete(o, "bob"), bob.private)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := list.Verify(raw, now); err == nil || refusalOf(t, err).Code != reason.OrderRole || !strings.Contains(err.Error(), "ada may") {
			t.Errorf("%s without the role: %v", name, err)
		}
	}
	for name, change := range map[string]func(*Order){
		"a stop's scope":     func(o *Order) { o.Scope = wire.Scope{All: true} },
		"a stop's layers":    func(o *Order) { o.Layers = wire.AllLayers() },
		"a release's tag":    func(o *Order) { o.Stop = stop1 },
		"through a fleet":    func(o *Order) { o.Via = ViaFleet },
		"no kid":             func(o *Order) { o.Kid = "" },
		"a kid that hides":   func(o *Order) { o.Kid = "k\x1b" },
		"two things at once": func(o *Order) { o.Door, o.Grant, o.Card = door, stop1, strings.Repeat("0f", 32) },
		"nothing":            func(o *Order) { o.Door, o.Grant, o.Card = Door{}, "", "" },
		"another action":     func(o *Order) { o.Action = ActionRelease },
		"no port":            func(o *Order) { o.Door.Port = 0; o.Grant, o.Card = "", "xyz" },
	} {
		for what, o := range good {
			o = complete(o, "ada")
			change(&o)
			raw := signText(t, text(t, o), ada.private)
			if _, err := list.Verify(raw, now); err == nil || refusalOf(t, err).Code != reason.OrderInvalid {
				t.Errorf("%s with %s: %v", what, name, err)
			}
		}
	}
	stop := stopOrder("bob")
	stop.Kid = "k"
	if _, err := list.Verify(signText(t, text(t, stop), bob.private), now); err == nil || refusalOf(t, err).Code != reason.OrderInvalid {
		t.Errorf("a stop that names a kid for its egress: %v", err)
	}
}
