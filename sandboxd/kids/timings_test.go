package kids

import (
	"maps"
	"testing"
	"time"

	"tagout/internal/wire"
)

// TestOnlyWhatWasWaitedForCounts: of two lanes the longer one is what the spawn took, and all of its steps can be seen.
func TestOnlyWhatWasWaitedForCounts(t *testing.T) {
	const ms = time.Millisecond
	w := newTimings(nullMetrics{})
	var first, long, short laneTime
	w.step(&first, step{name: "ask", stage: wire.StageAllocation}, 1*ms)
	w.waited(first)
	w.step(&short, step{name: "network", stage: wire.StageNetwork}, 4*ms)
	w.step(&short, step{name: "tokens", stage: wire.StageAllocation}, 3*ms)
	w.step(&long, step{name: "files", stage: wire.StageFilesystem}, 2*ms)
	w.step(&long, step{name: "create", stage: wire.StageRuntime}, 6*ms)
	w.waited(short, long)
	stages, steps := w.done(time.Now())
	delete(stages, wire.StageTotal) // of the clock
	want := map[string]time.Duration{wire.StageAllocation: 1 * ms, wire.StageNetwork: 0, wire.StageFilesystem: 2 * ms, wire.StageRuntime: 6 * ms}
	if !maps.Equal(stages, want) {
		t.Errorf("stages %v, want %v", stages, want)
	}
	if steps["tokens"] != 3*ms || len(steps) != 5 {
		t.Errorf("steps %v", steps)
	}
}

// TestSpawnSaysHowLongItsStagesTook: the stages of a real spawn are the documented ones, and together they are the spawn.
func TestSpawnSaysHowLongItsStagesTook(t *testing.T) {
	b := newBox(t, "tsbtime")
	k := b.spawn("k1", plan())
	var sum time.Duration
	for _, stage := range wire.SpawnStages() {
		took, ok := k.Timings[stage]
		if !ok {
			t.Errorf("no stage %s", stage)
		}
		sum += took
	}
	total := k.Timings[wire.StageTotal]
	if len(k.Timings) != len(wire.SpawnStages())+1 || sum > total || sum < total*3/4 {
		t.Errorf("the stages %v are %v together", k.Timings, sum)
	}
	for _, s := range b.steps() {
		if _, ok := k.Steps[s.name]; !ok {
			t.Errorf("no step %s", s.name)
		}
	}
	b.sh("k1", "true")
	first := b.List(t.Context())[0].Timings
	if first[wire.StageFirstCommand] <= 0 || first[wire.StageTotal] != total {
		t.Errorf("after the first command: %v", first)
	}
	b.sh("k1", "true")
	if again := b.List(t.Context())[0].Timings; !maps.Equal(again, first) {
		t.Errorf("after the second command: %v, and %v before", again, first)
	}
}
