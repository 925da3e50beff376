package killswitch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
)

// OSCgroups is the Cgroups of this machine.
type OSCgroups struct{}

func (OSCgroups) Kill(dir string) error { return cgroup.Kill(dir) }
func (OSCgroups) KillAndWait(ctx context.Context, dir string) (int, error) {
	return cgroup.KillAndWait(ctx, dir)
}
func (OSCgroups) CanKill(dir string) error                        { return cgroup.CanKill(dir) }
func (OSCgroups) Thaw(v2dir, freezerDir string) error             { return cgroup.Thaw(v2dir, freezerDir) }
func (OSCgroups) Populated(dir string) (bool, error)              { return cgroup.Populated(dir) }
func (OSCgroups) ID(dir string) (uint64, error)                   { return cgroup.ID(dir) }
func (OSCgroups) WaitEmpty(ctx context.Context, dir string) error { return cgroup.WaitEmpty(ctx, dir) }

// Survivors lists the processes in dir and below with their names and states.
func (OSCgroups) Survivors(dir string) ([]Process, error) {
	pids, err := cgroup.Procs(dir)
	if err != nil {
		return nil, err
	}
	var out []Process
	for _, pid := range pids {
		if p, ok := readStat(strconv.Itoa(pid)); ok {
			p.PID = pid
			p.State = holding(p)
			out = append(out, p)
		}
	}
	return out, nil
}

// holding is the state of what keeps a process from being gone. Where the first thread of a killed process is a
// zombie already, that is another thread, and its state says why.
func holding(p Process) string {
	if p.State != "Z" {
		return p.State
	}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", p.PID))
	if err != nil {
		return p.State // the pattern is right
	}
	for _, task := range tasks {
		if t, ok := readStat(strings.TrimPrefix(task, "/proc/")); ok && t.State != "Z" && t.State != "X" {
			return t.State
		}
	}
	return p.State
}

// Children lists the cgroups right below dir.
func (OSCgroups) Children(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing cgroups: %w", err)
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// readStat reads comm and state out of the stat file of a process or thread below /proc (proc_pid_stat(5)); ok is
// false where it is gone. The comm is the process's own choice and may hold anything, brackets included.
func readStat(task string) (p Process, ok bool) {
	raw, err := os.ReadFile(filepath.Join("/proc", task, "stat"))
	if err != nil {
		return Process{}, false
	}
	open, end := bytes.IndexByte(raw, '('), bytes.LastIndexByte(raw, ')')
	if open < 0 || end < open || len(raw) < end+3 {
		return Process{}, false
	}
	comm := strconv.QuoteToASCII(string(raw[open+1 : end]))
	return Process{Comm: comm[1 : len(comm)-1], State: string(raw[end+2])}, true
}

// bootTime returns CLOCK_BOOTTIME, the clock of the kernel's packet counters.
func bootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0 // cannot happen; 0 lets no proof of silence succeed
	}
	return time.Duration(ts.Nano())
}
