package kids

import (
	"maps"
	"slices"
	"sync"
	"time"

	"tagout/internal/wire"
)

// Timings says how long the stages of a spawn took, by the names of package wire. Of lanes beside each other the one that
// ended last counts, for the others nobody waited: all stages but the first command make up the total.
type timings struct {
	metrics Metrics

	mu     sync.Mutex
	steps  map[string]time.Duration // guarded by mu
	stages map[string]time.Duration // guarded by mu
}

func newTimings(metrics Metrics) *timings {
	return &timings{metrics: metrics, steps: map[string]time.Duration{}, stages: map[string]time.Duration{}}
}

// laneTime is how long a lane took.
type laneTime struct {
	total  time.Duration
	stages map[string]time.Duration
}

// step notes a step that was done in its lane.
func (t *timings) step(l *laneTime, s step, took time.Duration) {
	t.mu.Lock()
	t.steps[s.name] = took
	t.mu.Unlock()
	t.metrics.SpawnStep(s.name, took)
	l.total += took
	if l.stages == nil {
		l.stages = map[string]time.Duration{}
	}
	l.stages[s.stage] += took
}

// waited adds what a spawn waited for lanes beside each other.
func (t *timings) waited(lanes ...laneTime) {
	t.mu.Lock()
	defer t.mu.Unlock()
	last := slices.MaxFunc(lanes, func(a, b laneTime) int { return int(a.total - b.total) })
	for stage, took := range last.stages {
		t.stages[stage] += took
	}
}

// done ends the spawn that began then. Every stage is there from here on, also one that nobody waited for.
func (t *timings) done(began time.Time) (stages, steps map[string]time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, stage := range wire.SpawnStages() {
		t.stages[stage] += 0
		t.metrics.SpawnStage(stage, t.stages[stage])
	}
	stages, steps = maps.Clone(t.stages), maps.Clone(t.steps)
	stages[wire.StageTotal] = time.Since(began)
	return stages, steps
}

// noteFirst notes how long the first command since the kid's spawn took from its request until it ran. A kid that has
// outlived a sandboxd has had its first.
func (m *Manager) noteFirst(k *kid, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !k.fresh {
		return
	}
	k.fresh = false
	stages := maps.Clone(k.rec.Stages) // others read the old one
	stages[wire.StageFirstCommand] = took
	k.rec.Stages = stages
	m.cfg.Metrics.SpawnStage(wire.StageFirstCommand, took)
}
