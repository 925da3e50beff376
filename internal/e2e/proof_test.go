package e2e

import (
	"testing"

	"tagout/internal/wire"
)

// TestProofAtStart: as soon as a box is up each layer has been fired for real, and its lamp says so.
func TestProofAtStart(t *testing.T) {
	t.Parallel()
	box := start(t)
	st := box.Lamps()
	for _, l := range wire.AllLayers() {
		ls := st.Layers[l]
		if ls.State != wire.LampArmed || ls.Proof == nil || !ls.Proof.Passed || ls.Proof.Fired <= 0 || ls.Proof.Observed < ls.Proof.Fired {
			t.Errorf("%s: %+v, proof %+v", l, ls, ls.Proof)
		}
	}
	t.Log(box.Must("status"))
	t.Log(box.Must("prove"))
}
