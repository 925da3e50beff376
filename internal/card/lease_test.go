package card

import (
	"slices"
	"strings"
	"testing"

	"tagout/internal/wire"
)

// leased is a small card with that lease.
func leased(lease string) string {
	return strings.Replace(tripping(""), "trip: []", "lease: "+lease, 1)
}

func TestALeaseFiresWhatTheCardSays(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]wire.Layer{
		`{fires: [credential, network]}`: {wire.LayerNetwork, wire.LayerCredential},
		`{}`:                             nil, // all
	} {
		c, err := Parse("x.yaml", []byte(leased(text)))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(c.Stop.Lease.Fires, want) {
			t.Errorf("%s: %v, want %v", text, c.Stop.Lease.Fires, want)
		}
	}
}
