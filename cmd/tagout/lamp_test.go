package main

import (
	"strings"
	"testing"
	"time"

	"tagout/internal/wire"
)

// TestLampText: what is wrong is never hidden behind a tag, and a tag never behind what is right.
func TestLampText(t *testing.T) {
	proven := &wire.LastProof{LayerProof: wire.LayerProof{Passed: true}, Age: 90 * time.Second}
	failed := &wire.LastProof{LayerProof: wire.LayerProof{Point: "cgroup"}, Age: time.Second}
	kid := wire.Tag{Stop: "S1", Scope: wire.Scope{Kid: "k"}, Layers: []wire.Layer{wire.LayerSession}, By: "ada"}
	other := wire.Tag{Stop: "S2", Scope: wire.Scope{All: true}, Layers: []wire.Layer{wire.LayerNetwork}, By: "bob"}
	for _, c := range []struct {
		st   layerStatus
		tags []wire.Tag
		want string
	}{
		{layerStatus{Armed: true, State: wire.LampArmed, Proof: proven}, nil, "ARMED, proven 1m30s ago"},
		{layerStatus{Armed: true, State: wire.LampArmed, Proof: proven}, []wire.Tag{other}, "ARMED, proven 1m30s ago"},
		{layerStatus{Armed: true, State: wire.LampArmed, Proof: proven, Detail: "sandboxd is away"}, nil, "ARMED, sandboxd is away; proven 1m30s ago"},
		{layerStatus{Armed: true, State: wire.LampStopped, Proof: proven}, []wire.Tag{kid, other}, "STOPPED: tag S1 on kid k by ada; proven 1m30s ago"},
		{layerStatus{State: wire.LampDegraded, Detail: "broken", Proof: failed}, nil, "DEGRADED: broken"},
		{layerStatus{State: wire.LampDegraded, Detail: "broken", Proof: failed}, []wire.Tag{kid}, "DEGRADED: broken; demanded by tag S1 on kid k by ada"},
		{layerStatus{}, nil, "DEGRADED: "}, // a killswitchd that knows no lamps
	} {
		if got := lampText(wire.LayerSession, c.st, c.tags); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	many := []wire.Tag{kid, kid, kid, kid, kid}
	if got := lampText(wire.LayerSession, layerStatus{State: wire.LampStopped}, many); !strings.HasSuffix(got, ", and 2 tags more") {
		t.Errorf("%q", got)
	}
}
