package api

import (
	"context"
	"net/http"

	"tagout/internal/wire"
)

// Lives is what becomes of a kid between its spawn and its destroy; *kids.Manager is one.
type Lives interface {
	Pause(ctx context.Context, name, actor, why string) error
	Resume(ctx context.Context, name, actor, why string) error
}

func (s *server) lifeRoutes() {
	add(s, route{id: "pause-kid", method: http.MethodPost, path: "/v1/kids/{kid}/pause", summary: "Freeze a kid", role: RoleExec, status: http.StatusNoContent},
		change(func(ctx context.Context, name, actor, why string) error { return s.kids.Pause(ctx, name, actor, why) }))
	add(s, route{id: "resume-kid", method: http.MethodPost, path: "/v1/kids/{kid}/resume", summary: "Let a paused kid go on", role: RoleExec, status: http.StatusNoContent},
		change(func(ctx context.Context, name, actor, why string) error { return s.kids.Resume(ctx, name, actor, why) }))
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
