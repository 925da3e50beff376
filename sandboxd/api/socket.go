package api

import (
	"context"
	"errors"
	"net/http"
	"reflect"

	"github.com/danielgtaylor/huma/v2"

	"tagout/internal/control"
	"tagout/internal/execsocket"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// socketRoutes are those whose connection becomes a WebSocket. OpenAPI has no words for what goes over one: the extension
// x-websocket names the sub-protocol and the messages.
func (s *server) socketRoutes() {
	s.addSocket(route{id: "exec-kid-socket", method: http.MethodGet, path: "/v1/kids/{kid}/exec", role: RoleExec,
		summary: "Run a command in a kid over a WebSocket: its input follows, its terminal can change its size, and its caller can leave it"},
		reflect.TypeFor[wire.ExecRequest](), kidParam(), s.execSocket)
	s.addSocket(route{id: "attach-exec-socket", method: http.MethodGet, path: "/v1/kids/{kid}/execs/{id}/attach", role: RoleExec,
		summary: "The same for a detached command: what is kept of its output, what follows, and its input"},
		nil, append(kidParam(), pathParam("id", "The command's id.")), s.attachSocket)
}

// addSocket serves a route that is a WebSocket; first is the caller's first message, nil: none of its own.
func (s *server) addSocket(r route, first reflect.Type, params []*huma.Param, h http.HandlerFunc) {
	registry := s.api.OpenAPI().Components.Schemas
	socket := map[string]any{
		"subprotocol": wire.ExecProtocol,
		"send":        registry.Schema(reflect.TypeFor[wire.ExecInput](), true, ""),
		"receive":     registry.Schema(reflect.TypeFor[wire.ExecFrame](), true, ""),
	}
	if first != nil {
		socket["first"] = registry.Schema(first, true, "")
	}
	r.status = http.StatusSwitchingProtocols
	addStream(s, r, stream{params: params, extensions: map[string]any{"x-websocket": socket}}, h)
}

// accept makes the connection a WebSocket; where it does not, it has answered.
func (s *server) accept(w http.ResponseWriter, r *http.Request) (*execsocket.Server, bool) {
	c := CallerOf(r.Context())
	return execsocket.Accept(w, r, execsocket.Config{Origin: s.origin, Ending: s.ending, Remote: !c.Local, Counts: c.Counts})
}

func (s *server) execSocket(w http.ResponseWriter, r *http.Request) {
	socket, ok := s.accept(w, r)
	if !ok {
		return
	}
	var req wire.ExecRequest
	if err := socket.First(&req, control.MaxBody); err != nil {
		socket.End(problemOf(err))
		return
	}
	kid := r.PathValue("kid")
	err := s.kids.ExecInput(socket.Context(), kid, actor(r.Context()), req, socket.Input(), func(f wire.ExecFrame) error {
		if f.ID != "" {
			socket.Follow(
				func(size wire.TermSize) { s.kids.ResizeExec(kid, f.ID, size) }, // one that has ended has no size
				func() { s.kids.DetachExec(kid, f.ID) },                         // nor a caller
			)
		}
		return socket.Send(f)
	})
	socket.End(problemOf(err))
}

func (s *server) attachSocket(w http.ResponseWriter, r *http.Request) {
	socket, ok := s.accept(w, r)
	if !ok {
		return
	}
	kid, id := r.PathValue("kid"), r.PathValue("id")
	ctx, leave := context.WithCancel(socket.Context())
	defer leave()
	err := s.kids.Attach(ctx, kid, id, actor(r.Context()), socket.Input(), func(f wire.ExecFrame) error {
		if f.ID != "" {
			socket.Follow(func(size wire.TermSize) { s.kids.ResizeExec(kid, id, size) }, leave) // as above
		}
		return socket.Send(f)
	})
	socket.End(problemOf(err))
}

// problemOf is a refusal of the manager as a problem; nil where there is none.
func problemOf(err error) *wire.Problem {
	if err == nil {
		return nil
	}
	var p *Problem
	if errors.As(refused(err), &p) {
		return &p.Problem
	}
	return &problem(http.StatusInternalServerError, reason.Internal, err.Error()).Problem
}
