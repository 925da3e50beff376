package killswitch

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"tagout/internal/authority"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Routes adds killswitchd's routes to mux; package wire documents them.
func (s *Switch) Routes(mux *http.ServeMux) {
	mux.HandleFunc("POST /v1/stop", control.Admit(s.serveStop, 0, s.cfg.UID))
	mux.HandleFunc("POST /v1/release", control.Admit(s.serveRelease, 0))
	mux.HandleFunc("POST /v1/order", s.group(s.serveOrder)) // its signature says who gives it
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
	peer := peerText(r)
	if req.By == "" {
		req.By = peer
	}
	proof, err := s.isProof(r.Context(), &req)
	if err != nil {
		control.Refuse(w, http.StatusConflict, reason.OK, err.Error())
		return
	}
	s.stopAndStream(w, r, Order{StopRequest: req, Received: received, Peer: peer, proof: proof})
}

// serveOrder carries out a signed order, whoever brings it.
func (s *Switch) serveOrder(w http.ResponseWriter, r *http.Request) {
	received, ok := control.ReceivedAt(r.Context())
	if !ok {
		received = time.Now()
	}
	r.Body = http.MaxBytesReader(w, r.Body, 2*authority.MaxNote) // JSON needs some more
	var req wire.SignedOrder
	if !control.Read(w, r, &req) {
		return
	}
	signed, err := s.Accept([]byte(req.Note), peerText(r))
	var no *authority.Refusal
	switch {
	case errors.As(err, &no):
		control.Refuse(w, orderStatus(no.Code), no.Code, no.Text)
	case err != nil:
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
	case signed.Action == authority.ActionStop:
		s.stopAndStream(w, r, stopOf(signed, received))
	default:
		t, err := s.Release(signed)
		if err == nil && t.Released.IsZero() {
			t.CanRelease = s.whoCanNow(t)
		}
		answerRelease(w, t, err)
	}
}

// peerText names who is at the other end, as the kernel saw it.
func peerText(r *http.Request) string {
	peer, ok := control.PeerOf(r.Context())
	if !ok {
		return "unknown"
	}
	return fmt.Sprintf("uid:%d", peer.UID)
}

func (s *Switch) stopAndStream(w http.ResponseWriter, r *http.Request, o Order) {
	h, err := s.Stop(o)
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

// serveRelease refuses: a release is signed. It is a route all the same, so that the refusal can say who can do it,
// and is on record.
func (s *Switch) serveRelease(w http.ResponseWriter, r *http.Request) {
	var req wire.ReleaseRequest
	if !control.Read(w, r, &req) {
		return
	}
	answerRelease(w, wire.Tag{}, s.RefuseUnsigned(req, peerText(r)))
}

func answerRelease(w http.ResponseWriter, t wire.Tag, err error) {
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

func (s *Switch) serveTags(w http.ResponseWriter, _ *http.Request) {
	tags := s.Tags()
	for i := range tags {
		tags[i].CanRelease = s.whoCanNow(tags[i])
	}
	control.Reply(w, tags)
}

func (s *Switch) serveClear(w http.ResponseWriter, r *http.Request) {
	var sc wire.Scope
	if !control.Read(w, r, &sc) {
		return
	}
	if t, ok := s.Clear(sc); !ok {
		control.Refuse(w, http.StatusLocked, reason.Tagged,
			tagText(t)+": "+s.whoCanNow(t))
		return
	}
	control.Reply(w, struct{}{})
}

// tagText says which tag hangs, and who placed it, and why.
func tagText(t wire.Tag) string {
	return fmt.Sprintf("tag %s hangs on %s, placed by %s (%s)", t.Stop, scopeText(t.Scope), t.By, t.Reason)
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
