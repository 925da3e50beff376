package credential

import (
	"net/http"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

func (s *Service) endSession(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	e, tokens, found := s.tokens.revokeKid(r.PathValue("kid"))
	var entries []revocation
	if found {
		entries = append(entries, e)
	}
	s.acknowledge(w, r, wire.RevokeReply{Revoked: tokens}, entries, start)
}

func (s *Service) revoke(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	var req wire.RevokeRequest
	if !control.Read(w, r, &req) {
		return
	}
	if req.All == (len(req.Marks) > 0) {
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, "revoking: name marks, or all, and not both")
		return
	}
	tag := req.Tag[:min(len(req.Tag), wire.MaxTagText)]
	var entries []revocation
	var tokens int
	if req.All {
		entries, tokens = s.tokens.revokeAll(tag)
	} else {
		entries, tokens = s.tokens.revokeMarks(req.Marks, tag)
	}
	s.acknowledge(w, r, wire.RevokeReply{Revoked: tokens, Nonce: req.Nonce}, entries, start)
}

// acknowledge answers a revocation and only then writes it down: neither the ledger nor the audit log may
// make anybody wait.
func (s *Service) acknowledge(w http.ResponseWriter, r *http.Request, reply wire.RevokeReply, entries []revocation, start time.Time) {
	deliver(w, reply) // the tokens are gone whether the caller hears of it or not
	s.cfg.Metrics.Revoked(reply.Revoked, time.Since(start))
	s.ledger.append(entries)
	for _, e := range entries {
		s.cfg.Audit.Log(audit.Record{Event: audit.EventTokenRevoked, Session: e.Session, Kid: e.Kid, Mark: e.Mark,
			Actor: actor(r), Outcome: audit.OutcomeOK})
	}
	s.countHeld()
}
