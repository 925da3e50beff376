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
	g := s.tokens.revokeKid(r.PathValue("kid"))
	use := s.usage.end(r.PathValue("kid"))
	s.acknowledge(w, r, wire.RevokeReply{Revoked: g.tokens}, g, start)
	if use != nil {
		s.recordUses(use, actor(r))
	}
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
	var g gone
	if req.All {
		g = s.tokens.revokeAll(tag)
	} else {
		g = s.tokens.revokeMarks(req.Marks, tag)
	}
	s.acknowledge(w, r, wire.RevokeReply{Revoked: g.tokens, Nonce: req.Nonce}, g, start)
}

// acknowledge answers a revocation and only then writes it down: neither the ledger nor the audit log may
// make anybody wait.
func (s *Service) acknowledge(w http.ResponseWriter, r *http.Request, reply wire.RevokeReply, g gone, start time.Time) {
	deliver(w, reply) // the tokens are gone whether the caller hears of it or not
	s.settleRevocation(reply.Revoked, g, "", actor(r), time.Since(start))
}

// settleRevocation is what a revocation leaves to do once it is acknowledged.
func (s *Service) settleRevocation(tokens int, g gone, why, actor string, took time.Duration) {
	s.cfg.Metrics.Revoked(tokens, took)
	s.ledger.append(g.entries)
	for _, e := range g.entries {
		s.cfg.Audit.Log(audit.Record{Event: audit.EventTokenRevoked, Session: e.Session, Kid: e.Kid, Mark: e.Mark,
			Actor: actor, Outcome: audit.OutcomeOK, Detail: why})
	}
	s.tokens.clear(g.holders)
	for _, h := range g.holders { // the issuers are asked after the acknowledgement, and nobody waits for them
		s.leasing.keeper.End(h.session, "")
	}
	s.countHeld()
}
