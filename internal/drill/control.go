package drill

import (
	"slices"
	"time"

	"tagout/internal/wire"
)

// controlWithin is how long a control run watches what is not stopped: past every SLA.
const controlWithin = time.Second

// leaveOut says which layers are ordered in the control run of a layer: those that do not bring it down with them.
// A network whose processes are killed is silent, too.
var leaveOut = map[wire.Layer][]wire.Layer{
	wire.LayerSession:    {wire.LayerNetwork, wire.LayerCredential},
	wire.LayerNetwork:    {wire.LayerCredential},
	wire.LayerCredential: {wire.LayerSession, wire.LayerNetwork},
}

// controls are runs in which a layer is judged that nobody ordered. Each must end in FAIL: a drill that passes a
// layer which was never fired does not see what it claims to see.
func controls() []bout {
	var out []bout
	for _, l := range wire.AllLayers() {
		out = append(out, bout{
			kind: KindControl, name: string(l) + " left out", technique: allAtOnce(), ordered: leaveOut[l], judged: []wire.Layer{l},
			runs: 1, within: controlWithin,
		})
	}
	return out
}

// controlTrouble says why the control runs make the drill void; "" where they do not.
func (rep *Report) controlTrouble() string {
	for _, r := range rep.Results {
		if r.Kind != KindControl {
			continue
		}
		if !slices.ContainsFunc(r.Layers, func(l LayerResult) bool { return l.Verdict != Fail }) && len(r.Layers) > 0 {
			continue
		}
		why := "it passed, although nobody fired that layer"
		if r.Void != "" {
			why = r.Void
		}
		return "the control run with the " + r.Case + " proves that the drill proves nothing: " + why
	}
	return ""
}
