package authority

import (
	"strings"
	"testing"
	"time"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestApprovalsOfTheMachinesNetwork: each names one card and one kid, lives two minutes at most, and takes a role that no
// other role stands for.
func TestApprovalsOfTheMachinesNetwork(t *testing.T) {
	t.Parallel()
	ada := makePerson(t, "ada", RoleHost)
	bob := makePerson(t, "bob", RoleSpawn, RoleGrant, RoleStop, RoleRelease)
	list := List{Box: box, People: []Person{ada.Person, bob.Person}}
	order := func(by string, change func(*Order)) Order {
		o := New(Order{Action: ActionHost, Box: box, Kid: "k1", Card: CardSum("card"), By: by, Reason: "r"}, now, HostLife)
		change(&o)
		return o
	}
	for name, c := range map[string]struct {
		by     person
		change func(*Order)
		code   reason.Code // OK: accepted
		text   string
	}{
		"good":                {ada, func(*Order) {}, reason.OK, ""},
		"shorter":             {ada, func(o *Order) { o.Expires = o.Issued.Add(time.Second) }, reason.OK, ""},
		"longer":              {ada, func(o *Order) { o.Expires = o.Issued.Add(HostLife + time.Second) }, reason.OrderExpired, "at most 2m0s"},
		"last moment":         {ada, func(o *Order) { *o = shift(*o, time.Second-HostLife) }, reason.OK, ""},
		"over":                {ada, func(o *Order) { *o = shift(*o, -HostLife) }, reason.OrderExpired, "sign a new one"},
		"a little ahead":      {ada, func(o *Order) { *o = shift(*o, HostSkew) }, reason.OK, ""},
		"ahead":               {ada, func(o *Order) { *o = shift(*o, HostSkew+time.Second) }, reason.OrderExpired, "in the future"},
		"every other role":    {bob, func(o *Order) { o.By = "bob" }, reason.OrderRole, "role host-network on this box: ada may"},
		"another box":         {ada, func(o *Order) { o.Box = stop1 }, reason.OrderBox, "another box"},
		"no kid":              {ada, func(o *Order) { o.Kid = "" }, reason.OrderInvalid, "one kid"},
		"a kid that hides":    {ada, func(o *Order) { o.Kid = "k\x1b" }, reason.OrderInvalid, "control characters"},
		"no card":             {ada, func(o *Order) { o.Card = "" }, reason.OrderInvalid, "SHA-256"},
		"a stop's scope":      {ada, func(o *Order) { o.Scope = wire.Scope{All: true} }, reason.OrderInvalid, "nothing that another order does"},
		"through a fleet":     {ada, func(o *Order) { o.Via = ViaFleet }, reason.OrderInvalid, "nothing that another order does"},
		"a grant's door":      {ada, func(o *Order) { o.Door = Door{Host: "a.test", Port: 443, For: time.Hour} }, reason.OrderInvalid, "nothing that another order does"},
		"a spawn of the same": {ada, func(o *Order) { o.Action = ActionSpawn }, reason.OrderRole, "role spawn"},
	} {
		got, err := list.Verify(signText(t, text(t, order("ada", c.change)), c.by.private), now)
		switch {
		case c.code == reason.OK && (err != nil || got.Card != CardSum("card") || got.Kid != "k1" || got.By != "ada"):
			t.Errorf("%s: %+v, %v", name, got, err)
		case c.code != reason.OK && (err == nil || refusalOf(t, err).Code != c.code || !strings.Contains(err.Error(), c.text)):
			t.Errorf("%s: %v, want %s %q", name, err, c.code, c.text)
		}
	}
}
