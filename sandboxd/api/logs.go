package api

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

func (s *server) logRoutes() {
	follow := huma.Param{Name: "follow", In: "query", Description: "Go on with what follows, and with commands that are started later, until the kid is gone.", Schema: &huma.Schema{Type: huma.TypeBoolean}}
	addStream(s, route{id: "kid-logs", method: http.MethodGet, path: "/v1/kids/{kid}/logs", summary: "What is kept of the output of a kid's detached commands; one JSON frame a line", role: RoleExec},
		stream{out: wire.LogFrame{}, kind: "application/x-ndjson", params: append(kidParam(), &follow)}, s.kidLogs)
}

// kidLogs is bounded like those who follow events.
func (s *server) kidLogs(w http.ResponseWriter, r *http.Request) {
	follow := false
	if text := r.URL.Query().Get("follow"); text != "" {
		var err error
		if follow, err = strconv.ParseBool(text); err != nil {
			control.Refuse(w, http.StatusUnprocessableEntity, reason.Malformed, "follow: give true or false")
			return
		}
	}
	if n := s.followers.Add(1); n > maxFollowers {
		s.followers.Add(-1)
		control.Refuse(w, http.StatusInsufficientStorage, reason.Capacity, fmt.Sprintf("%d clients follow kids already", maxFollowers))
		return
	}
	defer s.followers.Add(-1)
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() {
		select {
		case <-s.ending: // nil never ends, in tests
			cancel()
		case <-ctx.Done():
		}
	}()
	var out *control.Stream
	conn := http.NewResponseController(w) // a connection without deadlines is a test's
	err := s.kids.Logs(ctx, r.PathValue("kid"), follow, func(f wire.LogFrame) error {
		if out == nil {
			out = control.NewStream(w)
		}
		conn.SetWriteDeadline(time.Now().Add(patience)) // who takes nothing must not keep others from following
		defer conn.SetWriteDeadline(time.Time{})        // the next frame may be long in coming
		return out.Send(f)
	})
	switch {
	case err != nil && out == nil:
		refuse(w, err)
	case out == nil:
		control.NewStream(w) // there was nothing to send
	}
}
