package credential

import (
	"net/http"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// listTokens answers with the tokens that the query's kid, session, id or secret means; without one, with all.
func (s *Service) listTokens(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	sel := wire.TokenSelection{Kid: q.Get("kid"), Session: q.Get("session"), ID: q.Get("id"), Secret: q.Get("secret")}
	if sel.Fields() > 1 {
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, "listing tokens: name one of kid, session, id and secret")
		return
	}
	control.Reply(w, s.info(s.tokens.live(&sel)))
}

// revokeTokens revokes what a person names. Of a kid or a session everything goes, and it gets no token any more.
func (s *Service) revokeTokens(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	var req wire.TokenRevokeRequest
	if !control.Read(w, r, &req) {
		return
	}
	if req.Fields() != 1 {
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, "revoking tokens: name one of kid, session, id and secret")
		return
	}
	why := req.Reason[:min(len(req.Reason), wire.MaxTagText)]
	if req.Kid == "" && req.Session == "" {
		taken := s.tokens.take(s.tokens.live(&req.TokenSelection))
		s.deliverRevoked(w, &req, wire.TokenRevokeReply{Revoked: s.info(taken)}, len(taken) > 0)
		s.cfg.Metrics.Revoked(len(taken), time.Since(start))
		s.recordTaken(taken, audit.EventTokenRevoked, actor(r), why)
		s.countHeld()
		return
	}
	g := s.tokens.revokeSessions(func(h *holder) bool { return h.kid == req.Kid || h.session == req.Session })
	parts := s.tokens.partsOf(g.holders, func(part) bool { return true }) // they are invalid already
	s.deliverRevoked(w, &req, wire.TokenRevokeReply{Revoked: s.info(parts)}, len(g.entries) > 0)
	s.settleRevocation(len(parts), g, why, actor(r), time.Since(start))
}

func (s *Service) deliverRevoked(w http.ResponseWriter, req *wire.TokenRevokeRequest, reply wire.TokenRevokeReply, found bool) {
	if !found {
		what := "token " + req.ID
		switch {
		case req.Kid != "":
			what = "kid " + req.Kid
		case req.Session != "":
			what = "session " + req.Session
		case req.Secret != "":
			what = "secret " + req.Secret
		}
		control.Refuse(w, http.StatusNotFound, reason.TokenUnknown, what+" has no token now: `tagout token ls` shows which there are")
		return
	}
	deliver(w, reply) // they are gone whether the caller hears of it or not
}
