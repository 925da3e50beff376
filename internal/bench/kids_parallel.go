package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
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
	var busy float64
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
		took, share, err := l.atOnce(ctx, round)
		if err != nil {
			return nil, err
		}
		all, busy = append(all, took), busy+share/parallelRounds
	}
	one := Percentile(alone, 50)
	m := AtMost(fmt.Sprintf("%d spawns at once, until all gave output, median of %d", l.Parallel, parallelRounds), Percentile(all, 50), "ms", parallelTarget*one).
		Beside("one spawn alone, p50", one)
	if !m.Met {
		m.Limits = fmt.Sprintf("%d processors that were busy %.0f %% of the time: each spawn had %.0f ms of them",
			runtime.NumCPU(), busy*100, busy*m.Value*float64(runtime.NumCPU())/float64(l.Parallel))
	}
	each := AtMost("the same, for each of them", m.Value/float64(l.Parallel), "ms", 0).Beside("one spawn alone, p50", one)
	return []Metric{m, each}, nil
}

// atOnce spawns the kids, and destroys them again. busy is the share of the processors' time that was used meanwhile.
func (l *lives) atOnce(ctx context.Context, round int) (took time.Duration, busy float64, err error) {
	errs := make([]error, l.Parallel)
	each := func(do func(name string) error) {
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { errs[i] = errors.Join(errs[i], do(fmt.Sprintf("at-once-%d-%d", round, i))) })
		}
		wg.Wait()
	}
	usedBefore, idleBefore, err := processorTime()
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	each(func(name string) error {
		_, err := l.spawn(ctx, name)
		return err
	})
	took = time.Since(began)
	used, idle, err := processorTime()
	each(func(name string) error { return l.destroy(ctx, name) })
	if err := errors.Join(append(errs, err)...); err != nil {
		return 0, 0, err
	}
	used, idle = used-usedBefore, idle-idleBefore
	return took, used / max(used+idle, 1), nil
}

// processorTime is what all processors together have spent at work and idle, in ticks (proc_stat(5)).
func processorTime() (used, idle float64, err error) {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, err
	}
	line, _, _ := strings.Cut(string(raw), "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, 0, fmt.Errorf("reading /proc/stat: %q", line)
	}
	for i, field := range fields[1:9] {
		n, err := strconv.ParseFloat(field, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("reading /proc/stat: %w", err)
		}
		if i == 3 || i == 4 { // idle, and idle while a disk is waited for
			idle += n
		} else {
			used += n
		}
	}
	return used, idle, nil
}
