package api

import (
	"context"
	"net/http"
	"strconv"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Recorder is the audit log.
type Recorder interface {
	Log(audit.Record)
	Err() error // why it takes no records at the moment
}

func (s *server) toolRoutes() {
	add(s, route{id: "note-tool-call", method: http.MethodPost, path: "/v1/tool-calls", summary: "Record that an AI agent calls a tool, before it is carried out", role: RoleAny, status: http.StatusNoContent}, s.noteTool)
}

func (s *server) noteTool(ctx context.Context, in *struct{ Body wire.ToolCall }) (*struct{}, error) {
	if err := s.audit.Err(); err != nil {
		return nil, problem(http.StatusInsufficientStorage, reason.Capacity, "the audit log takes no records, and nothing is done that is not recorded: "+err.Error())
	}
	call := in.Body
	fields := map[string]string{"tool": call.Tool[:min(len(call.Tool), 64)], "arguments": arguments([]byte(call.Arguments))}
	if call.SHA256 != "" {
		fields["arguments_sha256"], fields["arguments_bytes"] = call.SHA256, strconv.Itoa(call.Bytes)
	}
	s.audit.Log(audit.Record{Event: audit.EventToolCalled, Kid: call.Kid, Actor: actor(ctx), Outcome: audit.OutcomeOK, Fields: fields})
	return nil, nil
}
