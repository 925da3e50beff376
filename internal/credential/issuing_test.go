package credential

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/issuer"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/tokencheck"
)

const testIssuer = "https://issuer.test"

// wall is a wall clock that can be set.
type wall struct{ at atomic.Int64 }

func newWall() *wall {
	w := &wall{}
	w.at.Store(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC).UnixNano())
	return w
}

func (w *wall) now() time.Time                { return time.Unix(0, w.at.Load()) }
func (w *wall) set(by time.Duration)          { w.at.Add(int64(by)) }
func (b *box) pass(by time.Duration)          { b.now.Add(int64(by)) }
func (b *box) both(w *wall, by time.Duration) { b.pass(by); w.set(by) }

func asIssuer(w *wall, change ...func(*IssuerConfig)) func(*Config) {
	return func(c *Config) {
		c.Issuer = &IssuerConfig{URL: testIssuer, TrustDomain: "own.test", Algorithm: issuer.EdDSA, Lifetime: 5 * time.Minute, Audiences: []string{"https://*.own.test"}}
		c.Walltime = w.now
		for _, fn := range change {
			fn(c.Issuer)
		}
	}
}

func booksRequest(kid string, mark uint32) wire.MintRequest {
	req := mintFor(kid, mark)
	req.Mint = []wire.MintToken{{Name: "books", Audience: "https://books.own.test", Scope: []string{"books:read", "books:list"}, Hosts: []string{"books.own.test:443"}}}
	return req
}

func (b *box) mintAll(req wire.MintRequest) map[string]string {
	b.t.Helper()
	var reply wire.MintReply
	if err := b.call("POST", "/v1/sessions", req, &reply); err != nil {
		b.t.Fatal(err)
	}
	return reply.Tokens
}

// jwt returns the JWT that the proxy gets for a token.
func (b *box) jwt(mark uint32, token string) string {
	b.t.Helper()
	reply, err := b.bearer(mark, token, "books.own.test", 443)
	if err != nil {
		b.t.Fatal(err)
	}
	if !reply.Minted || reply.Secret != "books" || strings.Count(reply.Value, ".") != 2 {
		b.t.Fatalf("got %+v", reply)
	}
	return reply.Value
}

// bearer asks as the proxy does that found the token in the Authorization field.
func (b *box) bearer(mark uint32, token, host string, port uint16) (wire.ResolveReply, error) {
	var reply wire.ResolveReply
	err := b.call("POST", "/v1/resolve", wire.ResolveRequest{Mark: mark, Token: token, Host: host, Port: port, Method: "GET", Path: "/", Place: mintedPresentation}, &reply)
	return reply, err
}

func claimsOf(t testing.TB, token string) issuer.Claims {
	t.Helper()
	raw, err := base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[1])
	var c issuer.Claims
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// list says whether the token's bit is set in its list, checked as a service does.
func (b *box) revokedInList(w *wall, token string) bool {
	b.t.Helper()
	checker, err := tokencheck.New(tokencheck.Config{Issuer: testIssuer, Audience: "https://books.own.test", How: tokencheck.StatusList,
		Client: tokencheck.OverUnix(b.path), Now: w.now})
	if err != nil {
		b.t.Fatal(err)
	}
	switch _, err := checker.Check(b.t.Context(), token); {
	case err == nil:
		return false
	case errors.Is(err, tokencheck.ErrRevoked):
		return true
	default:
		b.t.Fatalf("the status list: %v", err)
		return true
	}
}

// TestAKidNeverHoldsTheJWT: its token is opaque, and each use towards the bound host gets a JWT of the session.
func TestAKidNeverHoldsTheJWT(t *testing.T) {
	t.Parallel()
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	token := b.mintAll(booksRequest("kid1", testMark))["books"]
	if !tokenRE.MatchString(token) {
		t.Fatalf("the kid got %q", token)
	}
	jwt := b.jwt(testMark, token)
	c := claimsOf(t, jwt)
	if c.Subject != "spiffe://own.test/card/practice/kid/kid1/session/01KID1" || c.Audience != "https://books.own.test" || c.Scope != "books:read books:list" ||
		c.Expires-c.IssuedAt != 300 || c.NotBefore != c.IssuedAt || c.Session != "01KID1" || c.Kid != "kid1" || c.Card != "practice" || c.Issuer != testIssuer || c.ID == "" {
		t.Errorf("%+v", c)
	}
	if got := b.introspect(jwt); !got.Active || got.ID != c.ID || got.Kid != c.Subject || got.Scope != c.Scope || got.Audience != c.Audience || got.Session != c.Session {
		t.Errorf("introspection: %+v", got)
	}
	if got := b.introspect(token); !got.Active {
		t.Errorf("the opaque token: %+v", got)
	}
	if b.revokedInList(w, jwt) {
		t.Error("it is revoked in the status list")
	}
	if again := b.jwt(testMark, token); again != jwt {
		t.Error("a second use got another JWT at once")
	}
	b.both(w, 151*time.Second)
	if again := b.jwt(testMark, token); again == jwt {
		t.Error("with less than half of its life left it was handed out")
	}
	for what, req := range map[string]struct {
		mark uint32
		host string
		port uint16
	}{"another host": {testMark, "evil.test", 443}, "another port": {testMark, "books.own.test", 80}, "another session": {otherMark, "books.own.test", 443}} {
		_, err := b.bearer(req.mark, token, req.host, req.port)
		t.Run(what, func(t *testing.T) { refusedWith(t, err, http.StatusForbidden, reason.TokenScope) })
	}
	_, err := b.resolve(testMark, token, "books.own.test", 443)
	refusedWith(t, err, http.StatusForbidden, reason.TokenScope) // in another place than a bearer token's
	b.stop()
	seen := 0
	for _, rec := range append(b.rec.find(audit.EventTokenMinted), b.rec.find(audit.EventTokenUsed)...) {
		raw, err := json.Marshal(rec)
		if err != nil || strings.Contains(string(raw), jwt) || strings.Contains(string(raw), token) {
			t.Errorf("a record holds a token, %v", err)
		}
		if rec.Fields["jti"] == c.ID {
			seen++
		}
	}
	if seen < 2 {
		t.Errorf("%d records name the JWT", seen)
	}
}

// TestRevokingASessionEndsItsJWTs at once, in introspection and in the status list, whatever their times say; others stay.
func TestRevokingASessionEndsItsJWTs(t *testing.T) {
	t.Parallel()
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	one := b.jwt(testMark, b.mintAll(booksRequest("kid1", testMark))["books"])
	two := b.jwt(otherMark, b.mintAll(booksRequest("kid2", otherMark))["books"])
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}}, nil); err != nil {
		t.Fatal(err)
	}
	if b.introspect(one).Active || !b.revokedInList(w, one) {
		t.Error("the revoked session's JWT counts")
	}
	if !b.introspect(two).Active || b.revokedInList(w, two) {
		t.Error("the other session's JWT does not count")
	}
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{All: true}, nil); err != nil {
		t.Fatal(err)
	}
	if b.introspect(two).Active || !b.revokedInList(w, two) {
		t.Error("a JWT counts after everything was revoked")
	}
}

// TestTheBootClockEndsJWTs: setting the wall clock neither ends one early for the issuer nor keeps one alive.
func TestTheBootClockEndsJWTs(t *testing.T) {
	t.Parallel()
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	token := b.mintAll(booksRequest("kid1", testMark))["books"]
	jwt := b.jwt(testMark, token)
	w.set(-24 * time.Hour)
	b.pass(5*time.Minute - 1)
	if !b.introspect(jwt).Active {
		t.Error("set back, it ended early")
	}
	b.pass(1)
	if b.introspect(jwt).Active {
		t.Error("set back, it outlived its time")
	}
	// The clock is right again: its exp is not over, and the list says all the same that it is.
	w.set(24 * time.Hour)
	if !b.revokedInList(w, jwt) {
		t.Error("the list has an expired JWT as valid")
	}
	// A JWT from before a step is not handed out after it: its times are wrong.
	next := b.jwt(testMark, token)
	w.set(-time.Hour)
	back := b.jwt(testMark, token)
	w.set(2 * time.Hour)
	forth := b.jwt(testMark, token)
	if next == back || back == forth {
		t.Error("a JWT was handed out across a step of the clock")
	}
	for _, jwt := range []string{next, back, forth} {
		if !b.introspect(jwt).Active {
			t.Error("a step ended a JWT")
		}
	}
}

// TestTheBoxBoundsLifetimes: the box's limit, the card's and the session's; the least wins.
func TestTheBoxBoundsLifetimes(t *testing.T) {
	t.Parallel()
	b := newBox(t).start(asIssuer(newWall()))
	for n, c := range []struct{ card, session, want time.Duration }{
		{0, 0, 5 * time.Minute}, {time.Hour, 0, 5 * time.Minute}, {30 * time.Second, 0, 30 * time.Second}, {0, 10 * time.Second, 10 * time.Second},
	} {
		mark := uint32(testMark + n)
		req := booksRequest("kid"+string(rune('a'+n)), mark)
		req.Mint[0].Lifetime, req.TTL = c.card, c.session
		claims := claimsOf(t, b.jwt(mark, b.mintAll(req)["books"]))
		if got := time.Duration(claims.Expires-claims.IssuedAt) * time.Second; got != c.want {
			t.Errorf("%+v: it lives %v", c, got)
		}
	}
}

// TestARestartEndsEverything: what was made before is inactive, its list unknown, and the keys are the same.
func TestARestartEndsEverything(t *testing.T) {
	t.Parallel()
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	jwt := b.jwt(testMark, b.mintAll(booksRequest("kid1", testMark))["books"])
	list := claimsOf(t, jwt).Status.List.URI
	before := b.get(list)
	keys := b.get(testIssuer + "/.well-known/jwks.json")
	if before.status != http.StatusOK || before.kind != "application/statuslist+jwt" || keys.kind != "application/jwk-set+json" {
		t.Fatalf("%+v %+v", before, keys)
	}
	b.stop()
	b.start(asIssuer(w))
	if b.introspect(jwt).Active {
		t.Error("a JWT outlived a restart")
	}
	if got := b.get(list); got.status != http.StatusNotFound {
		t.Errorf("its list: %+v", got)
	}
	if got := b.get(testIssuer + "/.well-known/jwks.json"); got.body != keys.body {
		t.Error("the keys changed")
	}
}

type answer struct {
	status     int
	kind, body string
}

func (b *box) get(from string) answer {
	b.t.Helper()
	c := tokencheck.OverUnix(b.path)
	defer c.CloseIdleConnections()
	resp, err := c.Get(from)
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close() // read below
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header.Get("Content-Type"), string(raw)}
}

// TestSigningKeysAreSealed: no private key lies in clear, others cannot read the file, and a damaged one stops the start.
func TestSigningKeysAreSealed(t *testing.T) {
	t.Parallel()
	for _, alg := range []string{issuer.EdDSA, issuer.ES256} {
		w := newWall()
		b := newBox(t)
		as := asIssuer(w, func(c *IssuerConfig) { c.Algorithm = alg })
		b.start(as)
		plain, err := b.svc.issuing.keys().Marshal()
		if err != nil {
			t.Fatal(err)
		}
		var kept struct {
			Current struct{ Key struct{ D string } }
		}
		if err := json.Unmarshal(plain, &kept); err != nil || len(kept.Current.Key.D) < 40 {
			t.Fatalf("the test knows no private key: %v", err)
		}
		b.stop()
		if _, err := b.svc.issuing.keys().Marshal(); err == nil {
			t.Error("the keys are in memory after the end")
		}
		file := filepath.Join(b.dir, "issuer.age")
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%v %v", info, err)
		}
		files, err := filepath.Glob(filepath.Join(b.dir, "*"))
		if err != nil || len(files) < 3 {
			t.Fatal(files, err)
		}
		for _, f := range files {
			if info, err := os.Stat(f); err == nil && info.IsDir() {
				continue // the journal of leases, which has none
			}
			raw, err := os.ReadFile(f)
			if err != nil || bytes.Contains(raw, []byte(kept.Current.Key.D)) {
				t.Errorf("%s holds a private key, %v", f, err)
			}
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		raw[len(raw)-1] ^= 1
		if err := os.WriteFile(file, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		cfg := b.config()
		as(&cfg)
		if _, err := Open(cfg); err == nil || !strings.Contains(err.Error(), "signing keys") {
			t.Errorf("a damaged file: %v", err)
		}
	}
}

// TestKeysRotate: what the old key signed counts on, and the next key was known before; the time alone rotates too.
func TestKeysRotate(t *testing.T) {
	t.Parallel()
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	token := b.mintAll(booksRequest("kid1", testMark))["books"]
	old := b.jwt(testMark, token)
	published := b.get(testIssuer + "/.well-known/jwks.json").body
	var turn wire.IssuerRotation
	if err := b.call("POST", "/v1/issuer/rotate", nil, &turn); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(published, turn.Current) {
		t.Error("the key that signs was not published before")
	}
	b.both(w, 4*time.Minute)
	fresh := b.jwt(testMark, token)
	if !b.introspect(old).Active || !b.introspect(fresh).Active {
		t.Error("a rotation ended a JWT")
	}
	var info wire.IssuerInfo
	if err := b.call("GET", "/v1/issuer", nil, &info); err != nil || info.Issuer != testIssuer || len(info.Keys) != 3 || info.Keys[0].ID != turn.Current || info.Live != 2 {
		t.Errorf("%+v, %v", info, err)
	}
	if recs := b.rec.find(audit.EventIssuerChanged); len(recs) != 1 || recs[0].Fields["change"] != "rotated" {
		t.Errorf("%+v", recs)
	}
	b.stop()
	b.start(asIssuer(w, func(c *IssuerConfig) { c.RotateEvery = time.Hour }))
	if info := b.svc.issuing.keys().Info(); info[0].ID != turn.Current {
		t.Error("the rotation did not survive a restart")
	}
	b.stop()
	w.set(time.Hour)
	b.start(asIssuer(w, func(c *IssuerConfig) { c.RotateEvery = time.Hour }))
	b.wait("the key to rotate by itself", func() bool { return b.svc.issuing.keys().Info()[0].ID != turn.Current })
}

// TestWhatIsNotMinted: what the box denies, by name, scope or audience, and everything where the box is no issuer.
func TestWhatIsNotMinted(t *testing.T) {
	t.Parallel()
	b := newBox(t).start(asIssuer(newWall()))
	b.put("vendor", testValue, "api.vendor.test:443")
	for what, c := range map[string]struct {
		change func(*wire.MintRequest)
		status int
		code   reason.Code
	}{
		"payment name":                       {func(r *wire.MintRequest) { r.Mint[0].Name = "Payment_x" }, 403, reason.SecretDenied},
		"denied name":                        {func(r *wire.MintRequest) { r.Mint[0].Name = "root_x" }, 403, reason.SecretDenied},
		"payment scope":                      {func(r *wire.MintRequest) { r.Mint[0].Scope = []string{"payment_refund"} }, 403, reason.SecretDenied},
		"a scope with a slash":               {func(r *wire.MintRequest) { r.Mint[0].Scope = []string{"payment_refund/all"} }, 403, reason.SecretDenied},
		"a scope of letters that look alike": {func(r *wire.MintRequest) { r.Mint[0].Scope = []string{"ｐayment_refund"} }, 400, reason.Malformed},
		"denied audience":                    {func(r *wire.MintRequest) { r.Mint[0].Audience = "root_x/y" }, 403, reason.SecretDenied},
		"denied scope":                       {func(r *wire.MintRequest) { r.Mint[0].Scope = []string{"MASTER"} }, 403, reason.SecretDenied},
		"another audience":                   {func(r *wire.MintRequest) { r.Mint[0].Audience = "https://pay.bank.test" }, 403, reason.SecretDenied},
		"two scopes in one":                  {func(r *wire.MintRequest) { r.Mint[0].Scope = []string{"a payment_refund"} }, 400, reason.Malformed},
		"no audience":                        {func(r *wire.MintRequest) { r.Mint[0].Audience = "" }, 400, reason.Malformed},
		"no hosts":                           {func(r *wire.MintRequest) { r.Mint[0].Hosts = nil }, 400, reason.Malformed},
		"hosts and inside":                   {func(r *wire.MintRequest) { r.Mint[0].Inside = true }, 400, reason.Malformed},
		"a bad host":                         {func(r *wire.MintRequest) { r.Mint[0].Hosts = []string{"*:443"} }, 400, reason.Malformed},
		"twice":                              {func(r *wire.MintRequest) { r.Mint = append(r.Mint, r.Mint[0]) }, 400, reason.Malformed},
		"as a secret":                        {func(r *wire.MintRequest) { r.Mint[0].Name = "vendor"; r.Secrets = []wire.MintSecret{{Name: "vendor"}} }, 400, reason.Malformed},
		"negative":                           {func(r *wire.MintRequest) { r.Mint[0].Lifetime = -1 }, 400, reason.Malformed},
		"a kid with a way out":               {func(r *wire.MintRequest) { r.Card = "a/../b" }, 400, reason.Malformed},
	} {
		req := booksRequest("kid1", testMark)
		c.change(&req)
		err := b.call("POST", "/v1/sessions", req, nil)
		t.Run(what, func(t *testing.T) { refusedWith(t, err, c.status, c.code) })
	}
	plain := newBox(t).start()
	refusedWith(t, plain.call("POST", "/v1/sessions", booksRequest("kid1", testMark), nil), 403, reason.SecretDenied)
	if plain.svc.Door() != nil {
		t.Error("a box that is no issuer has a door")
	}
	if err := plain.call("GET", "/v1/issuer", nil, nil); err == nil {
		t.Error("a box that is no issuer describes one")
	}
}

// TestAJWTForTheKidItself is in the reply, counts only with the session, and the proxy gets none for it.
func TestAJWTForTheKidItself(t *testing.T) {
	t.Parallel()
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	req := booksRequest("kid1", testMark)
	req.Mint[0].Hosts, req.Mint[0].Inside = nil, true
	jwt := b.mintAll(req)["books"]
	if !b.introspect(jwt).Active || b.revokedInList(w, jwt) {
		t.Fatal("it does not count")
	}
	if _, err := b.resolve(testMark, jwt, "books.own.test", 443); err == nil {
		t.Error("the proxy swapped a JWT")
	}
	if err := b.call("DELETE", "/v1/sessions/kid1", nil, nil); err != nil {
		t.Fatal(err)
	}
	if b.introspect(jwt).Active || !b.revokedInList(w, jwt) {
		t.Error("it counts after the session's end")
	}
}

// TestListsFillUp: a list that is half full takes no more, and goes when everything in it has expired.
func TestListsFillUp(t *testing.T) {
	t.Parallel()
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	first := b.jwt(testMark, b.mintAll(booksRequest("kid1", testMark))["books"])
	s := b.svc.issuing
	old := s.byID[claimsOf(t, first).ID]
	for n := range listFull + 10 {
		s.enter(&issued{h: old.h, m: old.m, ends: time.Hour, claims: issuer.Claims{ID: string(rune(n + 0x1000))}})
	}
	if len(s.lists) != 2 || s.lists[0].used != listFull {
		t.Fatalf("%d lists", len(s.lists))
	}
	if b.revokedInList(w, first) {
		t.Error("the first JWT is revoked")
	}
	b.both(w, time.Hour)
	if live := s.live(); live != 0 || len(s.lists) != 1 || len(s.byID) != 0 {
		t.Errorf("%d live, %d lists, %d known", live, len(s.lists), len(s.byID))
	}
}

// door serves the issuer as other machines see it, and returns a key with the roles.
func (b *box) door(roles ...string) (url, key string) {
	b.t.Helper()
	srv := httptest.NewServer(b.svc.Door())
	b.t.Cleanup(srv.Close)
	var reply wire.IssuerClientReply
	if err := b.call("POST", "/v1/issuer/clients", wire.IssuerClientRequest{Name: "books", Roles: roles}, &reply); err != nil {
		b.t.Fatal(err)
	}
	return srv.URL, reply.Key
}

func form(t testing.TB, to string, values url.Values, auth func(*http.Request)) answer {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, to, strings.NewReader(values.Encode()))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	auth(r)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() // read below
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header.Get("Content-Type"), string(raw)}
}

func bearer(key string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+key) }
}

// TestTheDoorKnowsItsClients: keys and lists are for everybody, questions for those with a key and its role.
func TestTheDoorKnowsItsClients(t *testing.T) {
	t.Parallel()
	b := newBox(t).start(asIssuer(newWall()))
	jwt := b.jwt(testMark, b.mintAll(booksRequest("kid1", testMark))["books"])
	door, key := b.door("introspect")
	for _, open := range []string{"/.well-known/jwks.json", "/.well-known/oauth-authorization-server", strings.TrimPrefix(claimsOf(t, jwt).Status.List.URI, testIssuer)} {
		resp, err := http.Get(door + open)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v %v", open, resp, err)
		}
		resp.Body.Close() // only its status
	}
	ask := url.Values{"token": {jwt}}
	for what, c := range map[string]struct {
		path string
		auth func(*http.Request)
		want int
	}{
		"key": {"/introspect", bearer(key), 200}, "basic": {"/introspect", func(r *http.Request) { r.SetBasicAuth("books", key) }, 200},
		"no key": {"/introspect", func(*http.Request) {}, 401}, "wrong key": {"/introspect", bearer(key + "x"), 401}, "empty key": {"/introspect", bearer(""), 401},
		"another's name": {"/introspect", func(r *http.Request) { r.SetBasicAuth("other", key) }, 401}, "without the role": {"/revoke", bearer(key), 403},
		"the socket's routes": {"/v1/sessions", bearer(key), 404}, "the vault": {"/v1/vault/x", bearer(key), 404}, "rotation": {"/v1/issuer/rotate", bearer(key), 404},
	} {
		if got := form(t, door+c.path, ask, c.auth); got.status != c.want {
			t.Errorf("%s: %+v, want status %d", what, got, c.want)
		}
	}
	if got := form(t, door+"/introspect", ask, bearer(key)); !strings.Contains(got.body, `"active":true`) {
		t.Errorf("%+v", got)
	}
	for what, bad := range map[string]url.Values{"nothing": {}, "two": {"token": {jwt, jwt}}, "empty": {"token": {""}}, "long": {"token": {strings.Repeat("x", maxForm)}}} {
		if got := form(t, door+"/introspect", bad, bearer(key)); got.status != http.StatusBadRequest || !strings.Contains(got.body, "invalid_request") {
			t.Errorf("%s: %+v", what, got)
		}
	}
	if got := form(t, door+"/introspect?token="+jwt, url.Values{}, bearer(key)); got.status != http.StatusBadRequest {
		t.Errorf("in the URL: %+v", got)
	}
	if recs := b.rec.find(audit.EventAPIRefused); len(recs) == 0 {
		t.Error("a stranger left no record")
	}
	if err := b.call("DELETE", "/v1/issuer/clients/books", nil, nil); err != nil {
		t.Fatal(err)
	}
	if got := form(t, door+"/introspect", ask, bearer(key)); got.status != 401 {
		t.Errorf("a key that was removed: %+v", got)
	}
	raw, err := os.ReadFile(clientsFile(b.dir))
	if err != nil || strings.Contains(string(raw), key) {
		t.Errorf("the key is kept: %v", err)
	}
}

// TestAServiceCanRevoke (RFC 7009): the JWT and its like end, the session goes on, and a second time is fine.
func TestAServiceCanRevoke(t *testing.T) {
	t.Parallel()
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	b.put("vendor", testValue, "api.vendor.test:443")
	req := booksRequest("kid1", testMark)
	req.Secrets = []wire.MintSecret{{Name: "vendor"}}
	tokens := b.mintAll(req)
	jwt := b.jwt(testMark, tokens["books"])
	door, key := b.door("revoke")
	for range 2 {
		if got := form(t, door+"/revoke", url.Values{"token": {jwt}, "token_type_hint": {"refresh_token"}}, bearer(key)); got.status != 200 || got.body != "" {
			t.Fatalf("%+v", got)
		}
	}
	if b.introspect(jwt).Active || !b.revokedInList(w, jwt) {
		t.Error("it counts")
	}
	_, err := b.resolve(testMark, tokens["books"], "books.own.test", 443)
	refusedWith(t, err, http.StatusForbidden, reason.TokenUnknown)
	if got, err := b.resolve(testMark, tokens["vendor"], "api.vendor.test", 443); err != nil || got.Value != testValue {
		t.Errorf("the session's other token: %v", err)
	}
	if recs := b.rec.find(audit.EventTokenRevoked); len(recs) != 1 || recs[0].Fields["jti"] == "" || recs[0].Actor != "key:books" {
		t.Errorf("%+v", recs)
	}
	if got := form(t, door+"/revoke", url.Values{"token": {"nobody's"}}, bearer(key)); got.status != 200 {
		t.Errorf("a token nobody knows: %+v", got)
	}
}

// TestASlowStrangerDelaysNoRevocation: a client over TCP that takes no answer holds a revocation up for doorDeliver. The
// control gives it longer, and that is seen.
func TestASlowStrangerDelaysNoRevocation(t *testing.T) {
	t.Parallel()
	took := func(within time.Duration) time.Duration {
		b := newBox(t).start(asIssuer(newWall()))
		jwt := b.jwt(testMark, b.mintAll(booksRequest("kid1", testMark))["books"])
		w := &stuck{head: http.Header{}, entered: make(chan struct{})}
		done := make(chan struct{})
		go func() {
			defer close(done)
			b.svc.answerIntrospection(w, jwt, "key:slow", false, within)
		}()
		<-w.entered
		start := time.Now()
		if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}}, nil); err != nil {
			t.Fatal(err)
		}
		took := time.Since(start)
		<-done
		return took
	}
	if long := took(600 * time.Millisecond); long < 300*time.Millisecond {
		t.Errorf("the control's revocation took %v: the test shows nothing", long)
	}
	if short := took(doorDeliver); short > 300*time.Millisecond {
		t.Errorf("the revocation took %v", short)
	}
}

// stuck is a caller who takes nothing until its deadline.
type stuck struct {
	head    http.Header
	entered chan struct{}
	until   time.Time
}

func (s *stuck) Header() http.Header                { return s.head }
func (s *stuck) WriteHeader(int)                    {}
func (s *stuck) SetWriteDeadline(t time.Time) error { s.until = t; return nil }
func (s *stuck) Write([]byte) (int, error) {
	ctx, cancel := context.WithDeadline(context.Background(), s.until)
	defer cancel()
	close(s.entered)
	<-ctx.Done()
	return 0, os.ErrDeadlineExceeded
}

// FuzzIssuerForm: whatever the body of a question is, it is answered with the form's own errors or a whole answer.
func FuzzIssuerForm(f *testing.F) {
	b := newBox(f).start(asIssuer(newWall()))
	door := b.svc.Door()
	var reply wire.IssuerClientReply
	if err := b.call("POST", "/v1/issuer/clients", wire.IssuerClientRequest{Name: "f", Roles: []string{"introspect", "revoke"}}, &reply); err != nil {
		f.Fatal(err)
	}
	f.Add("token=a.b.c", "application/x-www-form-urlencoded")
	f.Add("token=tgo_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa&token_type_hint=x", "application/x-www-form-urlencoded")
	f.Add("%zz;&token=%00", "application/x-www-form-urlencoded; charset=x")
	f.Add("--x\r\n\r\n--x--", "multipart/form-data; boundary=x")
	f.Fuzz(func(t *testing.T, body, kind string) {
		for _, path := range []string{"/introspect", "/revoke"} {
			r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
			r.Header.Set("Content-Type", kind)
			r.Header.Set("Authorization", "Bearer "+reply.Key)
			rec := httptest.NewRecorder()
			door.ServeHTTP(rec, r)
			if rec.Code != 200 && rec.Code != 400 || rec.Code == 200 && strings.Contains(rec.Body.String(), `"active":true`) {
				t.Errorf("%s %q (%q): %d %s", path, body, kind, rec.Code, rec.Body)
			}
		}
	})
}

// TestASealedIssuerSignsNothing: until the vault is opened there are no keys, for nobody; then they are the same as before.
func TestASealedIssuerSignsNothing(t *testing.T) {
	t.Parallel()
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	keys := b.get(testIssuer + "/.well-known/jwks.json").body
	key := testKey(t)
	if err := b.call("POST", "/v1/vault-seal", wire.SealRequest{Recipient: key.Recipient().String()}, nil); err != nil {
		t.Fatal(err)
	}
	b.stop()
	b.start(asIssuer(w))
	refusedWith(t, b.call("POST", "/v1/sessions", booksRequest("kid1", testMark), nil), http.StatusServiceUnavailable, reason.VaultSealed)
	if got := b.get(testIssuer + "/.well-known/jwks.json"); got.status != http.StatusServiceUnavailable {
		t.Errorf("keys of a sealed issuer: %+v", got)
	}
	if err := b.call("POST", "/v1/issuer/rotate", nil, nil); err == nil {
		t.Error("a sealed issuer rotated its keys")
	}
	if err := b.call("POST", "/v1/vault-unlock", wire.UnlockRequest{Key: key.String()}, nil); err != nil {
		t.Fatal(err)
	}
	if got := b.get(testIssuer + "/.well-known/jwks.json").body; got != keys {
		t.Error("the keys are others")
	}
	if !b.introspect(b.jwt(testMark, b.mintAll(booksRequest("kid1", testMark))["books"])).Active {
		t.Error("an opened issuer's JWT does not count")
	}
}

// TestAFloodOfListsDelaysNoRevocation: strangers who ask for a status list as fast as they can, while many tokens live. What
// a revocation takes then is compared with what it takes without them.
func TestAFloodOfListsDelaysNoRevocation(t *testing.T) {
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	jwt := b.jwt(testMark, b.mintAll(booksRequest("kid1", testMark))["books"])
	s := b.svc.issuing
	first, err := s.find(jwt)
	if err != nil {
		t.Fatal(err)
	}
	for n := range listFull - 1 {
		s.enter(&issued{h: first.h, m: first.m, from: first.from, ends: first.ends, claims: issuer.Claims{ID: strconv.Itoa(n)}})
	}
	list := strings.TrimPrefix(claimsOf(t, jwt).Status.List.URI, testIssuer)
	door := b.svc.Door()
	ctx, cancel := context.WithCancel(t.Context())
	var asked atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				rec := httptest.NewRecorder()
				door.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, list, nil))
				if rec.Code != http.StatusOK {
					t.Errorf("%d %s", rec.Code, rec.Body)
					return
				}
				asked.Add(1)
			}
		})
	}
	b.wait("a thousand lists", func() bool { return asked.Load() > 1000 })
	var took []time.Duration
	for n := range 50 { // each makes the next list anew
		start := time.Now()
		b.svc.tokens.revokeMarks([]uint32{uint32(otherMark + n)}, "")
		took = append(took, time.Since(start))
	}
	cancel()
	wg.Wait()
	slices.Sort(took)
	t.Logf("%d lists; a revocation took %v, %v at most", asked.Load(), took[25], took[49])
	if took[25] > 5*time.Millisecond {
		t.Errorf("half of the revocations took more than %v", took[25])
	}
}

// TestRenewal: what a kid holds itself is another one when half of its life is over, and nothing once it is revoked.
func TestRenewal(t *testing.T) {
	t.Parallel()
	w := newWall()
	b := newBox(t).start(asIssuer(w))
	req := booksRequest("kid1", testMark)
	req.Mint[0].Hosts, req.Mint[0].Inside = nil, true
	var first, same, next wire.MintReply
	renew := func(out *wire.MintReply) error { return b.call("POST", "/v1/sessions/kid1/renew", nil, out) }
	if err := errors.Join(b.call("POST", "/v1/sessions", req, &first), renew(&same)); err != nil {
		t.Fatal(err)
	}
	if first.Renew != 150*time.Second || same.Tokens["books"] != first.Tokens["books"] || same.Renew != first.Renew {
		t.Errorf("%v, then %v", first.Renew, same.Renew)
	}
	b.both(w, first.Renew)
	if err := renew(&next); err != nil || next.Tokens["books"] == "" || next.Tokens["books"] == first.Tokens["books"] {
		t.Errorf("renewed: %v, %v", next.Renew, err)
	}
	if !b.introspect(first.Tokens["books"]).Active || !b.introspect(next.Tokens["books"]).Active {
		t.Error("the old one ended before its time, or the new one does not count")
	}
	opaque := b.mintAll(booksRequest("kid2", otherMark))
	var none wire.MintReply
	if err := b.call("POST", "/v1/sessions/kid2/renew", nil, &none); err != nil || len(none.Tokens) != 0 || none.Renew != 0 || opaque["books"] == "" {
		t.Errorf("a kid that holds none: %v", err)
	}
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}}, nil); err != nil {
		t.Fatal(err)
	}
	refusedWith(t, renew(&next), http.StatusNotFound, reason.TokenUnknown)
}
