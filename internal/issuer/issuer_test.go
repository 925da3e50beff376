package issuer

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
)

var testTime = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func ring(t testing.TB, alg string) *Ring {
	t.Helper()
	r, err := NewRing(alg, testTime)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

var claims = Claims{Issuer: "https://issuer.test", Subject: "spiffe://own.test/card/c/kid/k/session/S", Audience: "books", Scope: "a b", ID: "1", IssuedAt: 1, Expires: 2}

func access(t testing.TB, r *Ring) string {
	t.Helper()
	token, err := r.Access(claims)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func TestARingReadsWhatItSigned(t *testing.T) {
	t.Parallel()
	for _, alg := range []string{EdDSA, ES256} {
		r := ring(t, alg)
		token := access(t, r)
		if got, err := r.ReadAccess(token); err != nil || got != claims {
			t.Errorf("%s: %+v, %v", alg, got, err)
		}
		if _, err := ring(t, alg).ReadAccess(token); err == nil {
			t.Errorf("%s: another ring read it", alg)
		}
		head, _, _ := strings.Cut(token, ".")
		raw, err := base64.RawURLEncoding.DecodeString(head)
		if err != nil || !strings.Contains(string(raw), `"typ":"at+jwt"`) || !strings.Contains(string(raw), `"alg":"`+alg+`"`) || strings.Contains(string(raw), "jwk") {
			t.Errorf("%s: header %s, %v", alg, raw, err)
		}
	}
	for _, alg := range []string{"none", "HS256", "RS256", ""} {
		if _, err := NewRing(alg, testTime); err == nil {
			t.Errorf("a ring of %q was made", alg)
		}
	}
}

// part is one base64url part of a token.
func part(v any) string {
	raw, ok := v.([]byte)
	if !ok {
		raw, _ = json.Marshal(v) // maps of strings
	}
	return base64.RawURLEncoding.EncodeToString(raw)
}

// TestForgeriesAreRefused: no algorithm but the key's own counts, no key but the ring's, no type but the one asked for.
func TestForgeriesAreRefused(t *testing.T) {
	t.Parallel()
	r := ring(t, EdDSA)
	good := access(t, r)
	parts := strings.Split(good, ".")
	r.mu.RLock()
	id, public := r.current.id, r.current.private.Public().(ed25519.PublicKey)
	r.mu.RUnlock()
	body, err := json.Marshal(claims)
	if err != nil {
		t.Fatal(err)
	}
	hs := func(secret []byte) string {
		signed := part(map[string]string{"alg": "HS256", "typ": TypeAccess, "kid": id}) + "." + part(body)
		mac := hmac.New(sha256.New, secret)
		mac.Write([]byte(signed))
		return signed + "." + part(mac.Sum(nil))
	}
	list, err := r.StatusList(StatusClaims{Subject: "x"}, NewBits(8))
	if err != nil {
		t.Fatal(err)
	}
	es := access(t, ring(t, ES256))
	esHead := part(map[string]string{"alg": "ES256", "typ": TypeAccess, "kid": id})
	for what, token := range map[string]string{
		"empty": "", "dots": "..", "none": part(map[string]string{"alg": "none", "typ": TypeAccess, "kid": id}) + "." + part(body) + ".",
		"none with the signature": part(map[string]string{"alg": "none", "typ": TypeAccess, "kid": id}) + "." + part(body) + "." + parts[2],
		"None":                    part(map[string]string{"alg": "None", "typ": TypeAccess, "kid": id}) + "." + part(body) + ".",
		"HS256 of the public key": hs(public), "another body": parts[0] + "." + part(strings.Replace(string(body), "books", "vault", 1)) + "." + parts[2],
		"no signature": parts[0] + "." + parts[1] + ".", "a status list": list, "another ring's": es, "another's header": esHead + "." + parts[1] + "." + parts[2],
		"without a key": part(map[string]string{"alg": "EdDSA", "typ": TypeAccess}) + "." + parts[1] + "." + parts[2],
		"a path as key": part(map[string]string{"alg": "EdDSA", "typ": TypeAccess, "kid": "../../dev/null"}) + "." + parts[1] + "." + parts[2],
		"its own key":   ownKey(t, body), "JSON form": `{"payload":"` + parts[1] + `","protected":"` + parts[0] + `","signature":"` + parts[2] + `"}`,
		"long": good + strings.Repeat("A", maxToken),
	} {
		if got, err := r.ReadAccess(token); err == nil {
			t.Errorf("%s: read %+v", what, got)
		} else if token != "" && strings.Contains(err.Error(), token) {
			t.Errorf("%s: the error quotes it", what)
		}
	}
	if _, err := r.ReadAccess(good); err != nil {
		t.Errorf("the real one: %v", err)
	}
}

// ownKey signs with a key of its own that it brings along.
func ownKey(t *testing.T, body []byte) string {
	t.Helper()
	_, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.EdDSA, Key: private}, (&jose.SignerOptions{EmbedJWK: true}).WithType(TypeAccess))
	if err != nil {
		t.Fatal(err)
	}
	signed, err := signer.Sign(body)
	if err != nil {
		t.Fatal(err)
	}
	out, err := signed.CompactSerialize()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestRotation: the key that signs next is known before, the one that signed counts until its time, and a rotation that
// cannot be kept changes nothing.
func TestRotation(t *testing.T) {
	t.Parallel()
	r := ring(t, EdDSA)
	old := access(t, r)
	before, err := r.Public()
	if err != nil {
		t.Fatal(err)
	}
	full := errors.New("disk full")
	if _, err := r.Rotate(testTime, 0, time.Minute, func([]byte) error { return full }); !errors.Is(err, full) {
		t.Fatalf("%v", err)
	}
	if after, err := r.Public(); err != nil || string(after) != string(before) {
		t.Error("a rotation that failed changed the keys")
	}
	var kept []byte
	current, err := r.Rotate(testTime.Add(time.Hour), 0, time.Minute, func(raw []byte) error { kept = append(kept, raw...); return nil })
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(before), current) {
		t.Error("the key that signs now was not published before")
	}
	if !r.Since().Equal(testTime.Add(time.Hour)) {
		t.Errorf("it signs since %v", r.Since())
	}
	fresh := access(t, r)
	for what, token := range map[string]string{"old": old, "new": fresh} {
		if _, err := r.ReadAccess(token); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	r.Expire(time.Minute - 1)
	if _, err := r.ReadAccess(old); err != nil {
		t.Errorf("within its time: %v", err)
	}
	r.Expire(time.Minute)
	if _, err := r.ReadAccess(old); err == nil {
		t.Error("an old key counts after its time")
	}
	again, err := OpenRing(kept, EdDSA)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.ReadAccess(fresh); err != nil {
		t.Errorf("what was kept: %v", err)
	}
	if _, err := again.ReadAccess(old); err == nil {
		t.Error("a retired key was kept")
	}
	if len(r.Info()) != 2 || r.Info()[0].ID != current {
		t.Errorf("%+v", r.Info())
	}
}

// TestNobodyWaitsForTheDisk: while a rotation is being kept, tokens are signed and read; a second rotation comes after it.
func TestNobodyWaitsForTheDisk(t *testing.T) {
	t.Parallel()
	r := ring(t, EdDSA)
	hung, release := make(chan struct{}), make(chan struct{})
	done := make(chan error, 2)
	go func() {
		_, err := r.Rotate(testTime, 0, time.Hour, func([]byte) error { close(hung); <-release; return nil })
		done <- err
	}()
	<-hung
	token := access(t, r)
	go func() {
		_, err := r.Rotate(testTime, 0, time.Hour, func([]byte) error { return nil })
		done <- err
	}()
	if _, err := r.ReadAccess(token); err != nil {
		t.Error(err)
	}
	if _, err := r.Public(); err != nil {
		t.Error(err)
	}
	close(release)
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if _, err := r.ReadAccess(token); err != nil || len(r.Info()) != 4 {
		t.Errorf("after two rotations: %v, %+v", err, r.Info())
	}
}

// TestARotationOfWipedKeys changes nothing.
func TestARotationOfWipedKeys(t *testing.T) {
	t.Parallel()
	r := ring(t, EdDSA)
	if _, err := r.Rotate(testTime, 0, time.Hour, func([]byte) error { r.Wipe(); return nil }); err == nil {
		t.Error("keys that were wiped meanwhile rotated")
	}
	if _, err := r.Access(claims); err == nil {
		t.Error("a wiped ring signs")
	}
}

func TestThePublicSetIsPublic(t *testing.T) {
	t.Parallel()
	for _, alg := range []string{EdDSA, ES256} {
		raw, err := ring(t, alg).Public()
		if err != nil {
			t.Fatal(err)
		}
		var set jose.JSONWebKeySet
		if err := json.Unmarshal(raw, &set); err != nil || len(set.Keys) != 2 || strings.Contains(string(raw), `"d"`) {
			t.Fatalf("%s, %v", raw, err)
		}
		for _, k := range set.Keys {
			if !k.IsPublic() || !k.Valid() || k.Use != "sig" || k.Algorithm != alg {
				t.Errorf("%+v", k)
			}
		}
	}
}

func TestWipedKeysAreGone(t *testing.T) {
	t.Parallel()
	for _, alg := range []string{EdDSA, ES256} {
		r := ring(t, alg)
		token := access(t, r)
		private, ok := r.current.private.(ed25519.PrivateKey)
		r.Wipe()
		if _, err := r.Access(claims); err == nil {
			t.Error("a wiped ring signs")
		}
		if _, err := r.ReadAccess(token); err == nil {
			t.Error("a wiped ring reads")
		}
		if _, err := r.Marshal(); err == nil {
			t.Error("a wiped ring can be kept")
		}
		if ok && string(private) != string(make([]byte, len(private))) {
			t.Error("the private key is in memory")
		}
	}
}

// TestKeysOfOtherKindsAreNotOpened: an algorithm that is not its key's own, and what is no private key.
func TestKeysOfOtherKindsAreNotOpened(t *testing.T) {
	t.Parallel()
	raw, err := ring(t, EdDSA).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenRing(raw, ES256); err != nil {
		t.Errorf("with another algorithm from now on: %v", err)
	}
	for what, bad := range map[string]string{
		"empty": "", "no keys": "{}", "another version": strings.Replace(string(raw), `"version":1`, `"version":2`, 1),
		"another algorithm": strings.ReplaceAll(string(raw), EdDSA, ES256), "public": strings.ReplaceAll(string(raw), `"d":`, `"e":`),
	} {
		if _, err := OpenRing([]byte(bad), EdDSA); err == nil {
			t.Errorf("%s: opened", what)
		}
	}
	if _, err := OpenRing(raw, "none"); err == nil {
		t.Error("none: opened")
	}
}

// TestIDs: SPIFFE IDs have the grammar of the SPIFFE-ID specification, sections 2.1 and 2.2.
func TestIDs(t *testing.T) {
	t.Parallel()
	id, err := ID("own.test", "practice", "kid-1", "01JX")
	if err != nil || id != "spiffe://own.test/card/practice/kid/kid-1/session/01JX" {
		t.Errorf("%q, %v", id, err)
	}
	for _, bad := range [][4]string{
		{"", "c", "k", "s"}, {"Own.test", "c", "k", "s"}, {"own.test:443", "c", "k", "s"}, {"own.test", "", "k", "s"}, {"own.test", "..", "k", "s"},
		{"own.test", "c", "k/../../admin", "s"}, {"own.test", "c", "k", "."}, {"own.test", "c", "ü", "s"}, {"own.test", "c", "k%2f", "s"}, {"own.test", "c", "k?x", "s"},
	} {
		if id, err := ID(bad[0], bad[1], bad[2], bad[3]); err == nil {
			t.Errorf("%q became %q", bad, id)
		}
	}
}

func FuzzReadAccess(f *testing.F) {
	r := ring(f, EdDSA)
	good := access(f, r)
	f.Add(good)
	f.Add("a.b.c")
	f.Add(good + ".")
	f.Fuzz(func(t *testing.T, token string) {
		if _, err := r.ReadAccess(token); err == nil && token != good {
			// The same bytes in another spelling would be a second name of one token.
			t.Errorf("%q was read", token)
		}
	})
}
