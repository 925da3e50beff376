package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
)

const (
	edge          = 20   // spawns at the beginning and at the end that are compared
	flatTarget    = 1.25 // times the beginning's
	idleKidTarget = 3    // MB
)

// idle makes many kids that do nothing, and measures their memory and whether the last spawns took as long as the first.
//
// Memory is what the whole machine has less of available (MemAvailable) while they are there, by the mean of before and
// after, so that a drift cancels out: processes, the kernel's own objects and the growth of the daemons are all in it.
// So is whatever else the machine did meanwhile; what is accounted to the kids and the daemons alone stands beside it.
func (l *lives) idle(ctx context.Context) (metrics []Metric, err error) {
	fmt.Fprintf(l.Out, "starting %d idle processes, then as many idle kids\n", l.Idle)
	process, err := l.idleProcesses(ctx)
	if err != nil {
		return nil, err
	}
	before, daemons, err := l.memory(ctx)
	if err != nil {
		return nil, err
	}
	var ready []time.Duration
	var names []string
	for i := range l.Idle {
		s, err := l.spawn(ctx, fmt.Sprintf("idle-%d", i))
		if err != nil {
			return nil, err
		}
		names, ready = append(names, s.kid.Name), append(ready, s.ready)
	}
	during, grown, err := l.memory(ctx)
	if err != nil {
		return nil, err
	}
	charged, err := l.charged(names)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if err := l.destroy(ctx, name); err != nil {
			return nil, err
		}
	}
	after, _, err := l.memory(ctx)
	if err != nil {
		return nil, err
	}
	n := float64(l.Idle)
	kid := ((before+after)/2 - during) / n
	whole := AtMost("memory of an idle kid above an idle process, by what the machine has less available", kid-process, "MB", idleKidTarget).
		Beside("an idle process (sleep), measured the same way", process)
	if !whole.Met {
		whole.Limits = fmt.Sprintf("%.2f MB are charged to the kid's own cgroup, %.2f MB are the daemons' growth, the rest are the kernel's namespaces, mounts and link", charged, (grown-daemons)/n)
	}
	return append([]Metric{whole,
		AtMost("the same, charged to a kid's memory cgroup, p50", charged, "MB", 0),
		AtMost("the same, growth of all daemons for each kid", (grown-daemons)/n, "MB", 0),
	}, flatness(ready)), nil
}

func flatness(ready []time.Duration) Metric {
	n := min(edge, len(ready)/2)
	first := Percentile(ready[:n], 50)
	m := AtMost(fmt.Sprintf("spawn to first output beside %d idle kids, p50 of %d", len(ready)-n, n), Percentile(ready[len(ready)-n:], 50), "ms", flatTarget*first).
		Beside("the first of them", first)
	if !m.Met {
		m.Limits = "not known: something grows with the number of kids, or the rest of the machine was busier at the end"
	}
	return m
}

// idleProcesses returns the memory of a process that does nothing, in MB.
func (l *lives) idleProcesses(ctx context.Context) (mb float64, err error) {
	rel := l.Inst.CgroupRel() + "/bench-idle" // a cleanup finds it
	if err := l.layout.Create(rel); err != nil {
		return 0, err
	}
	var started []*exec.Cmd
	end := func() error {
		err := cgroup.Kill(l.layout.V2(rel))
		for _, cmd := range started {
			cmd.Wait() // killed on purpose
		}
		started = nil
		return err
	}
	defer func() { err = errors.Join(err, end(), l.layout.Remove(context.WithoutCancel(ctx), rel)) }()
	dir, err := os.Open(l.layout.V2(rel))
	if err != nil {
		return 0, err
	}
	defer dir.Close() // only a handle
	before, err := available(ctx)
	if err != nil {
		return 0, err
	}
	for range l.Idle {
		cmd := exec.Command("/bin/sleep", "infinity")
		cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		started = append(started, cmd)
	}
	during, err := available(ctx)
	if err != nil {
		return 0, err
	}
	if err := end(); err != nil {
		return 0, err
	}
	after, err := available(ctx)
	return ((before+after)/2 - during) / float64(l.Idle), err
}

// memory returns what the machine has available and what the daemons have resident, in MB.
func (l *lives) memory(ctx context.Context) (free, daemons float64, err error) {
	if free, err = available(ctx); err != nil {
		return 0, 0, err
	}
	for _, daemon := range instance.Daemons() {
		pids, err := cgroup.Procs(l.layout.V2(l.Inst.DaemonCgroupRel(daemon)))
		if err != nil {
			return 0, 0, err
		}
		mb, err := resident(pids...)
		if err != nil {
			return 0, 0, err
		}
		daemons += mb
	}
	return free, daemons, nil
}

// charged is the median of what the kernel charges to the kids' memory cgroups, in MB.
func (l *lives) charged(kids []string) (float64, error) {
	var all []float64
	for _, kid := range kids {
		rel := l.Inst.KidsCgroupRel() + "/" + kid
		file := filepath.Join(l.layout.V2(rel), "memory.current")
		if dir := l.layout.V1("memory", rel); dir != "" {
			file = filepath.Join(dir, "memory.usage_in_bytes")
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(string(raw)), 64)
		if err != nil {
			return 0, fmt.Errorf("reading %s: %w", file, err)
		}
		all = append(all, n/1e6)
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

// available is the median of MemAvailable over a second, in MB.
func available(ctx context.Context) (float64, error) {
	var all []float64
	for range 21 {
		raw, err := os.ReadFile("/proc/meminfo")
		if err != nil {
			return 0, err
		}
		_, rest, _ := strings.Cut(string(raw), "MemAvailable:")
		var kib float64
		if _, err := fmt.Sscan(rest, &kib); err != nil {
			return 0, fmt.Errorf("reading MemAvailable: %w", err)
		}
		all = append(all, kib*1024/1e6)
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(50 * time.Millisecond): // between readings
		}
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}
