package credential

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// deliverWithin bounds how long a caller may take to receive an accepted use, and with it how long a
// revocation waits for uses that were accepted just before it.
const deliverWithin = 20 * time.Millisecond

// Routes adds credd's routes, as package wire lists them, to mux.
func (s *Service) Routes(mux *http.ServeMux) {
	p := s.cfg.Peers
	mux.HandleFunc("POST /v1/sessions", control.Admit(s.mint, p.Root))
	mux.HandleFunc("DELETE /v1/sessions/{kid}", control.Admit(s.endSession, p.Root, p.Killswitchd))
	mux.HandleFunc("POST /v1/revoke", control.Admit(s.revoke, p.Root, p.Killswitchd))
	mux.HandleFunc("POST /v1/resolve", control.Admit(s.resolve, p.Proxy))
	mux.HandleFunc("POST /introspect", s.admitGroup(s.introspect))
	mux.HandleFunc("PUT /v1/vault/{name}", control.Admit(s.putSecret, p.Root))
	mux.HandleFunc("GET /v1/vault", control.Admit(s.listSecrets, p.Root))
	mux.HandleFunc("DELETE /v1/vault/{name}", control.Admit(s.deleteSecret, p.Root))
}

// admitGroup lets root and members of the instance's group pass.
func (s *Service) admitGroup(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		peer, ok := control.PeerOf(r.Context())
		if !ok || peer.UID != uint32(s.cfg.Peers.Root) && peer.GID != uint32(s.cfg.Peers.Group) { //nolint:gosec // ids are not negative
			control.Refuse(w, http.StatusForbidden, reason.OK, fmt.Sprintf("uid %d may not do this", peer.UID))
			return
		}
		h(w, r)
	}
}

func actor(r *http.Request) string {
	peer, ok := control.PeerOf(r.Context())
	if !ok {
		return ""
	}
	return "uid:" + strconv.FormatUint(uint64(peer.UID), 10)
}

// refusal is why credd says no.
type refusal struct {
	status int
	code   reason.Code
	detail string
}

func (e *refusal) Error() string { return e.detail }

func refuse(status int, code reason.Code, format string, args ...any) *refusal {
	return &refusal{status, code, fmt.Sprintf(format, args...)}
}

func (e *refusal) write(w http.ResponseWriter) { control.Refuse(w, e.status, e.code, e.detail) }

// notReady is the refusal of everything until killswitchd has answered once, nil afterwards.
func (s *Service) notReady() *refusal {
	if s.ready.Load() {
		return nil
	}
	return refuse(http.StatusServiceUnavailable, reason.CreddDown, "credd has just started and waits for killswitchd to say which tags hang: start killswitchd")
}

func (s *Service) mint(w http.ResponseWriter, r *http.Request) {
	var req wire.MintRequest
	if !control.Read(w, r, &req) {
		return
	}
	tokens, no := s.mintTokens(r.Context(), &req)
	if no != nil {
		s.cfg.Metrics.MintRefused(no.code)
		s.cfg.Audit.Log(audit.Record{Event: audit.EventTokenRefused, Session: req.Session, Kid: req.Kid, Mark: req.Mark, Card: req.Card,
			Actor: actor(r), Outcome: audit.OutcomeDeny, Reason: no.code, Detail: "minting: " + no.detail})
		no.write(w)
		return
	}
	s.cfg.Metrics.Minted(len(tokens))
	s.countHeld()
	control.Reply(w, wire.MintReply{Tokens: tokens})
}

// mintTokens makes all the tokens that req asks for, or none.
func (s *Service) mintTokens(ctx context.Context, req *wire.MintRequest) (map[string]string, *refusal) {
	if no := s.notReady(); no != nil {
		return nil, no
	}
	if no := s.checkMint(req); no != nil {
		return nil, no
	}
	epoch := s.tokens.begin() // before the question: a revocation of everything in between spoils the answer
	if no := s.askTags(ctx, req); no != nil {
		return nil, no
	}
	h := &holder{kid: req.Kid, session: req.Session, card: req.Card, mark: req.Mark}
	for _, secret := range req.Secrets {
		h.secrets = append(h.secrets, secret.Name)
	}
	if req.TTL > 0 {
		h.expires = s.cfg.Boottime() + req.TTL
	}
	tokens, result := s.tokens.commit(epoch, h)
	switch result {
	case mintConflict:
		return nil, refuse(http.StatusConflict, reason.Capacity, "kid %s or mark %#x has tokens already: end that session first", req.Kid, req.Mark)
	case mintRevoked:
		return nil, refuse(http.StatusLocked, reason.Stopped, "session %s is revoked and gets no token any more: spawn a new kid", req.Session)
	}
	s.recordMint(req, h, tokens)
	return tokens, nil
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
		case !s.vault.has(secret.Name):
			return refuse(http.StatusNotFound, reason.SecretUnknown, "minting: the vault holds no secret called %q: put it there with `tagout vault put`, or take it off the card", secret.Name)
		}
		seen[secret.Name] = true
	}
	return nil
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
		s.cfg.Audit.Log(rec)
	}
}

func (s *Service) endSession(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	e, tokens, found := s.tokens.revokeKid(r.PathValue("kid"))
	var entries []revocation
	if found {
		entries = append(entries, e)
	}
	s.acknowledge(w, r, entries, tokens, start)
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
	var entries []revocation
	var tokens int
	if req.All {
		entries, tokens = s.tokens.revokeAll()
	} else {
		entries, tokens = s.tokens.revokeMarks(req.Marks)
	}
	s.acknowledge(w, r, entries, tokens, start)
}

// acknowledge answers a revocation and only then writes it down: neither the ledger nor the audit log may
// make anybody wait.
func (s *Service) acknowledge(w http.ResponseWriter, r *http.Request, entries []revocation, tokens int, start time.Time) {
	deliver(w, wire.RevokeReply{Revoked: tokens}) //nolint:errcheck // the tokens are gone whether the caller hears of it or not
	s.cfg.Metrics.Revoked(tokens, time.Since(start))
	s.ledger.append(entries)
	for _, e := range entries {
		s.cfg.Audit.Log(audit.Record{Event: audit.EventTokenRevoked, Session: e.Session, Kid: e.Kid, Mark: e.Mark,
			Actor: actor(r), Outcome: audit.OutcomeOK})
	}
	s.countHeld()
}

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
	return u, nil
}

// used is what a record says of one use.
type used struct {
	mark                       uint32
	kid, session, card, secret string
	tokenID, host, actor       string
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
	if !ok {
		return wire.ResolveReply{}, u, refuse(http.StatusForbidden, reason.TokenUnknown, "the token is unknown, expired or revoked")
	}
	u.kid, u.session, u.card, u.secret = g.holder.kid, g.holder.session, g.holder.card, g.secret
	if g.holder.mark != req.Mark {
		return wire.ResolveReply{}, u, refuse(http.StatusForbidden, reason.TokenScope, "the token belongs to another session than the one that presents it (mark %#x)", req.Mark)
	}
	if err != nil {
		return wire.ResolveReply{}, u, refuse(http.StatusForbidden, reason.TokenScope, "the token is bound to hosts by name")
	}
	value, bound, err := s.vault.value(g.secret, hostport)
	if err != nil {
		return wire.ResolveReply{}, u, refuse(http.StatusForbidden, reason.TokenUnknown, "secret %s is not in the vault any more", g.secret)
	}
	if !bound {
		return wire.ResolveReply{}, u, refuse(http.StatusForbidden, reason.TokenScope, "secret %s is not bound to %s", g.secret, hostport)
	}
	return wire.ResolveReply{Secret: g.secret, Value: value}, u, nil
}

// recordUse writes a use or its refusal down. Floods are folded, a session at a time.
func (s *Service) recordUse(u used, no *refusal) {
	code, key := reason.OK, u.tokenID+" "+u.host
	if no != nil {
		code, key = no.code, "" // refusals are recorded one by one while the session's share lasts
	}
	s.cfg.Metrics.Used(code)
	s.tally.Add(strconv.FormatUint(uint64(u.mark), 16), key, func() audit.Record {
		rec := audit.Record{Event: audit.EventTokenUsed, Outcome: audit.OutcomeAllow, Session: u.session, Kid: u.kid, Card: u.card, Mark: u.mark,
			Actor: u.actor, Dst: &audit.Dst{Name: u.host}, Fields: map[string]string{"token_id": u.tokenID, "secret": u.secret}}
		if no != nil {
			rec.Event, rec.Outcome, rec.Reason, rec.Detail = audit.EventTokenRefused, audit.OutcomeDeny, no.code, no.detail
		}
		return rec
	})
}

// introspect answers RFC 7662 section 2.1: a form with one token, and active false for everything that
// would not be accepted now. It accepts nothing; it tells operators and drills what would be.
func (s *Service) introspect(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil || len(r.PostForm["token"]) != 1 {
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, "introspecting: send a form with one field called token")
		return
	}
	s.tokens.delivering.RLock()
	defer s.tokens.delivering.RUnlock()
	var out wire.Introspection
	d, g, ok := s.tokens.find(r.PostForm.Get("token"))
	if ok && s.ready.Load() && s.vault.has(g.secret) {
		out = wire.Introspection{Active: true, Session: g.holder.session, Kid: g.holder.kid, Scope: g.secret}
	} else {
		s.tally.Add("introspection", d.id(), func() audit.Record {
			return audit.Record{Event: audit.EventTokenRefused, Outcome: audit.OutcomeDeny, Reason: reason.TokenUnknown, Actor: actor(r),
				Detail: "introspection of a token that is not active", Fields: map[string]string{"token_id": d.id()}}
		})
	}
	deliver(w, out) //nolint:errcheck // the caller is gone or too slow: nothing was granted
}

// deliver writes v and returns when the caller's socket has all of it; a caller that does not take it within
// deliverWithin gets a broken connection instead.
func deliver(w http.ResponseWriter, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	defer clear(raw)
	rc := http.NewResponseController(w)
	if err := rc.SetWriteDeadline(time.Now().Add(deliverWithin)); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Length", strconv.Itoa(len(raw)))
	if _, err := w.Write(raw); err != nil {
		return err
	}
	if err := rc.Flush(); err != nil {
		return err
	}
	return rc.SetWriteDeadline(time.Time{})
}

func (s *Service) putSecret(w http.ResponseWriter, r *http.Request) {
	var e wire.VaultEntry
	if !control.Read(w, r, &e) {
		return
	}
	name := r.PathValue("name")
	s.changeVault(w, r, name, "put", s.vault.put(name, e))
}

func (s *Service) deleteSecret(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	s.changeVault(w, r, name, "deleted", s.vault.delete(name))
}

// changeVault answers and records a change of the vault that ended with err.
func (s *Service) changeVault(w http.ResponseWriter, r *http.Request, name, what string, err error) {
	rec := audit.Record{Event: audit.EventVaultChanged, Actor: actor(r), Outcome: audit.OutcomeOK, Fields: map[string]string{"secret": name, "change": what}}
	if err != nil {
		rec.Outcome, rec.Detail = audit.OutcomeFail, err.Error()
	}
	s.cfg.Audit.Log(rec)
	s.countHeld()
	var bad *badEntry
	switch {
	case err == nil:
		control.Reply(w, struct{}{})
	case errors.As(err, &bad):
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, err.Error())
	case errors.Is(err, errUnknownSecret):
		control.Refuse(w, http.StatusNotFound, reason.SecretUnknown, fmt.Sprintf("the vault holds no secret called %q", name))
	default:
		s.cfg.Log.Error("changing the vault", "secret", name, "error", err)
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
	}
}

func (s *Service) listSecrets(w http.ResponseWriter, _ *http.Request) {
	control.Reply(w, s.vault.list())
}
