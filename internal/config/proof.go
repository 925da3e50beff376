package config

import (
	"time"

	"tagout/internal/wire"
	"tagout/internal/yamlx"
)

// Proof says how often killswitchd proves that each stop layer works.
type Proof struct {
	Every time.Duration // from one proof to the next; 0: wire.DefaultProofEvery
}

// Bounds of Proof.Every. A proof takes a session mark, of which an instance has a million: at the least period they
// last for a year.
const (
	minProof = 30 * time.Second
	maxProof = 24 * time.Hour
)

var proofKeys = []yamlx.Key{{Name: "every", Example: "10m"}}

func readProof(v yamlx.Value) Proof {
	m, _ := v.Map(proofKeys...)
	return Proof{Every: readDuration(m.Get("every"), "every", 0, minProof, maxProof)}
}

// settings is what killswitchd reads.
func (p Proof) settings() wire.ProofSettings {
	if p.Every == 0 {
		p.Every = wire.DefaultProofEvery
	}
	return wire.ProofSettings{Every: p.Every}
}

// proofFile is the section's form in the file.
type proofFile struct {
	Every string `yaml:"every"`
}

func (p Proof) file() *proofFile {
	if p.Every == 0 {
		return nil
	}
	return &proofFile{Every: p.Every.String()}
}
