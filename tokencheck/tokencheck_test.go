package tokencheck_test

import (
	"bytes"
	"compress/zlib"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	"tagout/internal/issuer"
	"tagout/tokencheck"
)

var both = map[string]tokencheck.How{"introspection": tokencheck.Introspection, "status list": tokencheck.StatusList}

func TestAGoodTokenPasses(t *testing.T) {
	t.Parallel()
	for name, how := range both {
		w := newWorld(t)
		token, _ := w.token()
		c, err := w.checker(how, 0).Check(t.Context(), token, "books:read")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if c.Session != "S" || c.Kid != "k" || c.Card != "c" || !c.HasScope("books:list") || c.HasScope("books") || c.Expires.Sub(c.Issued) != 5*time.Minute ||
			c.Subject != "spiffe://own.test/card/c/kid/k/session/S" || c.Issuer != w.srv.URL || len(c.Audience) != 1 || c.ID == "" {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// TestES256: the other algorithm, and keys of both in one set.
func TestES256(t *testing.T) {
	t.Parallel()
	for name, how := range both {
		w := newWorldOf(t, issuer.ES256)
		token, bit := w.token()
		c := w.checker(how, 0)
		if _, err := c.Check(t.Context(), token); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		w.revoke(bit)
		if _, err := c.Check(t.Context(), token); !errors.Is(err, tokencheck.ErrRevoked) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWrongTokensAreRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for what, c := range map[string]struct {
		change func(*issuer.Claims)
		scope  string
		want   error
	}{
		"issuer":           {func(c *issuer.Claims) { c.Issuer += "/" }, "books:read", tokencheck.ErrIssuer},
		"audience":         {func(c *issuer.Claims) { c.Audience = audience + ".evil.test" }, "books:read", tokencheck.ErrAudience},
		"scope":            {func(*issuer.Claims) {}, "books:write", tokencheck.ErrScope},
		"part of a scope":  {func(*issuer.Claims) {}, "books", tokencheck.ErrScope},
		"no scope":         {func(c *issuer.Claims) { c.Scope = "" }, "books:read", tokencheck.ErrScope},
		"expired":          {func(c *issuer.Claims) { c.IssuedAt -= 300; c.NotBefore -= 300; c.Expires -= 300 }, "books:read", tokencheck.ErrExpired},
		"of the future":    {func(c *issuer.Claims) { c.NotBefore += 11 }, "books:read", tokencheck.ErrNotYet},
		"made in future":   {func(c *issuer.Claims) { c.IssuedAt += 11 }, "books:read", tokencheck.ErrNotYet},
		"never expires":    {func(c *issuer.Claims) { c.Expires = 0 }, "books:read", tokencheck.ErrMalformed},
		"no id":            {func(c *issuer.Claims) { c.ID = "" }, "books:read", tokencheck.ErrMalformed},
		"no subject":       {func(c *issuer.Claims) { c.Subject = "" }, "books:read", tokencheck.ErrMalformed},
		"another's list":   {func(c *issuer.Claims) { c.Status.List.URI = "https://evil.test/statuslists/1" }, "books:read", tokencheck.ErrMalformed},
		"a likely list":    {func(c *issuer.Claims) { c.Status.List.URI = w.srv.URL + ".evil.test/statuslists/1" }, "books:read", tokencheck.ErrMalformed},
		"a negative index": {func(c *issuer.Claims) { c.Status.List.Index = -1 }, "books:read", tokencheck.ErrMalformed},
		"a huge index":     {func(c *issuer.Claims) { c.Status.List.Index = 1 << 40 }, "books:read", tokencheck.ErrMalformed},
		"beyond the list":  {func(c *issuer.Claims) { c.Status.List.Index = 1 << 10 }, "books:read", tokencheck.ErrUnavailable},
		"no such list":     {func(c *issuer.Claims) { c.Status.List.URI += "0" }, "books:read", tokencheck.ErrUnavailable},
	} {
		token, _ := w.token(c.change)
		got, err := w.checker(tokencheck.StatusList, 0).Check(t.Context(), token, c.scope)
		if got != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: %+v, %v, want %v", what, got, err, c.want)
		}
	}
	if w.count("/statuslists/10") != 1 {
		t.Error("the list that is not there was not asked for: the test shows nothing")
	}
}

// TestAClockThatIsALittleLate accepts what the issuer made a moment ago by its own clock.
func TestAClockThatIsALittleLate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	token, _ := w.token(func(c *issuer.Claims) { c.IssuedAt += 9; c.NotBefore += 9 })
	if _, err := w.checker(tokencheck.Introspection, 0).Check(t.Context(), token); err != nil {
		t.Error(err)
	}
}

func b64(v any) string {
	raw, ok := v.([]byte)
	if !ok {
		raw, _ = json.Marshal(v) // maps of strings
	}
	return base64.RawURLEncoding.EncodeToString(raw)
}

// TestForgeries: no algorithm but the key's, no key but the issuer's, no type but an access token's.
func TestForgeries(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	good, _ := w.token()
	payload, err := base64.RawURLEncoding.DecodeString(strings.Split(good, ".")[1])
	if err != nil {
		t.Fatal(err)
	}
	raw, err := w.ring.Public()
	if err != nil {
		t.Fatal(err)
	}
	var set jose.JSONWebKeySet
	if err := json.Unmarshal(raw, &set); err != nil {
		t.Fatal(err)
	}
	id, public := set.Keys[0].KeyID, set.Keys[0].Key.(ed25519.PublicKey)
	head := func(more map[string]any) string {
		h := map[string]any{"alg": "EdDSA", "typ": "at+jwt", "kid": id}
		for k, v := range more {
			if h[k] = v; v == nil {
				delete(h, k)
			}
		}
		return b64(h)
	}
	mac := func(secret []byte) string {
		signed := head(map[string]any{"alg": "HS256"}) + "." + b64(payload)
		m := hmac.New(sha256.New, secret)
		m.Write([]byte(signed))
		return signed + "." + b64(m.Sum(nil))
	}
	_, mine, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	sign := func(h string) string {
		signed := h + "." + b64(payload)
		return signed + "." + b64(ed25519.Sign(mine, []byte(signed)))
	}
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	es, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: ec, KeyID: id}}, (&jose.SignerOptions{}).WithType("at+jwt"))
	if err != nil {
		t.Fatal(err)
	}
	other, err := es.Sign(payload)
	if err != nil {
		t.Fatal(err)
	}
	esToken, err := other.CompactSerialize()
	if err != nil {
		t.Fatal(err)
	}
	list, err := w.ring.StatusList(issuer.StatusClaims{Issuer: w.srv.URL, Subject: "x", IssuedAt: 1, Expires: 1 << 40}, issuer.NewBits(8))
	if err != nil {
		t.Fatal(err)
	}
	mineJWK := jose.JSONWebKey{Key: mine.Public(), KeyID: "mine", Algorithm: "EdDSA"}
	for what, c := range map[string]struct {
		token string
		want  error
	}{
		"empty":              {"", tokencheck.ErrMalformed},
		"opaque":             {"tgo_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", tokencheck.ErrMalformed},
		"none":               {head(map[string]any{"alg": "none"}) + "." + b64(payload) + ".", tokencheck.ErrMalformed},
		"nOnE":               {head(map[string]any{"alg": "nOnE"}) + "." + b64(payload) + ".", tokencheck.ErrMalformed},
		"no algorithm":       {head(map[string]any{"alg": nil}) + "." + b64(payload) + ".", tokencheck.ErrMalformed},
		"HS256, public key":  {mac(public), tokencheck.ErrMalformed},
		"HS256, its JSON":    {mac(raw), tokencheck.ErrMalformed},
		"RS256":              {swap(good, 0, head(map[string]any{"alg": "RS256"})), tokencheck.ErrMalformed},
		"ES256 for EdDSA":    {esToken, tokencheck.ErrSignature},
		"somebody's":         {sign(head(nil)), tokencheck.ErrSignature},
		"somebody's own kid": {sign(head(map[string]any{"kid": "mine"})), tokencheck.ErrSignature},
		"a key in it":        {sign(head(map[string]any{"kid": "mine", "jwk": mineJWK})), tokencheck.ErrSignature},
		"a key at a URL":     {sign(head(map[string]any{"kid": "mine", "jku": w.srv.URL + "/mine"})), tokencheck.ErrSignature},
		"no kid":             {sign(head(map[string]any{"kid": nil})), tokencheck.ErrMalformed},
		"a kid of a number":  {sign(head(map[string]any{"kid": 1})), tokencheck.ErrMalformed},
		"a kid with a path":  {sign(head(map[string]any{"kid": "../../../dev/null"})), tokencheck.ErrSignature},
		"another type":       {swap(good, 0, head(map[string]any{"typ": "JWT"})), tokencheck.ErrMalformed},
		"no type":            {swap(good, 0, head(map[string]any{"typ": nil})), tokencheck.ErrMalformed},
		"a status list":      {list, tokencheck.ErrMalformed},
		"critical":           {swap(good, 0, head(map[string]any{"crit": []string{"x"}, "x": 1})), tokencheck.ErrMalformed},
		"b64":                {swap(good, 0, head(map[string]any{"crit": []string{"b64"}, "b64": false})), tokencheck.ErrMalformed},
		"another payload":    {swap(good, 1, b64([]byte(strings.Replace(string(payload), "books:read", "books:write", 1)))), tokencheck.ErrSignature},
		"no signature":       {swap(good, 2, ""), tokencheck.ErrSignature},
		"a zero signature":   {swap(good, 2, b64(make([]byte, 64))), tokencheck.ErrSignature},
		"four parts":         {good + ".x", tokencheck.ErrMalformed},
		"long":               {good + strings.Repeat("A", 9<<10), tokencheck.ErrMalformed},
	} {
		got, err := w.checker(tokencheck.Introspection, 0).Check(t.Context(), c.token)
		if got != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: %+v, %v, want %v", what, got, err, c.want)
		}
		if err != nil && c.token != "" && strings.Contains(err.Error(), c.token) {
			t.Errorf("%s: the error quotes it", what)
		}
	}
	if w.count("/mine") != 0 {
		t.Error("a key was fetched from where a token said")
	}
	if w.count("/introspect") != 0 {
		t.Error("a forgery was sent to the issuer")
	}
}

// TestRevocationIsSeen at the next use without staleness, and after MaxStale at the latest with it.
func TestRevocationIsSeen(t *testing.T) {
	t.Parallel()
	for name, how := range both {
		w := newWorld(t)
		exact, stale := w.checker(how, 0), w.checker(how, 10*time.Second)
		token, bit := w.token()
		for _, c := range []*tokencheck.Checker{exact, stale} {
			if _, err := c.Check(t.Context(), token); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		w.revoke(bit)
		if _, err := exact.Check(t.Context(), token); !errors.Is(err, tokencheck.ErrRevoked) {
			t.Errorf("%s: at the next use: %v", name, err)
		}
		w.pass(10*time.Second - 1)
		if _, err := stale.Check(t.Context(), token); err != nil {
			t.Errorf("%s: within MaxStale nobody was to be asked: %v", name, err)
		}
		w.pass(1)
		if _, err := stale.Check(t.Context(), token); !errors.Is(err, tokencheck.ErrRevoked) {
			t.Errorf("%s: after MaxStale: %v", name, err)
		}
	}
}

// TestASilentIssuerIsARefusal: dead, late, lying or talking nonsense; and what was known is no excuse for longer than MaxStale.
func TestASilentIssuerIsARefusal(t *testing.T) {
	t.Parallel()
	for name, how := range both {
		w := newWorld(t)
		c := w.checker(how, 10*time.Second)
		token, _ := w.token()
		if _, err := c.Check(t.Context(), token); err != nil {
			t.Fatal(err)
		}
		other, _ := w.token()
		evil := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { rw.Write([]byte(`{"active":true}`)) })) // the asker is gone
		defer evil.Close()
		for what, lie := range map[string]func(rw http.ResponseWriter, r *http.Request) bool{
			"error":    func(rw http.ResponseWriter, _ *http.Request) bool { rw.WriteHeader(500); return true },
			"nonsense": func(rw http.ResponseWriter, _ *http.Request) bool { rw.Write([]byte("<html>")); return true },
			"empty":    func(http.ResponseWriter, *http.Request) bool { return true },
			"elsewhere": func(rw http.ResponseWriter, r *http.Request) bool {
				http.Redirect(rw, r, evil.URL, http.StatusTemporaryRedirect)
				return true
			},
			"endless": func(rw http.ResponseWriter, _ *http.Request) bool {
				rw.Write(bytes.Repeat([]byte(" "), 2<<20))
				return true
			},
			"another's answer": func(rw http.ResponseWriter, r *http.Request) bool {
				rw.Write([]byte(`{"active":true,"jti":"x"}`))
				return true
			},
			"cut off": func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) },
		} {
			w.lying(lie)
			if how == tokencheck.StatusList {
				w.pass(10 * time.Second)
			}
			if _, err := c.Check(t.Context(), other); !errors.Is(err, tokencheck.ErrUnavailable) {
				t.Errorf("%s, %s: %v", name, what, err)
			}
		}
		w.lying(nil)
		if _, err := c.Check(t.Context(), other); err != nil {
			t.Errorf("%s: the issuer is back: %v", name, err)
		}
		w.srv.Close()
		w.pass(11 * time.Second)
		if _, err := c.Check(t.Context(), other); !errors.Is(err, tokencheck.ErrUnavailable) {
			t.Errorf("%s: dead: %v", name, err)
		}
	}
}

// TestALateIssuer: the caller's own deadline counts.
func TestALateIssuer(t *testing.T) {
	t.Parallel()
	for name, how := range both {
		w := newWorld(t)
		token, _ := w.token()
		release := make(chan struct{})
		t.Cleanup(func() { close(release) })
		w.lying(func(http.ResponseWriter, *http.Request) bool { <-release; return false })
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := w.checker(how, 0).Check(ctx, token); !errors.Is(err, tokencheck.ErrUnavailable) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestKeyRotation: a key that was published before it signs needs no fetch; one nobody knew is fetched once, and strangers'
// keys cause no more fetches than allowed.
func TestKeyRotation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.checker(tokencheck.StatusList, time.Hour)
	const jwks = "/.well-known/jwks.json"
	check := func(want error) {
		t.Helper()
		token, _ := w.token()
		if _, err := c.Check(t.Context(), token); !errors.Is(err, want) {
			t.Fatalf("%v, want %v", err, want)
		}
	}
	check(nil)
	w.rotate()
	check(nil)
	if n := w.count(jwks); n != 1 {
		t.Errorf("keys were fetched %d times, want once", n)
	}
	w.rotate() // the key that signs now was made after the fetch
	check(tokencheck.ErrSignature)
	w.pass(5 * time.Second)
	check(nil)
	if n := w.count(jwks); n != 2 {
		t.Errorf("keys were fetched %d times, want twice", n)
	}
	strange, err := issuer.NewRing(issuer.EdDSA, w.now())
	if err != nil {
		t.Fatal(err)
	}
	forged, err := strange.Access(issuer.Claims{Issuer: w.srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	w.pass(5 * time.Second)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, err := c.Check(t.Context(), forged); !errors.Is(err, tokencheck.ErrSignature) {
				t.Errorf("%v", err)
			}
		})
	}
	wg.Wait()
	if n := w.count(jwks); n != 3 {
		t.Errorf("strangers' keys caused %d fetches, want 1", n-2)
	}
	check(nil)
}

// TestAKeyThatIsGone counts no more once the keys have been fetched again.
func TestAKeyThatIsGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.checker(tokencheck.Introspection, 0)
	token, _ := w.token(func(c *issuer.Claims) { c.Expires += 3600 })
	if _, err := c.Check(t.Context(), token); err != nil {
		t.Fatal(err)
	}
	w.rotate()
	w.ring.Expire(time.Hour)
	w.pass(10 * time.Minute)
	if _, err := c.Check(t.Context(), token); !errors.Is(err, tokencheck.ErrSignature) {
		t.Errorf("%v", err)
	}
}

// TestStrangeKeySets: keys of other kinds are passed over, and a set in which one name means two keys counts for nothing.
func TestStrangeKeySets(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	good, err := w.ring.Public()
	if err != nil {
		t.Fatal(err)
	}
	inner := strings.TrimSuffix(strings.TrimPrefix(string(good), `{"keys":[`), `]}`)
	token, _ := w.token()
	for what, c := range map[string]struct {
		set  string
		want error
	}{
		"with others":       {`{"keys":[{"kty":"oct","k":"AAAA","kid":"x"},{"kty":"new"},` + inner + `]}`, nil},
		"twice":             {`{"keys":[` + inner + `,` + inner + `]}`, tokencheck.ErrUnavailable},
		"none":              {`{"keys":[]}`, tokencheck.ErrUnavailable},
		"another algorithm": {strings.ReplaceAll(string(good), "EdDSA", "ES256"), tokencheck.ErrUnavailable},
		"for encryption":    {strings.ReplaceAll(string(good), `"sig"`, `"enc"`), tokencheck.ErrUnavailable},
		"no object":         {`[]`, tokencheck.ErrUnavailable},
	} {
		w.lying(func(rw http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path != "/.well-known/jwks.json" {
				return false
			}
			rw.Write([]byte(c.set)) // the asker is gone
			return true
		})
		if _, err := w.checker(tokencheck.Introspection, 0).Check(t.Context(), token); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
}

func pack(raw []byte) string {
	var out bytes.Buffer
	z := zlib.NewWriter(&out)
	z.Write(raw) // a buffer
	z.Close()    // a buffer
	return base64.RawURLEncoding.EncodeToString(out.Bytes())
}

// TestStrangeStatusLists, signed by the issuer's own key: none makes a token count.
func TestStrangeStatusLists(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	private, public := newKey(t)
	token := signWith(t, private, "at+jwt", map[string]any{
		"iss": w.srv.URL, "sub": "s", "aud": []string{"x", audience}, "jti": "1", "iat": w.now().Unix(), "exp": w.now().Unix() + 60,
		"status": map[string]any{"status_list": map[string]any{"idx": 9, "uri": w.srv.URL + "/statuslists/1"}},
	})
	for what, c := range map[string]struct {
		typ    string
		change func(map[string]any)
		want   error
	}{
		"good":                {"statuslist+jwt", func(map[string]any) {}, nil},
		"revoked":             {"statuslist+jwt", func(m map[string]any) { m["status_list"] = list(1, []byte{0, 2}) }, tokencheck.ErrRevoked},
		"two bits":            {"statuslist+jwt", func(m map[string]any) { m["status_list"] = list(2, []byte{0, 2, 0}) }, nil},
		"two bits, suspended": {"statuslist+jwt", func(m map[string]any) { m["status_list"] = list(2, []byte{0, 0, 8}) }, tokencheck.ErrRevoked},
		"eight bits":          {"statuslist+jwt", func(m map[string]any) { m["status_list"] = list(8, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 3}) }, tokencheck.ErrRevoked},
		"short":               {"statuslist+jwt", func(m map[string]any) { m["status_list"] = list(1, []byte{0}) }, tokencheck.ErrUnavailable},
		"three bits":          {"statuslist+jwt", func(m map[string]any) { m["status_list"] = list(3, make([]byte, 9)) }, tokencheck.ErrUnavailable},
		"zero bits":           {"statuslist+jwt", func(m map[string]any) { m["status_list"] = list(0, make([]byte, 9)) }, tokencheck.ErrUnavailable},
		"a bomb":              {"statuslist+jwt", func(m map[string]any) { m["status_list"] = list(1, make([]byte, 64<<20)) }, tokencheck.ErrUnavailable},
		"not packed":          {"statuslist+jwt", func(m map[string]any) { m["status_list"] = map[string]any{"bits": 1, "lst": "AAAA"} }, tokencheck.ErrUnavailable},
		"not base64url":       {"statuslist+jwt", func(m map[string]any) { m["status_list"] = map[string]any{"bits": 1, "lst": "+/"} }, tokencheck.ErrUnavailable},
		"none":                {"statuslist+jwt", func(m map[string]any) { delete(m, "status_list") }, tokencheck.ErrUnavailable},
		"another list":        {"statuslist+jwt", func(m map[string]any) { m["sub"] = w.srv.URL + "/statuslists/2" }, tokencheck.ErrUnavailable},
		"another issuer":      {"statuslist+jwt", func(m map[string]any) { m["iss"] = "https://evil.test" }, tokencheck.ErrUnavailable},
		"old":                 {"statuslist+jwt", func(m map[string]any) { m["exp"] = w.now().Unix() }, tokencheck.ErrUnavailable},
		"of the future":       {"statuslist+jwt", func(m map[string]any) { m["iat"] = w.now().Unix() + 11 }, tokencheck.ErrUnavailable},
		"without a time":      {"statuslist+jwt", func(m map[string]any) { delete(m, "iat") }, tokencheck.ErrUnavailable},
		"an access token":     {"at+jwt", func(map[string]any) {}, tokencheck.ErrUnavailable},
	} {
		claims := map[string]any{"iss": w.srv.URL, "sub": w.srv.URL + "/statuslists/1", "iat": w.now().Unix(), "exp": w.now().Unix() + 60, "status_list": list(1, []byte{0, 0})}
		c.change(claims)
		signed := signWith(t, private, c.typ, claims)
		w.lying(func(rw http.ResponseWriter, r *http.Request) bool {
			if strings.HasSuffix(r.URL.Path, "jwks.json") {
				json.NewEncoder(rw).Encode(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{public}}) // the asker is gone
				return true
			}
			rw.Write([]byte(signed)) // the asker is gone
			return true
		})
		if _, err := w.checker(tokencheck.StatusList, 0).Check(t.Context(), token); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
}

func list(bits int, raw []byte) map[string]any { return map[string]any{"bits": bits, "lst": pack(raw)} }

func newKey(t testing.TB) (private, public jose.JSONWebKey) {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return jose.JSONWebKey{Key: key, KeyID: "k"}, jose.JSONWebKey{Key: key.Public(), KeyID: "k", Algorithm: "EdDSA", Use: "sig"}
}

func signWith(t testing.TB, key jose.JSONWebKey, typ string, claims map[string]any) string {
	t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.EdDSA, Key: key}, (&jose.SignerOptions{}).WithType(jose.ContentType(typ)))
	if err != nil {
		t.Fatal(err)
	}
	payload, err := json.Marshal(claims)
	if err != nil {
		t.Fatal(err)
	}
	signed, err := signer.Sign(payload)
	if err != nil {
		t.Fatal(err)
	}
	out, err := signed.CompactSerialize()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestTheClockIsSetBack: what expired stays refused, since the issuer's own answer follows another clock; and what was kept
// counts as old.
func TestTheClockIsSetBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.checker(tokencheck.Introspection, time.Hour)
	token, bit := w.token()
	if _, err := c.Check(t.Context(), token); err != nil {
		t.Fatal(err)
	}
	w.revoke(bit) // as the issuer does when a token's time is over
	w.pass(-time.Minute)
	w.clock.Add(int64(55 * time.Second)) // five seconds back: within what a clock may be behind
	if _, err := c.Check(t.Context(), token); !errors.Is(err, tokencheck.ErrRevoked) {
		t.Errorf("%v", err)
	}
}

// TestTheMiddleware answers as RFC 6750 says, hands the claims on, and lets nothing through that it refuses.
func TestTheMiddleware(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	good, _ := w.token()
	gone, bit := w.token()
	w.revoke(bit)
	reached := 0
	h := w.checker(tokencheck.Introspection, 0).Require("books:read")(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		reached++
		if c, ok := tokencheck.FromContext(r.Context()); !ok || c.Session != "S" {
			t.Errorf("the handler got %+v", c)
		}
	}))
	narrow, _ := w.token(func(c *issuer.Claims) { c.Scope = "books:list" })
	for what, c := range map[string]struct {
		fields []string
		want   int
		told   string
	}{
		"good":          {[]string{"Bearer " + good}, 200, ""},
		"lower case":    {[]string{"bearer " + good}, 200, ""},
		"nothing":       {nil, 401, "Bearer"},
		"two":           {[]string{"Bearer " + good, "Bearer " + good}, 401, "Bearer"},
		"two in one":    {[]string{"Bearer " + good + ", Bearer " + good}, 401, `Bearer error="invalid_token"`},
		"basic":         {[]string{"Basic " + good}, 401, "Bearer"},
		"no scheme":     {[]string{good}, 401, "Bearer"},
		"revoked":       {[]string{"Bearer " + gone}, 401, `Bearer error="invalid_token"`},
		"without scope": {[]string{"Bearer " + narrow}, 403, `Bearer error="insufficient_scope", scope="books:read"`},
	} {
		r := httptest.NewRequest("GET", "/?access_token="+good, nil)
		for _, f := range c.fields {
			r.Header.Add("Authorization", f)
		}
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		if rec.Code != c.want || rec.Header().Get("WWW-Authenticate") != c.told {
			t.Errorf("%s: %d %q, want %d %q", what, rec.Code, rec.Header().Get("WWW-Authenticate"), c.want, c.told)
		}
	}
	if reached != 2 {
		t.Errorf("the handler was reached %d times", reached)
	}
	w.srv.Close()
	rec := httptest.NewRecorder()
	r := httptest.NewRequest("GET", "/", nil)
	r.Header.Set("Authorization", "Bearer "+good)
	h.ServeHTTP(rec, r)
	if rec.Code != http.StatusServiceUnavailable {
		t.Errorf("with a dead issuer: %d", rec.Code)
	}
	if _, ok := tokencheck.FromContext(t.Context()); ok {
		t.Error("there are claims without a token")
	}
}

func TestWrongConfigurations(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]tokencheck.Config{
		"nothing": {}, "no audience": {Issuer: "https://a.test"}, "http": {Issuer: "http://a.test", Audience: "x"}, "a slash": {Issuer: "https://a.test/", Audience: "x"},
		"a password": {Issuer: "https://u:p@a.test", Audience: "x"}, "no URL": {Issuer: "a.test", Audience: "x"}, "negative": {Issuer: "https://a.test", Audience: "x", MaxStale: -1},
		"how": {Issuer: "https://a.test", Audience: "x", How: 7},
	} {
		if _, err := tokencheck.New(c); err == nil {
			t.Errorf("%s: a checker was made", what)
		}
	}
}

// TestOverUnix reaches the issuer through a socket, whatever host its name has.
func TestOverUnix(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: w.srv.Config.Handler}
	go srv.Serve(l) // ends with Close
	t.Cleanup(func() { srv.Close() })
	c, err := tokencheck.New(tokencheck.Config{Issuer: "https://issuer.test", Audience: audience, Key: "tgk_service", Client: tokencheck.OverUnix(socket), Now: w.now})
	if err != nil {
		t.Fatal(err)
	}
	token, _ := w.token(func(c *issuer.Claims) { c.Issuer = "https://issuer.test" })
	if _, err := c.Check(t.Context(), token); err != nil {
		t.Error(err)
	}
}
