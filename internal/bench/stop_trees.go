package bench

import (
	"context"
	"fmt"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/wire"
)

// tree is a shape of processes whose death is measured.
type tree struct {
	name  string
	limit int // of the kid's processes
	least int // processes before the order
	argv  []string
}

// sleepers makes n children of one shell that sleep in a read.
func sleepers(n int) []string {
	const script = `mkfifo p; exec 3<>p; i=0; while [ $i -lt "$0" ]; do (read x <&3) & i=$((i+1)); done; wait`
	return []string{"/bin/sh", "-c", script, fmt.Sprint(n)}
}

// shapes are the trees of the documentation. The hostile agent's storm forks twice, and each grandchild has a
// session of its own; without a number it forks for ever, and so do some of its children.
func (s *stops) shapes() []tree {
	if s.Short {
		return []tree{
			{"50 sleepers", 100, 50, sleepers(50)}, {"fork bomb at 100 processes", 100, 60, []string{"/workspace/hostile", "storm"}},
		}
	}
	return []tree{
		{"1,000 sleepers", 1100, 1000, sleepers(1000)},
		{"1,000 double-forked", 1100, 1000, []string{"/workspace/hostile", "storm", "1000"}},
		{"fork bomb at 6,000 processes", 6000, 5900, []string{"/workspace/hostile", "storm"}},
		{"10,000 sleepers", 10_100, 10_000, sleepers(10_000)},
	}
}

// treeRounds is how often each tree dies each way.
const treeRounds = 5

// trees measures the session layer beside a bare write to cgroup.kill, by turns, on the same trees in the same kind
// of kid. The same observer sees both end: `populated 0`.
func (s *stops) trees(ctx context.Context) ([]Metric, error) {
	var out []Metric
	for _, t := range s.shapes() {
		fmt.Fprintf(s.Out, "%s: stopped, and killed by a bare write, by turns\n", t.name)
		var stopped, bare []time.Duration
		for range treeRounds {
			d, err := s.fell(ctx, t, true)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", t.name, err)
			}
			stopped = append(stopped, d)
			if d, err = s.fell(ctx, t, false); err != nil {
				return nil, fmt.Errorf("%s, a bare write: %w", t.name, err)
			}
			bare = append(bare, d)
		}
		write := Percentile(bare, 50)
		m := AtMost("session: "+t.name+", order to populated 0, p50", Percentile(stopped, 50), "ms", write*1.2+10).
			Beside("a bare write to cgroup.kill", write)
		if !m.Met {
			m.Limits = fmt.Sprintf("the spread of so few runs (stopped %v, bare %v), or the way of the order to killswitchd on busy processors", rounded(stopped), rounded(bare))
		}
		out = append(out, m)
	}
	return out, nil
}

// fell grows the tree in a kid and measures its death.
func (s *stops) fell(ctx context.Context, t tree, stop bool) (took time.Duration, err error) {
	kid, err := s.spawn(ctx, t.limit)
	if err != nil {
		return 0, err
	}
	s.run(ctx, kid.Name, t.argv...)
	if err := until(ctx, fmt.Sprintf("%d processes", t.least), func() bool { return s.processes(kid) >= t.least }); err != nil {
		return 0, err
	}
	empty := make(chan time.Time, 1)
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	go func() {
		if cgroup.WaitEmpty(limited, kid.Cgroup) == nil {
			empty <- time.Now()
		}
		close(empty)
	}()
	var rep *wire.StopReport
	began := time.Now()
	if stop {
		rep, err = s.order(ctx, kid.Name, wire.LayerSession)
	} else {
		err = cgroup.Kill(kid.Cgroup)
	}
	at, ok := <-empty
	if err == nil && !ok {
		err = fmt.Errorf("kid %s was not seen empty", kid.Name)
	}
	if err != nil {
		return 0, err
	}
	return at.Sub(began), s.done(ctx, kid, rep)
}

func rounded(ds []time.Duration) []time.Duration {
	out := make([]time.Duration, 0, len(ds))
	for _, d := range ds {
		out = append(out, d.Round(time.Millisecond))
	}
	return out
}
