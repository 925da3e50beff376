package api

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tagout/internal/authority"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

// spawnLimit bounds a spawn that nobody waits for.
const spawnLimit = time.Minute

// Named is a request about one kid.
type Named struct {
	Kid string `path:"kid" doc:"The kid's name."`
}

type kidReply struct{ Body wire.Kid }

func (s *server) kidRoutes() {
	add(s, route{id: "spawn-kid", method: http.MethodPost, path: "/v1/kids", summary: "Make a kid from a job card", role: RoleSpawn, resumes: true}, s.spawn)
	add(s, route{id: "list-kids", method: http.MethodGet, path: "/v1/kids", summary: "List the kids, by name", role: RoleRead}, s.list)
	add(s, route{id: "get-kid", method: http.MethodGet, path: "/v1/kids/{kid}", summary: "One kid", role: RoleRead}, s.get)
	add(s, route{id: "destroy-kid", method: http.MethodDelete, path: "/v1/kids/{kid}", summary: "Remove a kid with all that was made for it; one that is not there is gone already",
		role: RoleDestroy, status: http.StatusNoContent}, s.destroy)
	addStream(s, route{id: "exec-kid", method: http.MethodPost, path: "/v1/kids/{kid}/exec", summary: "Run a command in a kid; one JSON frame a line, the last one has exit", role: RoleExec},
		stream{in: wire.ExecRequest{}, out: wire.ExecFrame{}, kind: "application/x-ndjson", params: kidParam()}, s.exec)
}

func kidParam() []*huma.Param { return []*huma.Param{pathParam("kid", "The kid's name.")} }

// spawn with an Idempotency-Key goes on when the caller goes away: it comes back for the kid.
func (s *server) spawn(ctx context.Context, in *struct{ Body wire.SpawnRequest }) (*kidReply, error) {
	if c := CallerOf(ctx); in.Body.InputDir != "" && (!c.Local || c.Agent != "") {
		return nil, problem(http.StatusForbidden, reason.RoleMissing, "input_dir names files of the machine that Tagout runs on, and only root there may do that: put the files into the kid instead")
	}
	if strings.TrimSpace(in.Body.Purpose) == "" {
		return nil, problem(http.StatusUnprocessableEntity, reason.Malformed, "purpose: say what the kid is for, for the record")
	}
	plan, err := s.plan(in.Body)
	if err != nil {
		return nil, problem(http.StatusUnprocessableEntity, reason.Malformed, err.Error())
	}
	if err := checkHost(CallerOf(ctx), in.Body, plan); err != nil {
		return nil, err
	}
	origin := originOf(ctx)
	if origin != "" {
		var cancel func()
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), spawnLimit)
		defer cancel()
	}
	who := actor(ctx)
	kid, err := s.kids.Spawn(ctx, kids.Request{Name: in.Body.Name, Purpose: in.Body.Purpose, Actor: who, Origin: origin, Held: in.Body.Held, Plan: plan,
		Vouch: func() (kids.Signature, error) {
			o, err := s.orders.Spawn(in.Body, who)
			return kids.Signature{Order: o.ID, Key: o.Key, Note: o.Note}, err
		},
		Approve: func() (kids.Approval, error) {
			o, err := s.orders.Approve(in.Body, who)
			return kids.Approval{Approval: wire.Approval{By: o.By, Key: o.Key, Order: o.ID, Reason: o.Reason, At: time.Now().UTC()}, Note: o.Note}, err
		}})
	if no := (*authority.Refusal)(nil); errors.As(err, &no) {
		return nil, orderRefused(err)
	}
	if err != nil {
		return nil, refused(err)
	}
	return &kidReply{kid}, nil
}

// checkHost refuses kids on the machine's network to AI agents, whoever has approved them, and an approval that would
// not be used.
func checkHost(c Caller, r wire.SpawnRequest, plan kids.Plan) error {
	switch onHost := plan.Network == session.NetworkHost; {
	case onHost && c.Agent != "":
		return problem(http.StatusForbidden, reason.RoleMissing, "an AI agent makes no kid on the machine's network: a person has to")
	case !onHost && r.Approval != "":
		return problem(http.StatusUnprocessableEntity, reason.Malformed, "the approval is for a kid on the machine's network, and the card does not say `network: host`")
	}
	return nil
}

type listRequest struct {
	Page
	All bool `query:"all" doc:"List also the kids of killswitchd's proofs, with which nobody else has anything to do."`
}

func (s *server) list(ctx context.Context, in *listRequest) (*listed[wire.Kid], error) {
	all := s.kids.List(ctx)
	if !in.All {
		all = slices.DeleteFunc(all, func(k wire.Kid) bool { return k.Proof })
	}
	return cut(&in.Page, all, func(k wire.Kid) string { return k.Name }), nil
}

func (s *server) get(ctx context.Context, in *Named) (*kidReply, error) {
	kid, err := s.kids.Get(ctx, in.Kid)
	if err != nil {
		return nil, refused(err)
	}
	return &kidReply{kid}, nil
}

type destroyRequest struct {
	Named
	Reason string `query:"reason" maxLength:"4096" doc:"Why, for the record."`
}

func (s *server) destroy(ctx context.Context, in *destroyRequest) (*struct{}, error) {
	if err := s.kids.Destroy(ctx, in.Kid, actor(ctx), in.Reason); err != nil {
		return nil, refused(err)
	}
	return nil, nil
}

// exec streams. The answer begins with the first frame, so that a refusal can still have its own status.
func (s *server) exec(w http.ResponseWriter, r *http.Request) {
	var req wire.ExecRequest
	if !control.Read(w, r, &req) {
		return
	}
	if req.Input && !req.Detach {
		control.Refuse(w, http.StatusUnprocessableEntity, reason.Malformed, "input: more of it can follow over a WebSocket alone (GET on this path), or to a command that is detached")
		return
	}
	var out *control.Stream
	err := s.kids.Exec(r.Context(), r.PathValue("kid"), actor(r.Context()), req, func(f wire.ExecFrame) error {
		if out == nil {
			out = control.NewStream(w)
		}
		return out.Send(f)
	})
	if err != nil {
		refuse(w, err)
	}
}
