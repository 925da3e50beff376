package credential

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

func (s *Service) resolve(w http.ResponseWriter, r *http.Request) {
	var req wire.ResolveRequest
	if !control.Read(w, r, &req) {
		return
	}
	u, no := s.useAndDeliver(w, &req)
	if no != nil {
		no.write(w)
	}
	s.recordUse(u, no)
}

// useAndDeliver decides one use and hands an accepted one over before a revocation can be acknowledged.
func (s *Service) useAndDeliver(w http.ResponseWriter, req *wire.ResolveRequest) (used, *refusal) {
	s.tokens.delivering.RLock()
	defer s.tokens.delivering.RUnlock()
	reply, u, no := s.use(req)
	if no != nil {
		return u, no
	}
	if err := deliver(w, reply); err != nil {
		return u, refuse(http.StatusInternalServerError, reason.Internal, "the proxy did not take the answer within %v: %v", deliverWithin, err)
	}
	s.usage.note(u.holder, u.secret, s.bindingOf(u.holder, u.secret), u.host, req) // before a session's end passes
	return u, nil
}

// used is what a record says of one use.
type used struct {
	mark                       uint32
	kid, session, card, secret string
	tokenID, host, actor       string
	holder                     *holder // of the token; nil where it is unknown
	jti                        string  // of the JWT that was given for it
	scope                      string  // with token-scope: which of scopeSession and the others it was
}

// use decides one use. The caller holds delivering for reading.
func (s *Service) use(req *wire.ResolveRequest) (wire.ResolveReply, used, *refusal) {
	u := used{mark: req.Mark, actor: "uid:" + strconv.Itoa(s.cfg.Peers.Proxy)}
	hostport, err := joinHostPort(req.Host, req.Port)
	u.host = hostport
	if err != nil {
		u.host = "an invalid host name"
	}
	if no := s.notReady(); no != nil {
		return wire.ResolveReply{}, u, no
	}
	d, g, ok := s.tokens.find(req.Token)
	u.tokenID = d.id()
	if tag := s.tokens.stoppedBy(req.Mark); tag != "" {
		return wire.ResolveReply{}, u, refuse(http.StatusLocked, reason.Tagged, "%s", tag)
	}
	if !ok {
		return wire.ResolveReply{}, u, refuse(http.StatusForbidden, reason.TokenUnknown, "the token is unknown, expired or revoked")
	}
	u.kid, u.session, u.card, u.secret = g.holder.kid, g.holder.session, g.holder.card, g.secret
	u.holder = g.holder
	m := g.holder.mints[g.secret]
	if m == nil && s.vault.canary(g.secret) { // before anything that could be another reason
		return wire.ResolveReply{}, u, refuse(http.StatusForbidden, reason.Canary, "secret %s is a canary: nobody has a reason to use it", g.secret)
	}
	scoped := func(scope, format string, args ...any) (wire.ResolveReply, used, *refusal) {
		u.scope = scope
		return wire.ResolveReply{}, u, refuse(http.StatusForbidden, reason.TokenScope, format, args...)
	}
	switch {
	case g.holder.mark != req.Mark:
		return scoped(scopeSession, "the token belongs to another session than the one that presents it (mark %#x)", req.Mark)
	case req.None:
		return scoped(scopePlace, "no credential belongs here, and the token is for %s", g.secret)
	case err != nil:
		return scoped(scopeHost, "the token is bound to hosts by name")
	}
	reply, err := s.valueOf(g, m, hostport, req, &u)
	var not *errNotFor
	switch {
	case errors.As(err, &not):
		return scoped(not.scope, "%s", not.detail)
	case errors.Is(err, errNoLease):
		return wire.ResolveReply{}, u, refuse(http.StatusForbidden, reason.LeaseFailed, "%v", err)
	case err != nil && m != nil:
		return wire.ResolveReply{}, u, refuse(http.StatusInternalServerError, reason.Internal, "making a JWT for %s: %v", g.secret, err)
	case err != nil:
		return wire.ResolveReply{}, u, refuse(http.StatusForbidden, reason.TokenUnknown, "secret %s is not in the vault any more", g.secret)
	}
	return reply, u, nil
}

// recordUse writes a use or its refusal down. Floods are folded, a session at a time.
func (s *Service) recordUse(u used, no *refusal) {
	code, key := reason.OK, u.tokenID+" "+u.host
	if no != nil {
		code, key = no.code, "" // refusals are recorded one by one while the session's share lasts
	}
	s.cfg.Metrics.Used(code)
	group := strconv.FormatUint(uint64(u.mark), 16)
	if code == reason.Canary { // whatever else is refused at the same time: killswitchd waits for it
		group, key = "canary "+group, u.tokenID
	}
	s.tally.Add(group, key, func() audit.Record {
		rec := audit.Record{Event: audit.EventTokenUsed, Outcome: audit.OutcomeAllow, Session: u.session, Kid: u.kid, Card: u.card, Mark: u.mark,
			Actor: u.actor, Dst: &audit.Dst{Name: u.host}, Fields: map[string]string{"token_id": u.tokenID, "secret": u.secret}}
		if u.jti != "" {
			rec.Fields["jti"] = u.jti
		}
		if no != nil {
			rec.Event, rec.Outcome, rec.Reason, rec.Detail = audit.EventTokenRefused, audit.OutcomeDeny, no.code, no.detail
			if u.scope != "" {
				rec.Fields["scope"] = u.scope
			}
		}
		return rec
	})
	if no != nil && no.code == reason.Canary && u.holder.mark != u.mark {
		s.recordLeak(u.holder, u.secret, u.actor)
	}
}

// recordLeak writes down that a canary's token was used somewhere else than by the session that holds it.
func (s *Service) recordLeak(h *holder, secret, actor string) {
	s.tally.Add("canary "+strconv.FormatUint(uint64(h.mark), 16), secret+" "+actor, func() audit.Record {
		return audit.Record{Event: audit.EventTokenRefused, Outcome: audit.OutcomeDeny, Reason: reason.Canary, Session: h.session, Kid: h.kid, Card: h.card, Mark: h.mark,
			Actor: actor, Detail: "the token of the canary " + secret + ", which this session holds, was used elsewhere", Fields: map[string]string{"secret": secret}}
	})
}

// introspect answers RFC 7662 section 2.1: a form with one token, and active false for everything that
// would not be accepted now. It accepts nothing; it tells operators and drills what would be.
func (s *Service) introspect(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil || len(r.PostForm["token"]) != 1 {
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, "introspecting: send a form with one field called token")
		return
	}
	s.answerIntrospection(w, r.PostForm.Get("token"), actor(r), s.isKillswitchd(r), deliverWithin)
}

// answerIntrospection answers one question; expected says that whoever asks may well know that the token is not active.
func (s *Service) answerIntrospection(w http.ResponseWriter, token, actor string, expected bool, within time.Duration) {
	s.tokens.delivering.RLock()
	defer s.tokens.delivering.RUnlock()
	out, jwt := s.introspectMinted(token)
	d, g, ok := s.tokens.find(token)
	switch {
	case jwt && out.Active:
	case ok && g.holder.mints[g.secret] == nil && s.vault.canary(g.secret):
		s.recordLeak(g.holder, g.secret, actor)
	case ok && s.ready.Load() && (g.holder.mints[g.secret] != nil || s.vault.has(g.secret) || g.secret == wire.ProofSecret):
		out = wire.Introspection{Active: true, Session: g.holder.session, Kid: g.holder.kid, Scope: g.secret}
	case expected: // killswitchd it looks whether a proof's token is gone; nobody tried anything
	default:
		s.tally.Add("introspection", d.id(), func() audit.Record {
			return audit.Record{Event: audit.EventTokenRefused, Outcome: audit.OutcomeDeny, Reason: reason.TokenUnknown, Actor: actor,
				Detail: "introspection of a token that is not active", Fields: map[string]string{"token_id": d.id()}}
		})
	}
	deliverIn(w, out, within) // the caller is gone or too slow: nothing was granted
}
