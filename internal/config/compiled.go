package config

import (
	"encoding/json"
	"fmt"

	"tagout/internal/instance"
	"tagout/internal/lease"
	"tagout/internal/trip"
)

// Compiled returns the parts of the configuration that killswitchd reads, as JSON, by the name of the file that
// each is kept in: it must not know YAML. `tagout setup` writes them.
func (b *Box) Compiled() (map[string][]byte, error) {
	out := map[string][]byte{}
	for name, v := range map[string]any{
		instance.ProofFile: b.Proof.settings(),
		instance.TripFile:  append([]trip.Rule{}, b.Trip...), // never null: a file without rules says that there are none
		lease.Name:         b.Leases.Fill(),
	} {
		raw, err := json.MarshalIndent(v, "", "  ")
		if err != nil {
			return nil, fmt.Errorf("compiling %s: %w", name, err)
		}
		out[name] = append(raw, '\n')
	}
	return out, nil
}
