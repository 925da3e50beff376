package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
)

const (
	parallelRounds = 3 // the median counts
	aloneSpawns    = 5 // before each round
	parallelTarget = 8 // times one spawn
)

// parallel measures many spawns at once, until each has given output, beside one alone.
func (l *lives) parallel(ctx context.Context) ([]Metric, error) {
	fmt.Fprintf(l.Out, "spawning %d kids at once, %d times\n", l.Parallel, parallelRounds)
	var alone, all []time.Duration
	for round := range parallelRounds {
		for i := range aloneSpawns {
			s, err := l.spawn(ctx, fmt.Sprintf("alone-%d-%d", round, i))
			if err == nil {
				err = l.destroy(ctx, s.kid.Name)
			}
			if err != nil {
				return nil, err
			}
			alone = append(alone, s.ready)
		}
		took, err := l.atOnce(ctx, round)
		if err != nil {
			return nil, err
		}
		all = append(all, took)
	}
	one := Percentile(alone, 50)
	m := AtMost(fmt.Sprintf("%d spawns at once, until all gave output, median of %d", l.Parallel, parallelRounds), Percentile(all, 50), "ms", parallelTarget*one).
		Beside("one spawn alone, p50", one)
	if !m.Met {
		m.Limits = fmt.Sprintf("%d processors: each of the spawns got %.1f ms of them on average, where one alone takes %.1f ms, and what the kernel does one after the other",
			runtime.NumCPU(), m.Value*float64(runtime.NumCPU())/float64(l.Parallel), one)
	}
	each := AtMost("the same, for each of them", m.Value/float64(l.Parallel), "ms", 0).Beside("one spawn alone, p50", one)
	return []Metric{m, each}, nil
}

// atOnce spawns the kids, and destroys them again.
func (l *lives) atOnce(ctx context.Context, round int) (time.Duration, error) {
	errs := make([]error, l.Parallel)
	each := func(do func(name string) error) {
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { errs[i] = errors.Join(errs[i], do(fmt.Sprintf("at-once-%d-%d", round, i))) })
		}
		wg.Wait()
	}
	began := time.Now()
	each(func(name string) error {
		_, err := l.spawn(ctx, name)
		return err
	})
	took := time.Since(began)
	each(func(name string) error { return l.destroy(ctx, name) })
	return took, errors.Join(errs...)
}
