// Package issuer makes the signed tokens with which a session proves itself to services of the user's own: JWTs as
// RFC 9068 profiles them, for one audience and for minutes, and the JSON Web Key Set (RFC 7517) and status lists
// (draft-ietf-oauth-status-list) by which others check them.
//
// It promises that nothing but EdDSA (Ed25519) and ES256 signs or counts, that a key counts for its own algorithm
// alone, and that a token of one type is never taken for one of another. It does not know sessions, files or clocks:
// its caller says what is true, keeps the keys sealed and tells the time.
package issuer

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/go-jose/go-jose/v4"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// Types of tokens: the header typ of what is signed here.
const (
	TypeAccess     = "at+jwt"         // RFC 9068
	TypeStatusList = "statuslist+jwt" // draft-ietf-oauth-status-list
)

// Algorithms that sign. There are no others, and "none" is not one.
const (
	EdDSA = string(jose.EdDSA) // Ed25519
	ES256 = string(jose.ES256) // ECDSA on P-256 with SHA-256
)

var accepted = []jose.SignatureAlgorithm{jose.EdDSA, jose.ES256}

// Claims is what an access token says. Times are seconds since 1970.
type Claims struct {
	Issuer    string `json:"iss"`
	Subject   string `json:"sub"` // SPIFFE ID of the session: see ID
	Client    string `json:"client_id"`
	Audience  string `json:"aud"`
	Scope     string `json:"scope"` // words with one space in between; may be empty
	ID        string `json:"jti"`
	IssuedAt  int64  `json:"iat"`
	NotBefore int64  `json:"nbf"`
	Expires   int64  `json:"exp"`
	Session   string `json:"session"`
	Kid       string `json:"kid"`
	Card      string `json:"card"`
	Status    Status `json:"status"`
}

// Status says where the token's status is looked up.
type Status struct {
	List StatusRef `json:"status_list"`
}

// StatusRef is one bit of one list.
type StatusRef struct {
	Index int    `json:"idx"`
	URI   string `json:"uri"`
}

// ID returns the SPIFFE ID of a session. Names that do not fit into one are errors.
func ID(trustDomain, card, kid, session string) (string, error) {
	td, err := spiffeid.TrustDomainFromString(trustDomain)
	if err != nil {
		return "", fmt.Errorf("making a SPIFFE ID: trust domain %q: %w", trustDomain, err)
	}
	id, err := spiffeid.FromSegments(td, "card", card, "kid", kid, "session", session)
	if err != nil {
		return "", fmt.Errorf("making a SPIFFE ID of card %q, kid %q and session %q: %w", card, kid, session, err)
	}
	return id.String(), nil
}

// Access signs an access token with the ring's current key.
func (r *Ring) Access(c Claims) (string, error) { return r.sign(TypeAccess, c) }

// ReadAccess returns what an access token says that a key of the ring has signed. It judges no times.
func (r *Ring) ReadAccess(token string) (Claims, error) {
	payload, err := r.verify(TypeAccess, token)
	if err != nil {
		return Claims{}, err
	}
	var c Claims
	if err := json.Unmarshal(payload, &c); err != nil {
		return Claims{}, errors.New("reading a token: it carries no claims")
	}
	return c, nil
}

func (r *Ring) sign(typ string, claims any) (string, error) {
	payload, err := json.Marshal(claims)
	if err != nil {
		return "", fmt.Errorf("signing a token: %w", err)
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.current == nil {
		return "", errors.New("signing a token: the keys are gone")
	}
	k := r.current
	signer, err := jose.NewSigner(
		jose.SigningKey{Algorithm: k.alg, Key: jose.JSONWebKey{Key: k.private, KeyID: k.id}},
		(&jose.SignerOptions{}).WithType(jose.ContentType(typ)),
	)
	if err != nil {
		return "", fmt.Errorf("signing a token: %w", err)
	}
	signed, err := signer.Sign(payload)
	if err != nil {
		return "", fmt.Errorf("signing a token: %w", err)
	}
	return signed.CompactSerialize()
}

// maxToken bounds what is read as a token, in bytes.
const maxToken = 8 << 10

// verify returns the payload of a token that a key of the ring has signed.
func (r *Ring) verify(typ, token string) ([]byte, error) {
	if len(token) > maxToken {
		return nil, errors.New("reading a token: it is too long")
	}
	signed, err := jose.ParseSignedCompact(token, accepted)
	if err != nil || len(signed.Signatures) != 1 {
		return nil, errors.New("reading a token: it is no JWT signed with EdDSA or ES256") // the parser quotes it
	}
	head := signed.Signatures[0].Protected
	if got, _ := head.ExtraHeaders[jose.HeaderType].(string); got != typ {
		return nil, fmt.Errorf("reading a token: its type is not %s", typ)
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	k := r.find(head.KeyID)
	if k == nil || string(k.alg) != head.Algorithm {
		return nil, errors.New("reading a token: no key of this issuer has signed it")
	}
	payload, err := signed.Verify(k.private.Public())
	if err != nil {
		return nil, errors.New("reading a token: its signature does not fit")
	}
	return payload, nil
}
