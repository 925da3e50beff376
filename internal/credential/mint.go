package credential

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/leased"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

func (s *Service) mint(w http.ResponseWriter, r *http.Request) {
	var req wire.MintRequest
	if !control.Read(w, r, &req) {
		return
	}
	tokens, renew, no := s.mintTokens(r.Context(), &req)
	if no != nil {
		s.cfg.Metrics.MintRefused(no.code)
		s.cfg.Audit.Log(audit.Record{Event: audit.EventTokenRefused, Session: req.Session, Kid: req.Kid, Mark: req.Mark, Card: req.Card,
			Actor: actor(r), Outcome: audit.OutcomeDeny, Reason: no.code, Detail: "minting: " + no.detail})
		no.write(w)
		return
	}
	s.begun.Add(1)
	s.cfg.Metrics.Minted(len(tokens))
	s.countHeld()
	control.Reply(w, wire.MintReply{Tokens: tokens, Renew: renew})
}

// mintTokens makes all the tokens that req asks for, or none.
func (s *Service) mintTokens(ctx context.Context, req *wire.MintRequest) (tokens map[string]string, renew time.Duration, no *refusal) {
	if no := s.notReady(); no != nil {
		return nil, 0, no
	}
	if no := s.checkMint(req); no != nil {
		return nil, 0, no
	}
	leases, no := s.leaseFor(ctx, req)
	if no != nil {
		return nil, 0, no
	}
	if tokens, renew, no = s.commitMint(ctx, req, leases); no != nil {
		leases.Drop()
	}
	return tokens, renew, no
}

// commitMint makes the tokens, once what they stand for is there.
func (s *Service) commitMint(ctx context.Context, req *wire.MintRequest, leases *leased.Set) (tokens map[string]string, renew time.Duration, no *refusal) {
	epoch := s.tokens.begin() // before the question: a revocation of everything in between spoils the answer
	if no := s.askTags(ctx, req); no != nil {
		return nil, 0, no
	}
	h := &holder{kid: req.Kid, session: req.Session, card: req.Card, mark: req.Mark, leases: leases}
	if no := s.prepareMinted(req, h); no != nil {
		return nil, 0, no
	}
	for _, secret := range req.Secrets {
		h.secrets = append(h.secrets, secret.Name)
	}
	if req.Proof {
		h.secrets = append(h.secrets, wire.ProofSecret)
	}
	h.minted = time.Now()
	if ttl := s.lifetime(req); ttl > 0 {
		h.expires = s.cfg.Boottime() + ttl
	}
	tokens, result := s.tokens.commit(epoch, h)
	switch result {
	case mintConflict:
		return nil, 0, refuse(http.StatusConflict, reason.Capacity, "kid %s or mark %#x has tokens already: end that session first", req.Kid, req.Mark)
	case mintRevoked:
		return nil, 0, refuse(http.StatusLocked, reason.Stopped, "session %s is revoked and gets no token any more: spawn a new kid", req.Session)
	}
	s.usage.begin(h)
	s.recordMint(req, h, tokens)
	if renew, no = s.finishMinted(req, h, tokens); no != nil {
		return nil, 0, no
	}
	return tokens, renew, nil
}

// lifetime is what the session asks for, or the box's where that is shorter; 0: none.
func (s *Service) lifetime(req *wire.MintRequest) time.Duration {
	if box := s.cfg.Lifetime; box > 0 && (req.TTL == 0 || req.TTL > box) {
		return box
	}
	return req.TTL
}

// checkMint judges the request by itself and by the vault.
func (s *Service) checkMint(req *wire.MintRequest) *refusal {
	for what, id := range map[string]string{"kid": req.Kid, "session": req.Session} {
		if id == "" || id == "-" || len(id) > 128 || strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return refuse(http.StatusBadRequest, reason.Malformed, "minting: %s %q is not an id", what, id)
		}
	}
	if !s.cfg.OwnsMark(req.Mark) {
		return refuse(http.StatusBadRequest, reason.Malformed, "minting: mark %#x does not belong to this instance", req.Mark)
	}
	if req.TTL < 0 {
		return refuse(http.StatusBadRequest, reason.Malformed, "minting: the lifetime is negative")
	}
	seen := map[string]bool{}
	for _, secret := range req.Secrets {
		switch {
		case seen[secret.Name]:
			return refuse(http.StatusBadRequest, reason.Malformed, "minting: secret %q is named twice", secret.Name)
		case s.denied(secret.Name):
			return refuse(http.StatusForbidden, reason.SecretDenied, "minting: secret %q can never be granted to a kid: take it off the card", secret.Name)
		case s.leasing.own[secret.Name] != "":
			return refuse(http.StatusForbidden, reason.SecretDenied, "minting: secret %q is what credd calls the provider %s with, and can never be granted to a kid: take it off the card", secret.Name, s.leasing.own[secret.Name])
		case !s.vault.has(secret.Name):
			return refuse(http.StatusNotFound, reason.SecretUnknown, "minting: the vault holds no secret called %q: put it there with `tagout vault set`, or take it off the card", secret.Name)
		}
		seen[secret.Name] = true
	}
	return s.checkMinted(req, seen)
}

// askTags refuses while a tag hangs on the session, and while killswitchd cannot say.
func (s *Service) askTags(ctx context.Context, req *wire.MintRequest) *refusal {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	tags, err := s.cfg.Tags(ctx)
	if err != nil {
		return refuse(http.StatusServiceUnavailable, reason.Tagged, "minting: killswitchd does not say which tags hang: %v", err)
	}
	for _, tag := range tags {
		if covers(tag, req) {
			return refuse(http.StatusLocked, reason.Tagged, "minting: %s stopped this (%s): release tag %s first", tag.By, tag.Reason, tag.Stop)
		}
	}
	return nil
}

func (s *Service) recordMint(req *wire.MintRequest, h *holder, tokens map[string]string) {
	rec := audit.Record{Event: audit.EventTokenMinted, Session: req.Session, Kid: req.Kid, Mark: req.Mark, Card: req.Card,
		Actor: "uid:" + strconv.Itoa(s.cfg.Peers.Root), Outcome: audit.OutcomeOK}
	if len(tokens) == 0 {
		rec.Detail = "the card asks for no secrets"
		s.cfg.Audit.Log(rec)
	}
	for i, name := range h.secrets {
		rec.Fields = map[string]string{"secret": name, "token_id": h.digests[i].id()}
		if h.expires != 0 {
			rec.Fields["lifetime"] = s.lifetime(req).String()
		}
		s.cfg.Audit.Log(rec)
	}
}
