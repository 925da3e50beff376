package provider

import (
	"context"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"strconv"
	"time"

	"github.com/go-jose/go-jose/v4"
)

// GitHubApp leases installation access tokens: POST /app/installations/ID/access_tokens, with a JWT that the app's key
// signs, and DELETE /installation/token. They live an hour, whatever is asked for. An answer that was lost may have
// made a token that nobody knows.
type GitHubApp struct {
	Call    Call
	URL     string // "https://api.github.com", or https://HOST/api/v3 of an Enterprise Server
	AppID   string // or the client id
	Key     string // vault entry with the app's private key: PEM (PKCS #1 or #8), in base64 on one line
	Secrets Secrets
	Roles   map[string]GitHubRole
}

// GitHubRole is one kind of token that can be leased.
type GitHubRole struct {
	Installation int64
	Repositories []string          // names without their owner; never empty
	Permissions  map[string]string // "contents": "read"; never empty
}

// jwtLife is how long the app's word is good for; GitHub takes ten minutes at most, and clocks differ.
const (
	jwtLife = 5 * time.Minute
	jwtSkew = time.Minute
)

type githubAnswer struct {
	Token        string            `json:"token"`
	Expires      time.Time         `json:"expires_at"`
	Permissions  map[string]string `json:"permissions"`
	Selection    string            `json:"repository_selection"`
	Repositories []struct {
		Name string `json:"name"`
	} `json:"repositories"`
}

// Mint gets a token for the role's repositories and permissions.
func (g *GitHubApp) Mint(ctx context.Context, r Request) (Lease, error) {
	role, ok := g.Roles[r.Role]
	if !ok {
		return Lease{}, fail(Refused, "no role is called %q", r.Role)
	}
	const what = "getting an installation token"
	jwt, err := g.jwt(time.Now())
	if err != nil {
		return Lease{}, err
	}
	path := g.URL + "/app/installations/" + strconv.FormatInt(role.Installation, 10) + "/access_tokens"
	body := map[string]any{"repositories": role.Repositories, "permissions": role.Permissions}
	a, err := g.Call.do(ctx, jsonAsk(what, http.MethodPost, path, githubHeader(jwt), body))
	if err != nil {
		return Lease{}, err
	}
	defer clear(a.body)
	if !a.ok() {
		return Lease{}, a.no(what, "")
	}
	var got githubAnswer
	if err := a.read(what, &got); err != nil {
		return Lease{}, err
	}
	if checkHandle(got.Token) != nil {
		return Lease{}, fail(Malformed, "%s: the answer holds none", what)
	}
	h := Handle{Role: r.Role, Token: got.Token}
	if err := r.Note(h); err != nil { // from here on it can be revoked, whatever else is wrong with it
		return Lease{}, err
	}
	return role.lease(h, got, a.at)
}

// lease reads an answer that was made at the given time, by the same clock as its expiry.
func (r GitHubRole) lease(h Handle, got githubAnswer, at time.Time) (Lease, error) {
	for name, level := range got.Permissions {
		if granted := rank(level); name == "metadata" && granted == 1 { // read of it comes with every other permission
			continue
		} else if granted > rank(r.Permissions[name]) {
			return Lease{}, fail(Malformed, "getting an installation token: it is good for more than the role's permissions")
		}
	}
	if got.Selection == "all" || len(got.Repositories) > len(r.Repositories) {
		return Lease{}, fail(Malformed, "getting an installation token: it is good for more than the role's repositories")
	}
	lives, err := lifetime(int64(got.Expires.Sub(at) / time.Second))
	if err != nil {
		return Lease{}, err
	}
	l := Lease{Handle: h, Secret: Secret{Value: got.Token}, Lifetime: lives}
	return l, checkSecret(l.Secret)
}

// rank orders levels of a permission; one that nobody knows is above all.
func rank(level string) int {
	switch level {
	case "":
		return 0
	case "read":
		return 1
	case "write":
		return 2
	case "admin":
		return 3
	}
	return 4
}

// Renew is refused: a new token takes the old one's place.
func (g *GitHubApp) Renew(context.Context, Handle, time.Duration) (time.Duration, error) {
	return 0, fail(Refused, "an installation token is not renewed")
}

// Revoke has the token revoke itself. One that GitHub does not know any more (401) is over.
func (g *GitHubApp) Revoke(ctx context.Context, h Handle) error {
	const what = "revoking an installation token"
	if h.Token == "" {
		return fail(Refused, "%s: none is known, its answer was lost", what)
	}
	a, err := g.Call.do(ctx, jsonAsk(what, http.MethodDelete, g.URL+"/installation/token", githubHeader(h.Token), nil))
	if err != nil {
		return err
	}
	defer clear(a.body)
	if a.ok() || a.status == http.StatusUnauthorized {
		return nil
	}
	return a.no(what, "")
}

func githubHeader(bearer string) http.Header {
	return http.Header{
		"Authorization":        {"Bearer " + bearer},
		"Accept":               {"application/vnd.github+json"},
		"X-GitHub-Api-Version": {"2022-11-28"},
	}
}

// jwt signs the app's word that it is the app (RS256, as GitHub asks for).
func (g *GitHubApp) jwt(now time.Time) (string, error) {
	key, err := g.key()
	if err != nil {
		return "", err
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.RS256, Key: key}, (&jose.SignerOptions{}).WithType("JWT"))
	if err != nil {
		return "", fail(Refused, "signing as the app: the key in the vault cannot sign RS256")
	}
	claims, _ := json.Marshal(map[string]any{ // numbers and a text
		"iss": g.AppID, "iat": now.Add(-jwtSkew).Unix(), "exp": now.Add(jwtLife).Unix(),
	})
	signed, err := signer.Sign(claims)
	if err != nil {
		return "", fail(Refused, "signing as the app: the key in the vault cannot sign RS256")
	}
	out, err := signed.CompactSerialize()
	if err != nil {
		return "", fail(Refused, "signing as the app: the signature cannot be written")
	}
	return out, nil
}

func (g *GitHubApp) key() (*rsa.PrivateKey, error) {
	text, err := g.Secrets(g.Key)
	if err != nil {
		return nil, fail(Refused, "signing as the app: %v", err)
	}
	raw, err := base64.StdEncoding.DecodeString(text)
	defer clear(raw)
	if err != nil {
		return nil, fail(Refused, "signing as the app: %s is not in base64: put it in with `base64 -w0 KEY.pem | tagout vault set`", g.Key)
	}
	if block, _ := pem.Decode(raw); block != nil {
		defer clear(block.Bytes)
		if key, err := x509.ParsePKCS1PrivateKey(block.Bytes); err == nil {
			return key, nil
		}
		if key, err := x509.ParsePKCS8PrivateKey(block.Bytes); err == nil {
			if key, ok := key.(*rsa.PrivateKey); ok {
				return key, nil
			}
		}
	}
	return nil, fail(Refused, "signing as the app: %s holds no RSA private key in PEM", g.Key)
}
