// Package api serves sandboxd's routes (package wire lists them). Only root may call them: whoever makes or
// enters kids could read what is in them.
package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

// Kids is what the routes call; *kids.Manager is one.
type Kids interface {
	Spawn(ctx context.Context, r kids.Request) (wire.Kid, error)
	Exec(ctx context.Context, name, actor string, r wire.ExecRequest, send func(wire.ExecFrame) error) error
	Destroy(ctx context.Context, name, actor, why string) error
	Lives
	Get(ctx context.Context, name string) (wire.Kid, error)
	List(ctx context.Context) []wire.Kid
	ChangePolicy(ctx context.Context, name string, c kids.EgressChange) (wire.PolicyReply, error)
	PolicyRefused(name, actor, by string, why error)
	Grant(ctx context.Context, name, actor string, r wire.GrantRequest) (wire.Grant, error)
	Ungrant(ctx context.Context, name, id, actor, by, why string) error
	Grants(name string) ([]wire.Grant, error)
}

// Planner turns a card into a plan. Its error says what is wrong with the card, with line and column.
type Planner func(r wire.SpawnRequest) (kids.Plan, error)

// EgressPlanner turns a card into the egress policy of a living kid. Its error is like Planner's.
type EgressPlanner func(r wire.PolicyRequest) (kids.EgressChange, error)

// Config is what the routes need.
type Config struct {
	Kids       Kids
	Plan       Planner
	PlanEgress EgressPlanner
	MayGrant   func(name string) error // nil, or who may
}

// Register adds the routes to mux.
func Register(mux *http.ServeMux, cfg Config) {
	s := server{kids: cfg.Kids, plan: cfg.Plan, planEgress: cfg.PlanEgress, mayGrant: cfg.MayGrant}
	for route, h := range map[string]http.HandlerFunc{
		"POST /v1/kids":            s.spawn,
		"GET /v1/kids":             s.list,
		"GET /v1/kids/{kid}":       s.get,
		"DELETE /v1/kids/{kid}":    s.destroy,
		"POST /v1/kids/{kid}/exec": s.exec,

		"PUT /v1/kids/{kid}/policy":         s.changePolicy,
		"POST /v1/kids/{kid}/grants":        s.grant,
		"GET /v1/kids/{kid}/grants":         s.grants,
		"DELETE /v1/kids/{kid}/grants/{id}": s.ungrant,
	} {
		mux.HandleFunc(route, control.Admit(h, 0))
	}
	s.registerLife(mux)
}

type server struct {
	kids       Kids
	plan       Planner
	planEgress EgressPlanner
	mayGrant   func(name string) error
}

func (s server) spawn(w http.ResponseWriter, r *http.Request) {
	var req wire.SpawnRequest
	if !control.Read(w, r, &req) {
		return
	}
	plan, err := s.plan(req)
	if err != nil {
		control.Refuse(w, http.StatusUnprocessableEntity, reason.Malformed, err.Error())
		return
	}
	kid, err := s.kids.Spawn(r.Context(), kids.Request{Name: req.Name, Purpose: req.Purpose, Actor: actor(r), Plan: plan})
	if err != nil {
		refuse(w, err)
		return
	}
	control.Reply(w, kid)
}

// list leaves the kids of proofs out: nobody but killswitchd has anything to do with them.
func (s server) list(w http.ResponseWriter, r *http.Request) {
	kids := s.kids.List(r.Context())
	if r.URL.Query().Get("all") == "" {
		kids = slices.DeleteFunc(kids, func(k wire.Kid) bool { return k.Proof })
	}
	control.Reply(w, kids)
}

func (s server) get(w http.ResponseWriter, r *http.Request) {
	kid, err := s.kids.Get(r.Context(), r.PathValue("kid"))
	if err != nil {
		refuse(w, err)
		return
	}
	control.Reply(w, kid)
}

func (s server) destroy(w http.ResponseWriter, r *http.Request) {
	if err := s.kids.Destroy(r.Context(), r.PathValue("kid"), actor(r), r.URL.Query().Get("reason")); err != nil {
		refuse(w, err)
		return
	}
	control.Reply(w, struct{}{})
}

// exec streams. The answer begins with the first frame, so that a refusal can still have its own status.
func (s server) exec(w http.ResponseWriter, r *http.Request) {
	var req wire.ExecRequest
	if !control.Read(w, r, &req) {
		return
	}
	var out *control.Stream
	err := s.kids.Exec(r.Context(), r.PathValue("kid"), actor(r), req, func(f wire.ExecFrame) error {
		if out == nil {
			out = control.NewStream(w)
		}
		return out.Send(f)
	})
	if err != nil {
		refuse(w, err)
	}
}

// actor names who asks, as the kernel saw it.
func actor(r *http.Request) string {
	peer, _ := control.PeerOf(r.Context()) // Admit lets nobody in who is not known
	return fmt.Sprintf("uid:%d", peer.UID)
}

var statuses = map[kids.Kind]int{
	kids.Invalid:     http.StatusUnprocessableEntity,
	kids.NotFound:    http.StatusNotFound,
	kids.Conflict:    http.StatusConflict,
	kids.Tagged:      http.StatusLocked,
	kids.Unavailable: http.StatusServiceUnavailable,
	kids.Capacity:    http.StatusInsufficientStorage,
}

func refuse(w http.ResponseWriter, err error) {
	status, ok := statuses[kids.KindOf(err)]
	if !ok {
		status = http.StatusInternalServerError
	}
	control.Refuse(w, status, kids.ReasonOf(err), err.Error())
}
