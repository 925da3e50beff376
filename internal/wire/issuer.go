package wire

import "time"

// IssuerInfo describes the box's issuer: who it is, its keys without their private halves, and who may ask it.
type IssuerInfo struct {
	Issuer      string         `json:"issuer"`
	TrustDomain string         `json:"trust_domain"`
	Lifetime    time.Duration  `json:"lifetime_ns"` // of a JWT at most
	Live        int            `json:"live"`        // JWTs that have not expired, revoked ones among them
	Keys        []IssuerKey    `json:"keys"`
	Clients     []IssuerClient `json:"clients"`
}

// IssuerKey is one signing key.
type IssuerKey struct {
	ID        string    `json:"kid"`
	Algorithm string    `json:"alg"`
	State     string    `json:"state"` // current, next, or old: it signs no more and still counts
	Since     time.Time `json:"since"`
}

// IssuerClient is a service that may ask whether tokens are active, or revoke them, over TCP.
type IssuerClient struct {
	Name  string    `json:"name"`
	Roles []string  `json:"roles"` // introspect, revoke
	Made  time.Time `json:"made"`
	Ends  time.Time `json:"ends,omitzero"`
}

// IssuerClientRequest makes a client.
type IssuerClientRequest struct {
	Name  string    `json:"name"`
	Roles []string  `json:"roles"`
	Ends  time.Time `json:"ends,omitzero"` // zero: until it is removed
}

// IssuerClientReply carries the client's key, the only time that it is shown.
type IssuerClientReply struct {
	Key string `json:"key"`
}

// IssuerRotation says which key signs from now on.
type IssuerRotation struct {
	Current string `json:"kid"`
}
