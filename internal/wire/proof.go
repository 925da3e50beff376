package wire

import (
	"strings"
	"time"
)

// ProofSettings is what `tagout setup` tells killswitchd about proofs.
type ProofSettings struct {
	Every time.Duration `json:"every_ns"` // from one proof to the next
}

// DefaultProofEvery is the period of proofs where nothing else is configured.
const DefaultProofEvery = 10 * time.Minute

// ProofCard is the name of the card of proofs' kids.
const ProofCard = "tagout-proof"

// ProofPrefix begins the name of every proof's kid. No other kid can have such a name.
const ProofPrefix = "proof-"

// IsProofKid says whether a kid of this name is killswitchd's own, for one proof. What stops kids by itself, without
// anybody's order, leaves them out: they live for a moment and run nobody's code, and a tag on one would hang for good.
func IsProofKid(kid string) bool { return strings.HasPrefix(kid, ProofPrefix) }

// ProofSecret is what a proof's token stands for: nothing. It is no name that the vault takes.
const ProofSecret = "(proof)"

// ProofKid is the first and only line of the answer to POST /v1/proof at sandboxd: a kid that sends a packet to the
// gateway every few milliseconds. It is destroyed when the caller goes away, at the latest.
type ProofKid struct {
	Kid     Kid           `json:"kid"`
	MaxTime time.Duration `json:"max_time_ns"`        // of its card: no layer may take longer
	Token   string        `json:"token,omitempty"`    // stands for no secret; "" where credd gave none
	NoToken string        `json:"no_token,omitempty"` // why
}

// ProofDaemons names the daemons whose packets the network layer judges at their own cgroups.
func ProofDaemons() []string { return []string{"proxy", "dnsfilter"} }

// ProofPacket is the body of POST /v1/proof/packet at sandboxd: one packet with the mark of the proof's kid is sent to
// this machine itself, out of the cgroup of a daemon.
type ProofPacket struct {
	Daemon string `json:"daemon"` // one of ProofDaemons
	Nonce  string `json:"nonce"`  // is in the packet
}

// ProofPacketReply is the answer once the packet has arrived, was refused, or did neither for half a second.
type ProofPacketReply struct {
	Arrived bool `json:"arrived"`
}

// ProofOutcome is how a proof ended.
type ProofOutcome string

// Outcomes of a proof.
const (
	ProofPassed      ProofOutcome = "passed"
	ProofFailed      ProofOutcome = "failed"      // a layer did not do what it must
	ProofMissed      ProofOutcome = "missed"      // it could not be carried out
	ProofInterrupted ProofOutcome = "interrupted" // a real stop began, and has precedence
)

// ProofReport is the outcome of one proof.
type ProofReport struct {
	Outcome ProofOutcome         `json:"outcome"`
	Detail  string               `json:"detail,omitempty"` // why it was missed
	Kid     string               `json:"kid,omitempty"`
	Nonce   string               `json:"nonce,omitempty"`
	Layers  map[Layer]LayerProof `json:"layers"` // those that were fired
}

// LayerProof is what a proof found out about one layer.
type LayerProof struct {
	Passed   bool          `json:"passed"`
	Fired    time.Duration `json:"fired_ns"`         // as in LayerReport
	Observed time.Duration `json:"observed_ns"`      // as in LayerReport
	Point    string        `json:"point,omitempty"`  // enforcement point that failed
	Detail   string        `json:"detail,omitempty"` // what was wrong with it
}

// LastProof is the last proof of a layer that was carried out.
type LastProof struct {
	LayerProof
	Age time.Duration `json:"age_ns"` // CLOCK_BOOTTIME
}

// LampState is what the lamp of a layer shows.
type LampState string

// States of a lamp.
const (
	LampArmed    LampState = "armed"    // it could fire now, and the last proof passed and is not old
	LampDegraded LampState = "degraded" // one of these is not so
	LampStopped  LampState = "stopped"  // it works, and a tag demands it
)
