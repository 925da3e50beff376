package providertest

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
)

// GitHub is the part of GitHub's REST API that apps get their installation tokens from.
type GitHub struct {
	base
	AppID string
	Wide  bool // tokens are good for everything, whatever was asked for

	key *rsa.PrivateKey
}

// NewGitHub returns a GitHub with one app.
func NewGitHub() (*GitHub, error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	return &GitHub{AppID: "12345", key: key}, nil
}

// Key is the app's private key as the vault takes it: PEM, in base64.
func (g *GitHub) Key() string {
	return base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(g.key)}))
}

// ServeHTTP is the API.
func (g *GitHub) ServeHTTP(w http.ResponseWriter, r *http.Request) { g.serve(w, r, g.Handler()) }

// Handler is the API without faults.
func (g *GitHub) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /app/installations/77/access_tokens", g.token)
	mux.HandleFunc("DELETE /installation/token", func(w http.ResponseWriter, r *http.Request) {
		token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !g.Accepts(token) {
			reply(w, 401, map[string]string{"message": "Bad credentials"})
			return
		}
		g.set(token, false)
		w.WriteHeader(http.StatusNoContent)
	})
	return mux
}

// isApp checks the JWT as GitHub's documents say: RS256, iss, not older than ten minutes.
func (g *GitHub) isApp(r *http.Request) bool {
	signed, err := jose.ParseSigned(strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "), []jose.SignatureAlgorithm{jose.RS256})
	if err != nil {
		return false
	}
	raw, err := signed.Verify(&g.key.PublicKey)
	var claims struct {
		Iss      string `json:"iss"`
		Iat, Exp int64
	}
	now := time.Now().Unix()
	return err == nil && json.Unmarshal(raw, &claims) == nil && claims.Iss == g.AppID &&
		claims.Iat <= now && claims.Exp > now && claims.Exp <= now+600
}

func (g *GitHub) token(w http.ResponseWriter, r *http.Request) {
	if !g.isApp(r) {
		reply(w, 401, map[string]string{"message": "A JSON web token could not be decoded"})
		return
	}
	var in struct {
		Repositories []string          `json:"repositories"`
		Permissions  map[string]string `json:"permissions"`
	}
	if json.NewDecoder(r.Body).Decode(&in) != nil {
		reply(w, 422, map[string]string{"message": "Validation failed"})
		return
	}
	token := random("ghs_")
	g.set(token, true)
	out := map[string]any{"token": token, "expires_at": time.Now().Add(time.Hour).UTC().Format(time.RFC3339),
		"permissions": in.Permissions, "repository_selection": "selected"}
	if in.Permissions != nil {
		in.Permissions["metadata"] = "read"
	}
	if g.Wide {
		out["permissions"] = map[string]string{"contents": "write", "administration": "write"}
	}
	reply(w, 201, out)
}
