package api

import (
	"context"
	"net/http"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// Lives is what becomes of a kid between its spawn and its destroy; *kids.Manager is one.
type Lives interface {
	Pause(ctx context.Context, name, actor, why string) error
	Resume(ctx context.Context, name, actor, why string) error
	Stats(ctx context.Context, name string) (wire.KidStats, error)
	Hold(ctx context.Context, name, actor string, ending <-chan struct{}, held func() error) error
}

func (s *server) lifeRoutes() {
	add(s, route{id: "pause-kid", method: http.MethodPost, path: "/v1/kids/{kid}/pause", summary: "Freeze a kid", role: RoleExec, status: http.StatusNoContent},
		change(func(ctx context.Context, name, actor, why string) error { return s.kids.Pause(ctx, name, actor, why) }))
	add(s, route{id: "resume-kid", method: http.MethodPost, path: "/v1/kids/{kid}/resume", summary: "Let a paused kid go on", role: RoleExec, status: http.StatusNoContent},
		change(func(ctx context.Context, name, actor, why string) error { return s.kids.Resume(ctx, name, actor, why) }))
	add(s, route{id: "kid-stats", method: http.MethodGet, path: "/v1/kids/{kid}/stats", summary: "What a kid uses and has used: processors, memory, processes, disks", role: RoleRead}, s.stats)
	addStream(s, route{id: "hold-kid", method: http.MethodPost, path: "/v1/kids/{kid}/hold", summary: "Hold a kid that was spawned as held: it goes with the connection; one line once it is held", role: RoleExec},
		stream{out: struct{}{}, kind: "application/x-ndjson", params: kidParam()}, s.hold)
}

type statsReply struct{ Body wire.KidStats }

func (s *server) stats(ctx context.Context, in *Named) (*statsReply, error) {
	stats, err := s.kids.Stats(ctx, in.Kid)
	if err != nil {
		return nil, refused(err)
	}
	return &statsReply{stats}, nil
}

// hold keeps the answer open: the kid goes with the connection.
func (s *server) hold(w http.ResponseWriter, r *http.Request) {
	var out *control.Stream
	err := s.kids.Hold(r.Context(), r.PathValue("kid"), actor(r.Context()), s.ending, func() error {
		out = control.NewStream(w)
		return out.Send(struct{}{})
	})
	if err != nil && out == nil {
		refuse(w, err)
	}
}

type changeRequest struct {
	Named
	Body wire.ChangeRequest
}

// change serves what takes a kid from one state to another.
func change(do func(ctx context.Context, name, actor, why string) error) func(context.Context, *changeRequest) (*struct{}, error) {
	return func(ctx context.Context, in *changeRequest) (*struct{}, error) {
		if err := do(ctx, in.Kid, actor(ctx), in.Body.Reason); err != nil {
			return nil, refused(err)
		}
		return nil, nil
	}
}
