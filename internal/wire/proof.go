package wire

import "time"

// ProofSettings is what `tagout setup` tells killswitchd about proofs.
type ProofSettings struct {
	Every time.Duration `json:"every_ns"` // from one proof to the next
}

// DefaultProofEvery is the period of proofs where nothing else is configured.
const DefaultProofEvery = 10 * time.Minute
