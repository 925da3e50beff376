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
}

func (s server) registerLife(mux *http.ServeMux) {
	for route, h := range map[string]http.HandlerFunc{
		"POST /v1/kids/{kid}/pause":  s.change(s.kids.Pause),
		"POST /v1/kids/{kid}/resume": s.change(s.kids.Resume),
	} {
		mux.HandleFunc(route, control.Admit(h, 0))
	}
}

// change serves what takes a kid from one state to another.
func (s server) change(do func(ctx context.Context, name, actor, why string) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var req wire.ChangeRequest
		if !control.Read(w, r, &req) {
			return
		}
		if err := do(r.Context(), r.PathValue("kid"), actor(r), req.Reason); err != nil {
			refuse(w, err)
			return
		}
		control.Reply(w, struct{}{})
	}
}
