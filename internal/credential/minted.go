package credential

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// mintedPresentation is how JWTs of the box's own issuer are shown.
var mintedPresentation = wire.Presentation{As: wire.AsBearer}

// prepareMinted puts what req asks of the issuer into h.
func (s *Service) prepareMinted(req *wire.MintRequest, h *holder) *refusal {
	if s.issuing == nil {
		return nil // checkMint has refused the request where it asks for something
	}
	var no *refusal
	if h.mints, no = s.issuing.prepare(req); no != nil {
		return no
	}
	for _, want := range req.Mint {
		h.secrets = append(h.secrets, want.Name)
	}
	return nil
}

// finishMinted puts the JWTs themselves into tokens where a kid is to have them. A failure takes the session back.
func (s *Service) finishMinted(req *wire.MintRequest, h *holder, tokens map[string]string) (renew time.Duration, no *refusal) {
	held, renew, err := s.heldBy(h)
	if err != nil {
		gone := s.tokens.revokeKid(h.kid)
		s.ledger.append(gone.entries)
		s.tokens.clear(gone.holders)
		return 0, refuse(http.StatusInternalServerError, reason.Internal, "minting for %s: %v", req.Kid, err)
	}
	maps.Copy(tokens, held)
	return renew, nil
}

// heldBy returns the JWTs that the session's kid holds itself, and how long it takes until there are new ones; 0: it holds
// none. Those that are revoked are left out.
func (s *Service) heldBy(h *holder) (tokens map[string]string, renew time.Duration, err error) {
	tokens = map[string]string{}
	for name, m := range h.mints {
		if !m.want.Inside || !s.tokens.holds(h, m.d) {
			continue
		}
		token, i, made, err := s.issuing.handOut(h, m)
		if err != nil {
			return nil, 0, fmt.Errorf("%s: %w", name, err)
		}
		if made {
			s.recordIssued(i)
		}
		tokens[name] = token
		if left := max((i.from+i.ends)/2-s.cfg.Boottime(), time.Millisecond); renew == 0 || left < renew {
			renew = left
		}
	}
	return tokens, renew, nil
}

// renew answers with the JWTs that a kid holds itself, as they are to be by now.
func (s *Service) renew(w http.ResponseWriter, r *http.Request) {
	if no := s.notReady(); no != nil {
		no.write(w)
		return
	}
	s.tokens.delivering.RLock()
	defer s.tokens.delivering.RUnlock()
	h := s.tokens.of(r.PathValue("kid"))
	if h == nil {
		refuse(http.StatusNotFound, reason.TokenUnknown, "the kid has no tokens: they are revoked, or credd has restarted").write(w)
		return
	}
	tokens, next, err := s.heldBy(h)
	if err != nil {
		refuse(http.StatusInternalServerError, reason.Internal, "renewing %v", err).write(w)
		return
	}
	deliver(w, wire.MintReply{Tokens: tokens, Renew: next}) // the caller is gone or too slow: it asks again
}

// valueOf returns what the proxy puts in the place of a token: a JWT where m is not nil, the vault's value otherwise.
func (s *Service) valueOf(g grant, m *minting, hostport string, req *wire.ResolveRequest, u *used) (wire.ResolveReply, error) {
	if m == nil {
		reply, err := s.vault.value(g.secret, hostport, req)
		if err != nil {
			return reply, err
		}
		return s.leasing.value(g, reply)
	}
	if m.want.Inside {
		return wire.ResolveReply{}, &errNotFor{scopeHost, "the token " + g.secret + " is for the kid itself, and not for the proxy"}
	}
	if scope, detail := m.bound.refuses(hostport, req); scope != "" {
		return wire.ResolveReply{}, &errNotFor{scope, "the token " + g.secret + " " + detail}
	}
	token, i, made, err := s.issuing.handOut(g.holder, m)
	if err != nil {
		s.cfg.Log.Error("minting a JWT", "name", g.secret, "session", g.holder.session, "error", err)
		return wire.ResolveReply{}, err
	}
	if made {
		s.recordIssued(i)
	}
	u.jti = i.claims.ID
	return wire.ResolveReply{Secret: g.secret, Value: token, Minted: true, Present: m.bound.Present}, nil
}

// recordIssued writes down that a JWT was made.
func (s *Service) recordIssued(i *issued) {
	s.cfg.Metrics.Issued()
	s.cfg.Audit.Log(audit.Record{Event: audit.EventTokenMinted, Session: i.h.session, Kid: i.h.kid, Mark: i.h.mark, Card: i.h.card,
		Actor: "uid:" + strconv.Itoa(s.cfg.Peers.Root), Outcome: audit.OutcomeOK, Fields: map[string]string{
			"secret": i.m.want.Name, "token_id": i.m.d.id(), "jti": i.claims.ID, "aud": i.claims.Audience, "scope": i.claims.Scope,
			"lifetime": (i.ends - i.from).String(),
		}})
}

// introspectMinted says what a JWT is worth now. jwt is false for what is no JWT of the box's own issuer.
func (s *Service) introspectMinted(token string) (out wire.Introspection, jwt bool) {
	if s.issuing == nil || strings.Count(token, ".") != 2 {
		return out, false
	}
	i, err := s.issuing.find(token)
	if err != nil || !s.ready.Load() || !s.issuing.good(i) {
		return out, err == nil
	}
	c := i.claims
	return wire.Introspection{Active: true, Session: c.Session, Kid: c.Subject, Scope: c.Scope, TokenType: "Bearer", Client: c.Client, Issuer: c.Issuer,
		Audience: c.Audience, ID: c.ID, IssuedAt: c.IssuedAt, NotBefore: c.NotBefore, Expires: c.Expires}, true
}

// revokeOne revokes what a token stands for in its session (RFC 7009): a JWT and all that were and would be made in its
// place, or an opaque token. It says whether there was something to revoke.
func (s *Service) revokeOne(token, actor string) bool {
	d, g, ok := s.tokens.find(token)
	fields := map[string]string{}
	if s.issuing != nil && !ok {
		if i, err := s.issuing.find(token); err == nil {
			d, g, ok = i.m.d, grant{holder: i.h, secret: i.m.want.Name}, true
			fields["jti"] = i.claims.ID
		}
	}
	if !ok || len(s.tokens.take([]part{{g.holder, slices.Index(g.holder.digests, d)}})) == 0 {
		return false
	}
	fields["token_id"], fields["secret"] = d.id(), g.secret
	s.cfg.Audit.Log(audit.Record{Event: audit.EventTokenRevoked, Session: g.holder.session, Kid: g.holder.kid, Mark: g.holder.mark, Card: g.holder.card,
		Actor: actor, Outcome: audit.OutcomeOK, Fields: fields})
	s.countHeld()
	return true
}

// checkRotation is how often the age of the signing key is looked at.
const checkRotation = time.Minute
