package tokencheck_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/go-jose/go-jose/v4"

	"tagout/tokencheck"
)

// FuzzToken: whatever a token is, it is refused with one of the package's errors, unless it is the one that counts.
func FuzzToken(f *testing.F) {
	w := newWorld(f)
	good, _ := w.token()
	c := w.checker(tokencheck.Introspection, 0)
	for _, s := range []string{good, "", "..", "a.b.c", good + "=", swap(good, 0, "e30"), swap(good, 1, "e30"), `{"payload":"","signatures":[]}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, token string) {
		claims, err := c.Check(t.Context(), token)
		if (claims == nil) != (err != nil) {
			t.Fatalf("%q: %+v and %v", token, claims, err)
		}
		if err == nil && token != good {
			t.Errorf("%q counts", token)
		}
		if err != nil && !known(err) {
			t.Errorf("%q: %v", token, err)
		}
	})
}

func known(err error) bool {
	for _, e := range []error{tokencheck.ErrMalformed, tokencheck.ErrSignature, tokencheck.ErrIssuer, tokencheck.ErrAudience, tokencheck.ErrExpired,
		tokencheck.ErrNotYet, tokencheck.ErrScope, tokencheck.ErrRevoked, tokencheck.ErrUnavailable} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// FuzzPayload: claims and status lists of any content, signed by the issuer itself, make nothing panic and nothing count
// whose audience or status is not right.
func FuzzPayload(f *testing.F) {
	w := newWorld(f)
	private, public := newKey(f)
	sign := func(typ, payload string) string {
		signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.EdDSA, Key: private}, (&jose.SignerOptions{}).WithType(jose.ContentType(typ)))
		if err != nil {
			f.Fatal(err)
		}
		signed, err := signer.Sign([]byte(payload))
		if err != nil {
			f.Fatal(err)
		}
		out, err := signed.CompactSerialize()
		if err != nil {
			f.Fatal(err)
		}
		return out
	}
	good := `{"iss":"` + w.srv.URL + `","sub":"s","aud":"` + audience + `","jti":"1","iat":1893553445,"exp":1893553745,"status":{"status_list":{"idx":9,"uri":"` + w.srv.URL + `/statuslists/1"}}}`
	revoked := `{"sub":"` + w.srv.URL + `/statuslists/1","iat":1893553445,"status_list":{"bits":1,"lst":"` + pack([]byte{255, 255}) + `"}}`
	f.Add(good, revoked)
	f.Add(`{"aud":[],"exp":1e99}`, `{"status_list":{"bits":-1}}`)
	f.Add(`[]`, `null`)
	f.Add(strings.Replace(good, `"idx":9`, `"idx":9223372036854775807`, 1), revoked)
	f.Fuzz(func(t *testing.T, claims, list string) {
		signed := sign("statuslist+jwt", list)
		w.lying(func(rw http.ResponseWriter, r *http.Request) bool {
			if strings.HasSuffix(r.URL.Path, "jwks.json") {
				json.NewEncoder(rw).Encode(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{public}}) // the asker is gone
			} else {
				rw.Write([]byte(signed)) // the asker is gone
			}
			return true
		})
		got, err := w.checker(tokencheck.StatusList, 0).Check(t.Context(), sign("at+jwt", claims))
		if err == nil && (got.Issuer != w.srv.URL || list == revoked) || err != nil && !known(err) {
			t.Errorf("%s with %s: %+v, %v", claims, list, got, err)
		}
	})
}
