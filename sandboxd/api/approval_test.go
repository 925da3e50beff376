package api

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"

	"tagout/internal/authority"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

// grace are Orders that take one approval, "signed by grace", for whoever asks.
type grace struct{ onlyAda }

func (grace) Approve(r wire.SpawnRequest, peer string) (authority.Signed, error) {
	if r.Approval != "signed by grace" {
		return authority.Signed{}, &authority.Refusal{Code: reason.OrderUnsigned, Text: "grace may"}
	}
	return authority.Signed{Order: authority.Order{ID: "o1", By: "grace", Reason: r.Purpose + " for " + peer}, Key: "grace+1", Note: r.Approval}, nil
}

// TestWhoMayPutAKidOnTheMachinesNetwork: whoever may spawn, with a person's approval; no AI agent, with none either; and an
// approval for a kid that needs none is a mistake that is told.
func TestWhoMayPutAKidOnTheMachinesNetwork(t *testing.T) {
	var made []kids.Approval
	approvals := 0
	api := New(Config{Orders: grace{}, Keys: keys(t),
		Plan: func(r wire.SpawnRequest) (kids.Plan, error) { return kids.Plan{Network: r.Card}, nil },
		Kids: fakeKids{spawn: func(_ context.Context, r kids.Request) (wire.Kid, error) {
			if r.Plan.Network == session.NetworkHost { // as the manager does
				approvals++
				a, err := r.Approve()
				if err != nil {
					return wire.Kid{}, err
				}
				made = append(made, a)
			}
			return wire.Kid{Name: "k1"}, nil
		}}})
	ci := Caller{Name: "key:ci", Roles: []Role{RoleSpawn}}
	as := func(c Caller, agent string) Caller { c.Agent = agent; return c }
	for name, c := range map[string]struct {
		caller            Caller
		network, approval string
		status            int
		code              reason.Code
	}{
		"root":                          {root, "host", "signed by grace", 200, reason.OK},
		"a key":                         {ci, "host", "signed by grace", 200, reason.OK},
		"root alone":                    {root, "host", "", 403, reason.OrderUnsigned},
		"root's own word":               {root, "host", "signed by root", 403, reason.OrderUnsigned},
		"an agent":                      {as(root, "m"), "host", "signed by grace", 403, reason.RoleMissing},
		"an agent with a key":           {as(ci, "m"), "host", "signed by grace", 403, reason.RoleMissing},
		"an agent without":              {as(root, "m"), "host", "", 403, reason.RoleMissing},
		"without the role":              {Caller{Name: "key:r", Roles: []Role{RoleRead}}, "host", "signed by grace", 403, reason.RoleMissing},
		"not needed":                    {root, "", "signed by grace", 422, reason.Malformed},
		"not needed, without a network": {root, "none", "signed by grace", 422, reason.Malformed},
		"the usual kid":                 {root, "", "", 200, reason.OK},
		"the usual kid, of an agent":    {as(root, "m"), "", "", 200, reason.OK},
	} {
		made, approvals = nil, 0
		body, err := json.Marshal(wire.SpawnRequest{Name: "k1", Purpose: "look", Card: c.network, Approval: c.approval})
		if err != nil {
			t.Fatal(err)
		}
		w := request(api, c.caller, http.MethodPost, "/v1/kids", "", string(body))
		var no wire.Problem
		if err := json.Unmarshal(w.Body.Bytes(), &no); err != nil || w.Code != c.status || no.Reason != c.code {
			t.Errorf("%s: %d %s, want %d %s", name, w.Code, w.Body, c.status, c.code)
		}
		if c.status == 200 && c.network == session.NetworkHost {
			if len(made) != 1 || made[0].By != "grace" || made[0].Key != "grace+1" || made[0].Order != "o1" || made[0].Note != c.approval ||
				made[0].Reason != "look for "+c.caller.Name || made[0].At.IsZero() {
				t.Errorf("%s: made with %+v", name, made)
			}
		} else if len(made) != 0 || c.code == reason.RoleMissing && approvals != 0 {
			t.Errorf("%s: %+v was made, %d approvals were looked at", name, made, approvals)
		}
	}
}
