package credential

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"tagout/internal/apikey"
	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// doorDeliver bounds how long a caller over TCP may hold a revocation up; what is answered fits into a socket's buffer.
const doorDeliver = 2 * time.Millisecond

// maxForm bounds a form, in bytes.
const maxForm = 16 << 10

// issuerRoutes adds the issuer's routes on the unix socket.
func (s *Service) issuerRoutes(mux *http.ServeMux) {
	root := s.cfg.Peers.Root
	mux.HandleFunc("GET /v1/issuer", control.Admit(s.ifIssuer(s.describeIssuer), root))
	mux.HandleFunc("POST /v1/issuer/rotate", control.Admit(s.ifIssuer(s.rotateKeys), root))
	mux.HandleFunc("POST /v1/issuer/clients", control.Admit(s.ifIssuer(s.addClient), root))
	mux.HandleFunc("DELETE /v1/issuer/clients/{name}", control.Admit(s.ifIssuer(s.removeClient), root))
	mux.HandleFunc("POST /v1/sessions/{kid}/renew", control.Admit(s.renew, root))
	mux.HandleFunc("POST /revoke", control.Admit(func(w http.ResponseWriter, r *http.Request) { s.revokeForm(w, r, actor(r)) }, root))
	for route, h := range s.publicRoutes() {
		mux.HandleFunc(route, s.admitGroup(s.ifIssuer(h)))
	}
}

// publicRoutes are those that show nothing that is secret.
func (s *Service) publicRoutes() map[string]http.HandlerFunc {
	return map[string]http.HandlerFunc{
		"GET /.well-known/jwks.json":                  s.jwks,
		"GET /.well-known/oauth-authorization-server": s.metadata,
		"GET /statuslists/{id}":                       s.statusList,
	}
}

// Door is the issuer as services on other machines see it, to be served over TCP: keys and status lists for everybody,
// introspection and revocation for clients with a key. It is nil where the box is no issuer.
func (s *Service) Door() http.Handler {
	if s.issuing == nil {
		return nil
	}
	mux := http.NewServeMux()
	for route, h := range s.publicRoutes() {
		mux.HandleFunc(route, h)
	}
	mux.HandleFunc("POST /introspect", s.admitClient(apikey.RoleIntrospect, func(w http.ResponseWriter, r *http.Request, actor string) {
		if token, ok := readForm(w, r); ok {
			s.answerIntrospection(w, token, actor, false, doorDeliver)
		}
	}))
	mux.HandleFunc("POST /revoke", s.admitClient(apikey.RoleRevoke, s.revokeForm))
	return mux
}

func (s *Service) ifIssuer(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if s.issuing == nil {
			control.Refuse(w, http.StatusNotFound, reason.OK, "this box is no issuer: write `issuer:` into its configuration and restart credd")
			return
		}
		h(w, r)
	}
}

// oauthError answers as RFC 6749 section 5.2 says.
func oauthError(w http.ResponseWriter, status int, code, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if status == http.StatusUnauthorized {
		w.Header().Add("WWW-Authenticate", `Bearer realm="tagout issuer"`)
		w.Header().Add("WWW-Authenticate", `Basic realm="tagout issuer"`)
	}
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(map[string]string{"error": code, "error_description": text}) // the caller is gone
}

// admitClient lets those pass whose key has the role. A key comes as a bearer token, or as the password of the client's
// name (RFC 6749 section 2.3.1).
func (s *Service) admitClient(role apikey.Role, h func(w http.ResponseWriter, r *http.Request, actor string)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name, secret, basic := r.BasicAuth()
		if !basic {
			scheme, value, _ := strings.Cut(r.Header.Get("Authorization"), " ")
			if strings.EqualFold(scheme, "bearer") {
				secret = value
			}
		}
		key, ok, err := s.issuing.clients.Find(secret, s.issuing.walltime())
		switch {
		case err != nil:
			s.cfg.Log.Error("reading the issuer's clients", "error", err)
			oauthError(w, http.StatusServiceUnavailable, "temporarily_unavailable", "the clients' keys cannot be read")
		case !ok || basic && name != key.Name:
			s.recordStranger(r, "nobody's key")
			oauthError(w, http.StatusUnauthorized, "invalid_client", "send a key that `tagout issuer client add` printed")
		case !slices.Contains(key.Roles, role):
			s.recordStranger(r, "key "+key.Name+" has not the role "+string(role))
			oauthError(w, http.StatusForbidden, "unauthorized_client", "this key has not the role "+string(role))
		default:
			h(w, r, "key:"+key.Name)
		}
	}
}

func (s *Service) recordStranger(r *http.Request, what string) {
	s.tally.Add("issuer", r.URL.Path+" "+what, func() audit.Record {
		return audit.Record{Event: audit.EventAPIRefused, Outcome: audit.OutcomeDeny, Detail: "at the issuer: " + what,
			Fields: map[string]string{"path": r.URL.Path, "address": r.RemoteAddr}}
	})
}

// readForm returns the one token of a form (RFC 7662 section 2.1, RFC 7009 section 2.1); parameters of the URL do not
// count. Where there is none it has answered.
func readForm(w http.ResponseWriter, r *http.Request) (token string, ok bool) {
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	if err := r.ParseForm(); err != nil || len(r.PostForm["token"]) != 1 || r.PostForm.Get("token") == "" || len(r.PostForm["token_type_hint"]) > 1 {
		oauthError(w, http.StatusBadRequest, "invalid_request", "send a form with one field called token")
		return "", false
	}
	return r.PostForm.Get("token"), true
}

// revokeForm answers RFC 7009 section 2.1. A token that is not there is revoked already.
func (s *Service) revokeForm(w http.ResponseWriter, r *http.Request, actor string) {
	token, ok := readForm(w, r)
	if !ok {
		return
	}
	start := time.Now()
	if s.revokeOne(token, actor) {
		s.cfg.Metrics.Revoked(1, time.Since(start))
	}
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
}

func (s *Service) jwks(w http.ResponseWriter, _ *http.Request) {
	if s.vault.shut() != nil {
		oauthError(w, http.StatusServiceUnavailable, "temporarily_unavailable", "the issuer's keys are sealed")
		return
	}
	raw, err := s.issuing.keys().Public()
	if err != nil {
		oauthError(w, http.StatusInternalServerError, "server_error", "the keys cannot be shown")
		return
	}
	w.Header().Set("Content-Type", "application/jwk-set+json")
	w.Header().Set("Cache-Control", "max-age=60")
	w.Write(raw) // the caller is gone
}

// metadata answers RFC 8414 section 3.2, so that a service needs nothing but the issuer's name.
func (s *Service) metadata(w http.ResponseWriter, _ *http.Request) {
	url := s.issuing.cfg.URL
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(map[string]any{ // the caller is gone
		"issuer": url, "jwks_uri": url + "/.well-known/jwks.json", "response_types_supported": []string{}, "grant_types_supported": []string{},
		"introspection_endpoint": url + "/introspect", "introspection_endpoint_auth_methods_supported": []string{"client_secret_basic"},
		"revocation_endpoint": url + "/revoke", "revocation_endpoint_auth_methods_supported": []string{"client_secret_basic"},
	})
}

// statusList answers section 8.1 of draft-ietf-oauth-status-list. No answer is kept: a session that was revoked is in the
// next one.
func (s *Service) statusList(w http.ResponseWriter, r *http.Request) {
	select {
	case s.issuing.building <- struct{}{}:
		defer func() { <-s.issuing.building }()
	case <-r.Context().Done():
		return
	}
	token, ok, err := s.issuing.statusList(r.PathValue("id"))
	switch {
	case err != nil:
		s.cfg.Log.Error("signing a status list", "error", err)
		oauthError(w, http.StatusInternalServerError, "server_error", "the list cannot be signed")
	case !ok:
		oauthError(w, http.StatusNotFound, "invalid_request", "there is no such list: its tokens have expired, or were made before credd started")
	default:
		w.Header().Set("Content-Type", "application/statuslist+jwt")
		w.Header().Set("Cache-Control", "no-cache")
		w.Write([]byte(token)) // the caller is gone
	}
}

func (s *Service) describeIssuer(w http.ResponseWriter, _ *http.Request) {
	keys, err := apikey.Load(clientsFile(s.cfg.Dir))
	if err != nil {
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
		return
	}
	info := wire.IssuerInfo{Issuer: s.issuing.cfg.URL, TrustDomain: s.issuing.cfg.TrustDomain, Lifetime: s.issuing.cfg.Lifetime, Live: s.issuing.live(),
		Clients: []wire.IssuerClient{}}
	for _, k := range s.issuing.keys().Info() {
		info.Keys = append(info.Keys, wire.IssuerKey{ID: k.ID, Algorithm: k.Algorithm, State: k.State, Since: k.Since})
	}
	for _, k := range keys {
		c := wire.IssuerClient{Name: k.Name, Made: k.Made, Ends: k.Ends}
		for _, role := range k.Roles {
			c.Roles = append(c.Roles, string(role))
		}
		info.Clients = append(info.Clients, c)
	}
	control.Reply(w, info)
}

func (s *Service) rotateKeys(w http.ResponseWriter, r *http.Request) {
	current, err := s.rotate(actor(r))
	if err != nil {
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
		return
	}
	control.Reply(w, wire.IssuerRotation{Current: current})
}

// rotate makes the next key sign, and records it.
func (s *Service) rotate(actor string) (string, error) {
	current, err := s.issuing.rotate()
	rec := audit.Record{Event: audit.EventIssuerChanged, Actor: actor, Outcome: audit.OutcomeOK, Fields: map[string]string{"change": "rotated", "signs": current}}
	if err != nil {
		err = fmt.Errorf("rotating the signing keys: nothing was changed: %w", err)
		rec.Outcome, rec.Detail = audit.OutcomeFail, err.Error()
		s.cfg.Log.Error("rotating the signing keys", "error", err)
	}
	s.cfg.Audit.Log(rec)
	return current, err
}

// rotateInTime rotates when the key that signs is old enough, and forgets old ones.
func (s *Service) rotateInTime(ctx context.Context) {
	tick := time.NewTicker(checkRotation)
	defer tick.Stop()
	for {
		s.issuing.keys().Expire(s.issuing.boottime())
		if every, since := s.issuing.cfg.RotateEvery, s.issuing.keys().Since(); every > 0 && !since.IsZero() && s.issuing.walltime().Sub(since) >= every {
			s.rotate("credd") // tried again with the next tick
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (s *Service) addClient(w http.ResponseWriter, r *http.Request) {
	var req wire.IssuerClientRequest
	if !control.Read(w, r, &req) {
		return
	}
	var roles []apikey.Role
	for _, role := range req.Roles {
		if !slices.Contains(apikey.IssuerRoles(), apikey.Role(role)) {
			control.Refuse(w, http.StatusBadRequest, reason.Malformed, fmt.Sprintf("there is no role %q: write introspect or revoke", cut(role, 40)))
			return
		}
		roles = append(roles, apikey.Role(role))
	}
	key, err := apikey.Add(clientsFile(s.cfg.Dir), req.Name, roles, req.Ends)
	s.recordClient(r, req.Name, "client added", err)
	switch {
	case errors.Is(err, apikey.ErrTaken):
		control.Refuse(w, http.StatusConflict, reason.OK, err.Error())
	case errors.As(err, new(*fs.PathError)) || errors.As(err, new(*os.LinkError)): // the disk's, not the caller's
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
	case err != nil:
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, err.Error())
	default:
		s.cfg.Audit.AddSecret(key)
		control.Reply(w, wire.IssuerClientReply{Key: key})
	}
}

func (s *Service) removeClient(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	found, err := apikey.Remove(clientsFile(s.cfg.Dir), name)
	s.recordClient(r, name, "client removed", err)
	switch {
	case err != nil:
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
	case !found:
		control.Refuse(w, http.StatusNotFound, reason.OK, fmt.Sprintf("the issuer has no client %q: see `tagout issuer status`", cut(name, 64)))
	default:
		control.Reply(w, struct{}{})
	}
}

func (s *Service) recordClient(r *http.Request, name, change string, err error) {
	rec := audit.Record{Event: audit.EventIssuerChanged, Actor: actor(r), Outcome: audit.OutcomeOK, Fields: map[string]string{"change": change, "client": name}}
	if err != nil {
		rec.Outcome, rec.Detail = audit.OutcomeFail, err.Error()
	}
	s.cfg.Audit.Log(rec)
}
