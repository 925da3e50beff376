package api

import (
	"context"
	"net/http"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// Commands are those of a kid; *kids.Manager has them.
type Commands interface {
	Execs(ctx context.Context, name string) ([]wire.Exec, error)
	ExecStatus(ctx context.Context, name, id string) (wire.Exec, error)
	ExecInput(ctx context.Context, name, actor string, r wire.ExecRequest, input <-chan wire.ExecInput, send func(wire.ExecFrame) error) error
	ResizeExec(name, id string, size wire.TermSize) error
	DetachExec(name, id string) error
	Attach(ctx context.Context, name, id, actor string, input <-chan wire.ExecInput, send func(wire.ExecFrame) error) error
	Logs(ctx context.Context, name string, follow bool, send func(wire.LogFrame) error) error
	EndExec(ctx context.Context, name, id, actor, why string) error
}

// ExecNamed is a request about one command.
type ExecNamed struct {
	Named
	ID string `path:"id" doc:"The command's id."`
}

type execReply struct{ Body wire.Exec }

func (s *server) execRoutes() {
	add(s, route{id: "list-execs", method: http.MethodGet, path: "/v1/kids/{kid}/execs", summary: "List a kid's commands: those that run, and detached ones that have ended; the oldest first", role: RoleExec}, s.listExecs)
	add(s, route{id: "get-exec", method: http.MethodGet, path: "/v1/kids/{kid}/execs/{id}", summary: "One command of a kid", role: RoleExec}, s.getExec)
	addStream(s, route{id: "attach-exec", method: http.MethodPost, path: "/v1/kids/{kid}/execs/{id}/attach", summary: "What is kept of a detached command's output, and what follows; frames as of exec-kid", role: RoleExec},
		stream{out: wire.ExecFrame{}, kind: "application/x-ndjson", params: append(kidParam(), pathParam("id", "The command's id."))}, s.attach)
	add(s, route{id: "end-exec", method: http.MethodDelete, path: "/v1/kids/{kid}/execs/{id}", summary: "End a command with all that it started, or forget one that has ended; one that is not there is gone already",
		role: RoleExec, status: http.StatusNoContent}, s.endExec)
}

type listExecsRequest struct {
	Named
	Page
}

func (s *server) listExecs(ctx context.Context, in *listExecsRequest) (*listed[wire.Exec], error) {
	all, err := s.kids.Execs(ctx, in.Kid)
	if err != nil {
		return nil, refused(err)
	}
	return cut(&in.Page, all, func(e wire.Exec) string { return e.ID }), nil
}

func (s *server) getExec(ctx context.Context, in *ExecNamed) (*execReply, error) {
	e, err := s.kids.ExecStatus(ctx, in.Kid, in.ID)
	if err != nil {
		return nil, refused(err)
	}
	return &execReply{e}, nil
}

// attach streams as exec does.
func (s *server) attach(w http.ResponseWriter, r *http.Request) {
	var out *control.Stream
	err := s.kids.Attach(r.Context(), r.PathValue("kid"), r.PathValue("id"), actor(r.Context()), nil, func(f wire.ExecFrame) error {
		if out == nil {
			out = control.NewStream(w)
		}
		return out.Send(f)
	})
	if err != nil && out == nil {
		refuse(w, err)
	}
}

type endExecRequest struct {
	ExecNamed
	Reason string `query:"reason" maxLength:"4096" doc:"Why, for the record."`
}

func (s *server) endExec(ctx context.Context, in *endExecRequest) (*struct{}, error) {
	if err := s.kids.EndExec(ctx, in.Kid, in.ID, actor(ctx), in.Reason); err != nil {
		return nil, refused(err)
	}
	return nil, nil
}
