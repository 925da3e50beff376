package killswitch

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Routes adds killswitchd's routes to mux; package wire documents them.
func (s *Switch) Routes(mux *http.ServeMux) {
	mux.HandleFunc("POST /v1/stop", control.Admit(s.serveStop, 0, s.cfg.UID))
	mux.HandleFunc("POST /v1/release", control.Admit(s.serveRelease, 0))
	mux.HandleFunc("GET /v1/tags", s.group(s.serveTags))
	mux.HandleFunc("POST /v1/clear", s.group(s.serveClear))
	mux.HandleFunc("POST /v1/lease", control.Admit(s.serveLease, 0))
	mux.HandleFunc("GET /v1/status", s.group(s.serveStatus))
	mux.HandleFunc("POST /v1/proof", control.Admit(s.serveProof, 0))
}

// group admits root and the instance's daemons.
func (s *Switch) group(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		peer, ok := control.PeerOf(r.Context())
		if !ok || peer.UID != 0 && int64(peer.GID) != int64(s.cfg.GID) {
			control.Refuse(w, http.StatusForbidden, reason.OK, fmt.Sprintf("uid %d with gid %d may not ask: only root and the instance's daemons", peer.UID, peer.GID))
			return
		}
		h(w, r)
	}
}

// serveStop streams what happens as it happens. The stop does not depend on the stream: it goes on when the
// caller goes away or reads slowly.
func (s *Switch) serveStop(w http.ResponseWriter, r *http.Request) {
	received, ok := control.ReceivedAt(r.Context())
	if !ok {
		received = time.Now()
	}
	var req wire.StopRequest
	if !control.Read(w, r, &req) {
		return
	}
	if peer, ok := control.PeerOf(r.Context()); ok && req.By == "" {
		req.By = fmt.Sprintf("uid:%d", peer.UID)
	}
	proof, err := s.isProof(r.Context(), &req)
	if err != nil {
		control.Refuse(w, http.StatusConflict, reason.OK, err.Error())
		return
	}
	h, err := s.Stop(Order{StopRequest: req, Received: received, proof: proof})
	if err != nil {
		status := http.StatusBadRequest
		if errors.Is(err, ErrUnknownKid) {
			status = http.StatusNotFound
		}
		control.Refuse(w, status, reason.OK, err.Error())
		return
	}
	stream := control.NewStream(w)
	final, err := h.Follow(r.Context(), func(e wire.StopEvent) error { return stream.Send(e) })
	if err != nil {
		return // the caller is gone
	}
	stream.Send(final) // the caller is gone
}

func (s *Switch) serveRelease(w http.ResponseWriter, r *http.Request) {
	var req wire.ReleaseRequest
	if !control.Read(w, r, &req) {
		return
	}
	t, err := s.Release(req)
	var no *Refusal
	switch {
	case errors.As(err, &no):
		control.Refuse(w, no.Status, reason.Tagged, no.Detail)
	case err != nil:
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
	default:
		control.Reply(w, t)
	}
}

func (s *Switch) serveTags(w http.ResponseWriter, _ *http.Request) { control.Reply(w, s.Tags()) }

func (s *Switch) serveClear(w http.ResponseWriter, r *http.Request) {
	var sc wire.Scope
	if !control.Read(w, r, &sc) {
		return
	}
	if t, ok := s.Clear(sc); !ok {
		control.Refuse(w, http.StatusLocked, reason.Tagged,
			fmt.Sprintf("tag %s hangs on %s, placed by %s (%s): ask %s to release it", t.Stop, scopeText(t.Scope), t.By, t.Reason, t.By))
		return
	}
	control.Reply(w, struct{}{})
}

func (s *Switch) serveStatus(w http.ResponseWriter, r *http.Request) {
	control.Reply(w, s.Status(r.Context()))
}

func (s *Switch) serveLease(w http.ResponseWriter, r *http.Request) {
	var req wire.LeaseRequest
	if !control.Read(w, r, &req) {
		return
	}
	left, err := s.RenewKids(req)
	if err != nil {
		control.Refuse(w, http.StatusServiceUnavailable, reason.Internal, err.Error())
		return
	}
	control.Reply(w, wire.LeaseReply{Left: left})
}
