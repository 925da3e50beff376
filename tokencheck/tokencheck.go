// Package tokencheck lets a service accept the short-lived tokens that a Tagout box mints for its kids: JWTs as RFC 9068
// profiles them. It checks signature, issuer, audience, times and scope by itself, and asks the issuer whether the token
// still counts: by introspection (RFC 7662) or by its status list (draft-ietf-oauth-status-list).
//
//	checker, err := tokencheck.New(tokencheck.Config{
//		Issuer: "https://issuer.example.com", Audience: "https://books.example.com", Key: key,
//	})
//	http.Handle("GET /books", checker.Require("books:read")(books))
//
// It promises to fail closed: a token is accepted only with an answer of the issuer that is no older than
// Config.MaxStale, and what is unknown, late or malformed is refused. Only EdDSA (Ed25519) and ES256 count, a key counts
// for its own algorithm alone, and no key is taken from a token. A wall clock that is set back brings no token back to
// life: the issuer's answers follow a clock that nobody can set.
//
// It does not keep tokens from being replayed while they are good, and does not say how often.
package tokencheck

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
)

// Why a token is refused. Errors of Check wrap one of these.
var (
	ErrMissing     = errors.New("no bearer token")
	ErrMalformed   = errors.New("the token is malformed")
	ErrSignature   = errors.New("no key of the issuer has signed the token")
	ErrIssuer      = errors.New("the token is of another issuer")
	ErrAudience    = errors.New("the token is for another audience")
	ErrExpired     = errors.New("the token has expired")
	ErrNotYet      = errors.New("the token is not valid yet")
	ErrScope       = errors.New("the token's scope does not cover this")
	ErrRevoked     = errors.New("the token is not active")
	ErrUnavailable = errors.New("the issuer cannot be asked")
)

// How says how the issuer is asked whether a token still counts.
type How int

// Ways to ask. There is none not to.
const (
	Introspection How = iota // sends the token; the issuer knows of each use; needs Config.Key over TCP
	StatusList               // fetches a list for all tokens; the issuer learns of no use
)

// Config says what a Checker accepts. Issuer and Audience are needed.
type Config struct {
	Issuer   string // as the box's configuration has it; https, or http on a loopback address
	Audience string // what this service is called in cards
	How      How
	// Key is what `tagout issuer client add` printed, with the role introspect. Empty: requests carry none, for a client that
	// is known by its unix socket.
	Key string
	// MaxStale is how old an answer of the issuer may be, and so how long a revoked token may still be accepted. 0: the issuer
	// is asked at every use.
	MaxStale time.Duration
	// Client fetches from the issuer; redirects are not followed. nil: one with a timeout of 5 s. See OverUnix.
	Client *http.Client
	// Ahead is how far the issuer's wall clock may be ahead of this one; 0: 10 s. Behind it may not be: a token is refused
	// from the second on in which it expires here.
	Ahead time.Duration
	// Now is the wall clock; nil: time.Now.
	Now func() time.Time
}

// Claims is what an accepted token says.
type Claims struct {
	Issuer   string
	Subject  string // SPIFFE ID: spiffe://TRUSTDOMAIN/card/CARD/kid/KID/session/SESSION
	Audience []string
	Scopes   []string
	ID       string // of the token, for records
	Session  string
	Kid      string
	Card     string
	Issued   time.Time
	Expires  time.Time
}

// HasScope says whether the token has the scope.
func (c *Claims) HasScope(scope string) bool { return slices.Contains(c.Scopes, scope) }

// Checker checks tokens. It is safe for concurrent use.
type Checker struct {
	cfg   Config
	get   *fetcher
	keys  *keySet
	lists *listCache
	asked *askCache
}

const (
	defaultAhead = 10 * time.Second
	maxToken     = 8 << 10 // bytes
)

// Types of tokens: the header typ.
const (
	typeAccess     = "at+jwt"
	typeStatusList = "statuslist+jwt"
)

// New returns a checker. It does not ask the issuer yet.
func New(c Config) (*Checker, error) {
	u, err := url.Parse(c.Issuer)
	switch {
	case err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.HasSuffix(c.Issuer, "/"):
		return nil, fmt.Errorf("making a token checker: issuer %q is no URL without a slash at its end", c.Issuer)
	case u.Scheme != "https" && !(u.Scheme == "http" && loopback(u.Hostname())):
		return nil, fmt.Errorf("making a token checker: issuer %q: write https, or http with a loopback address", c.Issuer)
	case c.Audience == "":
		return nil, errors.New("making a token checker: without an audience every service's token would count")
	case c.How != Introspection && c.How != StatusList:
		return nil, errors.New("making a token checker: How is neither Introspection nor StatusList")
	case c.MaxStale < 0 || c.Ahead < 0:
		return nil, errors.New("making a token checker: a time is negative")
	}
	if c.Ahead == 0 {
		c.Ahead = defaultAhead
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	get := newFetcher(c.Client)
	keys := newKeySet(c.Issuer+"/.well-known/jwks.json", get, c.Now)
	return &Checker{cfg: c, get: get, keys: keys, lists: &listCache{now: c.Now}, asked: &askCache{now: c.Now}}, nil
}

func loopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsLoopback()
}

// Check returns what the token says where it counts here, now, and for all of the scopes. Otherwise the error wraps one of
// this package's and never quotes the token.
func (c *Checker) Check(ctx context.Context, token string, scopes ...string) (*Claims, error) {
	payload, err := c.verify(ctx, typeAccess, token)
	if err != nil {
		return nil, err
	}
	t, err := readClaims(payload)
	if err != nil {
		return nil, err
	}
	claims, err := c.judge(t)
	if err != nil {
		return nil, err
	}
	for _, s := range scopes {
		if !claims.HasScope(s) {
			return nil, fmt.Errorf("%w: it has not %q", ErrScope, s)
		}
	}
	if c.cfg.How == StatusList {
		err = c.checkList(ctx, t.Status)
	} else {
		err = c.introspect(ctx, token, t)
	}
	if err != nil {
		return nil, err
	}
	// The issuer may have taken its time.
	return claims, c.checkTimes(t)
}

// verify returns the payload of a token of that type that a key of the issuer has signed.
func (c *Checker) verify(ctx context.Context, typ, token string) ([]byte, error) {
	if len(token) > maxToken && typ == typeAccess {
		return nil, fmt.Errorf("%w: it is longer than %d bytes", ErrMalformed, maxToken)
	}
	signed, err := jose.ParseSignedCompact(token, []jose.SignatureAlgorithm{jose.EdDSA, jose.ES256})
	if err != nil || len(signed.Signatures) != 1 {
		return nil, fmt.Errorf("%w: it is no JWT signed with EdDSA or ES256", ErrMalformed)
	}
	head := signed.Signatures[0].Protected
	got, _ := head.ExtraHeaders[jose.HeaderType].(string)
	switch _, critical := head.ExtraHeaders["crit"]; {
	case !strings.EqualFold(strings.TrimPrefix(strings.ToLower(got), "application/"), typ):
		return nil, fmt.Errorf("%w: its type is not %s", ErrMalformed, typ)
	case critical:
		return nil, fmt.Errorf("%w: it asks for an extension", ErrMalformed)
	case head.KeyID == "":
		return nil, fmt.Errorf("%w: it names no key", ErrMalformed)
	}
	key, err := c.keys.find(ctx, head.KeyID)
	if err != nil {
		return nil, err
	}
	if key.Algorithm != head.Algorithm {
		return nil, fmt.Errorf("%w: the key is for another algorithm", ErrSignature)
	}
	payload, err := signed.Verify(key.Key)
	if err != nil {
		return nil, fmt.Errorf("%w: the signature does not fit", ErrSignature)
	}
	return payload, nil
}

// tokenClaims is a token's payload.
type tokenClaims struct {
	Issuer    string          `json:"iss"`
	Subject   string          `json:"sub"`
	Audience  json.RawMessage `json:"aud"`
	Scope     string          `json:"scope"`
	ID        string          `json:"jti"`
	IssuedAt  int64           `json:"iat"`
	NotBefore int64           `json:"nbf"`
	Expires   int64           `json:"exp"`
	Session   string          `json:"session"`
	Kid       string          `json:"kid"`
	Card      string          `json:"card"`
	Status    *struct {
		List *listRef `json:"status_list"`
	} `json:"status"`

	audience []string
}

type listRef struct {
	Index *int64 `json:"idx"`
	URI   string `json:"uri"`
}

func readClaims(payload []byte) (*tokenClaims, error) {
	var t tokenClaims
	dec := json.NewDecoder(bytes.NewReader(payload))
	if err := dec.Decode(&t); err != nil {
		return nil, fmt.Errorf("%w: it carries no claims", ErrMalformed)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: something follows its claims", ErrMalformed)
	}
	var one string
	switch {
	case json.Unmarshal(t.Audience, &one) == nil:
		t.audience = []string{one}
	case json.Unmarshal(t.Audience, &t.audience) != nil:
		return nil, fmt.Errorf("%w: it names no audience", ErrMalformed)
	}
	if t.Subject == "" || t.ID == "" || t.Expires <= 0 || t.IssuedAt <= 0 {
		return nil, fmt.Errorf("%w: sub, jti, iat or exp is missing", ErrMalformed)
	}
	return &t, nil
}

// judge checks everything that the issuer need not be asked for.
func (c *Checker) judge(t *tokenClaims) (*Claims, error) {
	switch {
	case t.Issuer != c.cfg.Issuer:
		return nil, ErrIssuer
	case !slices.Contains(t.audience, c.cfg.Audience):
		return nil, ErrAudience
	}
	if err := c.checkTimes(t); err != nil {
		return nil, err
	}
	return &Claims{
		Issuer: t.Issuer, Subject: t.Subject, Audience: t.audience, Scopes: strings.Fields(t.Scope), ID: t.ID,
		Session: t.Session, Kid: t.Kid, Card: t.Card, Issued: time.Unix(t.IssuedAt, 0).UTC(), Expires: time.Unix(t.Expires, 0).UTC(),
	}, nil
}

func (c *Checker) checkTimes(t *tokenClaims) error {
	now := c.cfg.Now().Unix()
	switch ahead := now + int64(c.cfg.Ahead/time.Second); {
	case now >= t.Expires:
		return ErrExpired
	case t.NotBefore > ahead || t.IssuedAt > ahead || t.Expires <= t.IssuedAt:
		return ErrNotYet
	}
	return nil
}
