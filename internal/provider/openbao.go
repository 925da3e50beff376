package provider

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"time"
)

// OpenBao leases dynamic secrets from OpenBao or HashiCorp Vault, whose API is the same here: a read of the role's
// path makes a lease, /v1/sys/leases/renew and /v1/sys/leases/revoke renew and revoke it.
//
// With AppRole each lease gets a login of its own, and its token is what Note is told first: revoking that token
// revokes whatever was made with it, also a lease whose answer was lost. Policies that it needs beside the role's
// path: update on sys/leases/revoke and sys/leases/renew, and the built-in "default".
type OpenBao struct {
	Call      Call
	URL       string // https://host:port, without a path
	Namespace string // may be empty
	TokenFile string // file with a token, read at each use; empty: AppRole
	Mount     string // where AppRole is: "approle"
	RoleID    string // vault entries with which AppRole logs in
	SecretID  string
	Secrets   Secrets
	Roles     map[string]OpenBaoRole
}

// OpenBaoRole is one secret that can be leased.
type OpenBaoRole struct {
	Path  string // "database/creds/readonly"
	Value string // the field of the answer that is the secret
	User  string // the field that is the user name that goes with it; may be empty
}

// maxTokenFile bounds the file with a token, in bytes.
const maxTokenFile = 8 << 10

// baoAnswer is the part of an answer that counts (API documentation, "Read secret", "AppRole: login").
type baoAnswer struct {
	LeaseID   string                     `json:"lease_id"`
	Renewable bool                       `json:"renewable"`
	Seconds   int64                      `json:"lease_duration"`
	Data      map[string]json.RawMessage `json:"data"`
	Auth      *struct {
		Token   string `json:"client_token"`
		Seconds int64  `json:"lease_duration"`
	} `json:"auth"`
}

// Mint logs in and reads the role's path.
func (b *OpenBao) Mint(ctx context.Context, r Request) (Lease, error) {
	role, ok := b.Roles[r.Role]
	if !ok {
		return Lease{}, fail(Refused, "no role is called %q", r.Role)
	}
	token, most, err := b.login(ctx)
	if err != nil {
		return Lease{}, err
	}
	h := Handle{Role: r.Role}
	if b.ownToken() {
		h.Token = token
		if err := r.Note(h); err != nil {
			return Lease{}, err
		}
	}
	var got baoAnswer
	if err := b.call(ctx, "reading "+role.Path, http.MethodGet, role.Path, token, nil, &got); err != nil {
		return Lease{}, err
	}
	lease, err := role.lease(h, got, most)
	if err != nil {
		return Lease{}, err
	}
	return lease, r.Note(lease.Handle)
}

// lease reads an answer. most is how long the login lives, which the lease cannot outlive; 0: it does not end.
func (r OpenBaoRole) lease(h Handle, got baoAnswer, most time.Duration) (Lease, error) {
	if err := checkHandle(got.LeaseID); err != nil {
		return Lease{}, fail(Malformed, "reading %s gave no lease: is it a dynamic secret?", r.Path)
	}
	h.ID = got.LeaseID
	lives, err := lifetime(got.Seconds)
	if err != nil {
		return Lease{}, err
	}
	if most > 0 {
		lives = min(lives, most)
	}
	l := Lease{Handle: h, Lifetime: lives, Renewable: got.Renewable}
	if l.Secret.Value, err = r.field(got, r.Value); err != nil {
		return Lease{}, err
	}
	if r.User != "" {
		if l.Secret.User, err = r.field(got, r.User); err != nil {
			return Lease{}, err
		}
	}
	return l, checkSecret(l.Secret)
}

func (r OpenBaoRole) field(got baoAnswer, name string) (string, error) {
	var s string
	if json.Unmarshal(got.Data[name], &s) != nil || s == "" { // the decoder's words may quote the value
		return "", fail(Malformed, "reading %s gave no text called %s", r.Path, name)
	}
	return s, nil
}

// Renew renews the lease and the login that it hangs on.
func (b *OpenBao) Renew(ctx context.Context, h Handle, lifetimeWanted time.Duration) (time.Duration, error) {
	token, most, err := b.speaker(ctx, h)
	if err != nil {
		return 0, err
	}
	increment := int64(lifetimeWanted / time.Second)
	if b.ownToken() {
		var got baoAnswer
		if err := b.call(ctx, "renewing its login", http.MethodPost, "auth/token/renew-self", token, map[string]any{"increment": increment}, &got); err != nil {
			return 0, err
		}
		if got.Auth == nil {
			return 0, fail(Malformed, "renewing its login: the answer holds none")
		}
		if most, err = lifetime(got.Auth.Seconds); err != nil {
			return 0, err
		}
	}
	var got baoAnswer
	err = b.call(ctx, "renewing the lease", http.MethodPut, "sys/leases/renew", token, map[string]any{"lease_id": h.ID, "increment": increment}, &got)
	if err != nil {
		return 0, err
	}
	lives, err := lifetime(got.Seconds)
	if err == nil && most > 0 {
		lives = min(lives, most)
	}
	return lives, err
}

// Revoke revokes the lease, waits until that is done (sync), and ends the login that it was made with.
func (b *OpenBao) Revoke(ctx context.Context, h Handle) error {
	if h.ID == "" && h.Token == "" {
		return nil // there was a note of a login that never came
	}
	if h.ID != "" {
		token, _, err := b.speaker(ctx, h)
		if err != nil {
			return err
		}
		body := map[string]any{"lease_id": h.ID, "sync": true}
		err = b.call(ctx, "revoking the lease", http.MethodPut, "sys/leases/revoke", token, body, nil)
		if h.Token != "" && KindOf(err) == Refused && err != nil { // its own login may be over: another one can do it
			if token, _, err = b.login(ctx); err != nil {
				return err
			}
			err = b.call(ctx, "revoking the lease", http.MethodPut, "sys/leases/revoke", token, body, nil)
			b.end(ctx, token)
		}
		if err != nil {
			return err
		}
	}
	if h.Token == "" {
		return nil
	}
	err := b.end(ctx, h.Token)
	if err != nil && KindOf(err) == Refused && h.ID != "" {
		return nil // the login is over already; the lease was revoked before
	}
	return err // without a lease's name the login is all there is: a refusal may mean that it lives and may not do this
}

// end revokes a login of ours, and with it what was made with it.
func (b *OpenBao) end(ctx context.Context, token string) error {
	if !b.ownToken() {
		return nil // the file's token belongs to whoever writes the file
	}
	return b.call(ctx, "ending its login", http.MethodPost, "auth/token/revoke-self", token, nil, nil)
}

// ownToken says whether each lease has a login of its own.
func (b *OpenBao) ownToken() bool { return b.TokenFile == "" }

// speaker returns a token that may speak for the lease.
func (b *OpenBao) speaker(ctx context.Context, h Handle) (string, time.Duration, error) {
	if h.Token != "" {
		return h.Token, 0, nil
	}
	return b.login(ctx)
}

// login returns a token and how long it lives, 0 where nobody says.
func (b *OpenBao) login(ctx context.Context) (string, time.Duration, error) {
	if b.TokenFile != "" {
		token, err := readToken(b.TokenFile)
		return token, 0, err
	}
	roleID, err := b.Secrets(b.RoleID)
	if err != nil {
		return "", 0, fail(Refused, "logging in: %v", err)
	}
	secretID, err := b.Secrets(b.SecretID)
	if err != nil {
		return "", 0, fail(Refused, "logging in: %v", err)
	}
	var got baoAnswer
	err = b.call(ctx, "logging in", http.MethodPost, "auth/"+b.Mount+"/login", "", map[string]string{"role_id": roleID, "secret_id": secretID}, &got)
	if err != nil {
		return "", 0, err
	}
	if got.Auth == nil || checkHandle(got.Auth.Token) != nil {
		return "", 0, fail(Malformed, "logging in: the answer holds no token")
	}
	lives, err := lifetime(got.Auth.Seconds)
	return got.Auth.Token, lives, err
}

// readToken reads the file anew at each use: whoever writes it renews the token.
func readToken(file string) (string, error) {
	raw, err := os.ReadFile(file)
	defer clear(raw)
	if err != nil {
		return "", fail(Refused, "reading its token: %v", err)
	}
	token := strings.TrimSpace(string(raw))
	if len(raw) > maxTokenFile || checkHandle(token) != nil {
		return "", fail(Refused, "reading its token: %s does not hold one", file)
	}
	return token, nil
}

func (b *OpenBao) call(ctx context.Context, what, method, path, token string, in, out any) error {
	header := http.Header{"X-Vault-Request": {"true"}}
	if token != "" {
		header.Set("X-Vault-Token", token)
	}
	if b.Namespace != "" {
		header.Set("X-Vault-Namespace", b.Namespace)
	}
	a, err := b.Call.do(ctx, jsonAsk(what, method, b.URL+"/v1/"+path, header, in))
	if err != nil {
		return err
	}
	defer clear(a.body)
	if !a.ok() {
		return a.no(what, "") // its reasons are sentences, which may quote what was sent
	}
	if out == nil {
		return nil
	}
	return a.read(what, out)
}
