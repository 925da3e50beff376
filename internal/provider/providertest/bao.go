package providertest

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"
)

// Bao is a small OpenBao: AppRole logins, one dynamic secret at database/creds/readonly, leases that hang on the token
// that made them. A credential is the password of a lease.
type Bao struct {
	base
	RoleID, SecretID string
	Root             string        // a token that may do everything, for token files
	TTL              time.Duration // of leases and logins
	Password         string        // of the next lease; empty: one is made up

	tokens map[string]bool     // valid logins; guarded by mu
	leases map[string]baoLease // guarded by mu
}

type baoLease struct{ token, password string }

// NewBao returns an OpenBao whose leases live an hour.
func NewBao() *Bao {
	return &Bao{RoleID: random("role-"), SecretID: random("secret-"), Root: random("hvs."), TTL: time.Hour,
		tokens: map[string]bool{}, leases: map[string]baoLease{}}
}

// Logins is how many logins are valid now.
func (b *Bao) Logins() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.tokens)
}

// ServeHTTP is the API.
func (b *Bao) ServeHTTP(w http.ResponseWriter, r *http.Request) { b.serve(w, r, b.Handler()) }

// Handler is the API without faults.
func (b *Bao) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/v1/auth/approle/login", b.login)
	mux.HandleFunc("/v1/auth/token/renew-self", b.known(b.renewSelf))
	mux.HandleFunc("/v1/auth/token/revoke-self", b.known(b.revokeSelf))
	mux.HandleFunc("GET /v1/database/creds/readonly", b.known(b.creds))
	mux.HandleFunc("/v1/sys/leases/renew", b.known(b.renew))
	mux.HandleFunc("/v1/sys/leases/revoke", b.known(b.revoke))
	return mux
}

func (b *Bao) deny(w http.ResponseWriter, status int, why string) {
	reply(w, status, map[string]any{"errors": []string{why}})
}

// known lets valid tokens pass.
func (b *Bao) known(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		token := r.Header.Get("X-Vault-Token")
		b.mu.Lock()
		ok := token == b.Root || b.tokens[token]
		b.mu.Unlock()
		if !ok {
			b.deny(w, http.StatusForbidden, "permission denied")
			return
		}
		next(w, r)
	}
}

func (b *Bao) auth(token string) map[string]any {
	return map[string]any{"client_token": token, "lease_duration": seconds(b.TTL), "renewable": true, "policies": []string{"default", "tagout"}}
}

func (b *Bao) login(w http.ResponseWriter, r *http.Request) {
	var in struct {
		RoleID   string `json:"role_id"`
		SecretID string `json:"secret_id"`
	}
	if json.NewDecoder(r.Body).Decode(&in) != nil || in.RoleID != b.RoleID || in.SecretID != b.SecretID {
		b.deny(w, http.StatusBadRequest, "invalid role or secret ID")
		return
	}
	token := random("hvs.")
	b.mu.Lock()
	b.tokens[token] = true
	b.mu.Unlock()
	reply(w, 200, map[string]any{"auth": b.auth(token)})
}

func (b *Bao) renewSelf(w http.ResponseWriter, r *http.Request) {
	reply(w, 200, map[string]any{"auth": b.auth(r.Header.Get("X-Vault-Token"))})
}

func (b *Bao) revokeSelf(w http.ResponseWriter, r *http.Request) {
	token := r.Header.Get("X-Vault-Token")
	b.mu.Lock()
	delete(b.tokens, token)
	var gone []string
	for id, l := range b.leases {
		if l.token == token {
			gone = append(gone, id)
		}
	}
	b.mu.Unlock()
	for _, id := range gone {
		b.forget(id)
	}
	w.WriteHeader(http.StatusNoContent)
}

func (b *Bao) forget(id string) {
	b.mu.Lock()
	l := b.leases[id]
	delete(b.leases, id)
	b.mu.Unlock()
	b.set(l.password, false)
}

func (b *Bao) creds(w http.ResponseWriter, r *http.Request) {
	l := baoLease{token: r.Header.Get("X-Vault-Token"), password: random("A1a-")}
	id := random("database/creds/readonly/")
	b.mu.Lock()
	if b.Password != "" {
		l.password, b.Password = b.Password, ""
	}
	b.leases[id] = l
	b.mu.Unlock()
	b.set(l.password, true)
	reply(w, 200, map[string]any{"lease_id": id, "renewable": true, "lease_duration": seconds(b.TTL),
		"data": map[string]string{"username": "v-approle-readonly-" + id[len(id)-8:], "password": l.password}})
}

func (b *Bao) lease(w http.ResponseWriter, r *http.Request) (string, bool) {
	var in struct {
		ID        string `json:"lease_id"`
		Increment int64  `json:"increment"`
		Sync      bool   `json:"sync"`
	}
	if json.NewDecoder(r.Body).Decode(&in) != nil || !strings.Contains(in.ID, "/") {
		b.deny(w, http.StatusBadRequest, "lease_id not specified")
		return "", false
	}
	b.mu.Lock()
	_, ok := b.leases[in.ID]
	b.mu.Unlock()
	return in.ID, ok
}

func (b *Bao) renew(w http.ResponseWriter, r *http.Request) {
	id, ok := b.lease(w, r)
	if !ok {
		b.deny(w, http.StatusBadRequest, "lease not found")
		return
	}
	reply(w, 200, map[string]any{"lease_id": id, "renewable": true, "lease_duration": seconds(b.TTL)})
}

func (b *Bao) revoke(w http.ResponseWriter, r *http.Request) {
	id, ok := b.lease(w, r)
	if ok {
		b.forget(id)
	}
	if id != "" {
		w.WriteHeader(http.StatusNoContent) // also for one that is not there
	}
}
