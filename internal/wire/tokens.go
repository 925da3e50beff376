package wire

import (
	"crypto/sha256"
	"encoding/hex"
	"time"
)

// TokenID returns the name that records give a token; it cannot be turned back into one.
func TokenID(token string) string {
	d := sha256.Sum256([]byte(token))
	return hex.EncodeToString(d[:6])
}

// TokenInfo describes a session's token without the token. ID is what records call it (token_id).
type TokenInfo struct {
	ID      string        `json:"id"`
	Secret  string        `json:"secret"` // its name
	Kid     string        `json:"kid"`
	Session string        `json:"session"`
	Card    string        `json:"card"`
	Mark    uint32        `json:"mark"`
	Minted  time.Time     `json:"minted"`
	Expires time.Time     `json:"expires,omitzero"` // by today's wall clock, for people; zero: with the session
	Left    time.Duration `json:"left_ns,omitempty"`
}

// TokenSelection says which tokens are meant: those of a kid, of a session, with an id, or for a secret. Exactly one
// field is set.
type TokenSelection struct {
	Kid     string `json:"kid,omitempty"`
	Session string `json:"session,omitempty"`
	ID      string `json:"id,omitempty"`
	Secret  string `json:"secret,omitempty"`
}

// Fields returns how many of the selection's fields are set.
func (s TokenSelection) Fields() int {
	n := 0
	for _, field := range []string{s.Kid, s.Session, s.ID, s.Secret} {
		if field != "" {
			n++
		}
	}
	return n
}

// TokenRevokeRequest revokes the tokens that are meant. A kid's or a session's revocation holds for good: the session
// gets no token any more.
type TokenRevokeRequest struct {
	TokenSelection
	Reason string `json:"reason,omitempty"` // for the record, MaxTagText bytes at most
}

// TokenRevokeReply acknowledges: from now on none of these tokens is accepted.
type TokenRevokeReply struct {
	Revoked []TokenInfo `json:"revoked"`
}

// Revoked tells the proxy of tokens that are not accepted any more, so that requests under way that carry what they
// stood for are cut. The first of a stream names none, and says that the stream has begun.
type Revoked struct {
	All    bool     `json:"all,omitempty"`
	Marks  []uint32 `json:"marks,omitempty"`
	Tokens []string `json:"tokens,omitempty"` // their ids
}
