package killswitch

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"tagout/internal/wire"
)

// light sets the lamps of st: what a layer could do now, what its last proof showed, and which tags demand it.
func (s *Switch) light(st *wire.KillStatus) {
	var last map[wire.Layer]wire.LastProof
	missed, every := "this killswitchd makes no proofs", wire.DefaultProofEvery
	if s.prover != nil {
		last, missed, st.Busy = s.prover.lasts()
		every = s.prover.cfg.Every()
	}
	st.Every = every
	for l, ls := range st.Layers {
		if lp, ok := last[l]; ok {
			ls.Proof = &lp
		}
		tagged := slices.ContainsFunc(st.Tags, func(t wire.Tag) bool { return slices.Contains(t.Layers, l) })
		ls.State, ls.Detail = lamp(ls, missed, tagged, time.Duration(proofFresh*float64(every)))
		st.Layers[l] = ls
	}
}

// lamp judges one layer. A layer that cannot fire, or did not when it was tried, is degraded whatever tags hang on it;
// under a tag that says stopped, proofs may be impossible and are not asked for.
func lamp(ls wire.LayerStatus, missed string, tagged bool, fresh time.Duration) (wire.LampState, string) {
	var why []string
	switch {
	case !ls.Armed:
		why = append(why, ls.Detail)
	case ls.Proof != nil && !ls.Proof.Passed:
		why = append(why, fmt.Sprintf("its last proof failed: %s: %s", ls.Proof.Point, ls.Proof.Detail))
	case tagged:
		return wire.LampStopped, missedText("", missed)
	case ls.Proof == nil:
		return wire.LampDegraded, missedText("not proven yet", missed)
	case ls.Proof.Age > fresh:
		return wire.LampDegraded, missedText(fmt.Sprintf("its last proof is %v old", ls.Proof.Age.Round(time.Second)), missed)
	default:
		return wire.LampArmed, missedText("", missed)
	}
	return wire.LampDegraded, strings.Join(why, "; ")
}

// missedText adds why the last attempt at a proof was not carried out.
func missedText(text, missed string) string {
	switch {
	case missed == "":
		return text
	case text == "":
		return "the last proof could not be carried out: " + missed
	}
	return text + ": " + missed
}

// Gauge is what a layer's metrics show.
type Gauge struct {
	Layer string
	Armed bool          // the lamp does not say degraded
	Age   time.Duration // of the last proof, or of killswitchd where there was none
}

func (s *Switch) gauges(st wire.KillStatus) (layers []Gauge) {
	for _, l := range wire.AllLayers() {
		ls := st.Layers[l]
		g := Gauge{Layer: string(l), Armed: ls.State != wire.LampDegraded}
		if ls.Proof != nil {
			g.Age = ls.Proof.Age
		} else if s.prover != nil {
			g.Age = bootTime() - s.prover.began
		}
		layers = append(layers, g)
	}
	return layers
}
