package wire

import "time"

// LeaseState is how far a leased secret has got.
type LeaseState string

// States of leased secrets. Only LeaseRevoked was acknowledged by the provider.
const (
	LeaseMinting  LeaseState = "minting"
	LeaseHeld     LeaseState = "held"        // a session uses it
	LeaseRevoking LeaseState = "revoking"    // the provider was asked, or is about to be
	LeaseValid    LeaseState = "still-valid" // the provider has not revoked it; it is asked again
	LeaseUnknown  LeaseState = "unknown"     // its answer was lost: nobody can revoke it, and it may be valid
	LeaseRevoked  LeaseState = "revoked"     // the provider says so
	LeaseOver     LeaseState = "over"        // its time is over by the provider's word; it was never seen revoked
)

// Open says whether the provider may still take the lease.
func (s LeaseState) Open() bool { return s != LeaseRevoked && s != LeaseOver }

// Leased describes a secret that was leased for a session, without the secret.
type Leased struct {
	ID         string        `json:"id"` // of the lease, made up here
	Provider   string        `json:"provider"`
	Role       string        `json:"role"`
	Secret     string        `json:"secret"` // the vault entry's name
	Kid        string        `json:"kid"`
	Session    string        `json:"session"`
	Card       string        `json:"card,omitempty"`
	Mark       uint32        `json:"mark"`
	State      LeaseState    `json:"state"`
	Minted     time.Time     `json:"minted,omitzero"`
	ValidUntil time.Time     `json:"valid_until,omitzero"` // at the latest, by the provider's word; for people
	Ended      time.Time     `json:"ended,omitzero"`       // when its revocation began: after that of its tokens was acknowledged
	Took       time.Duration `json:"took_ns,omitempty"`    // from Ended until it was revoked, or until now
	Tries      int           `json:"tries,omitempty"`      // of the revocation
	Detail     string        `json:"detail,omitempty"`
}
