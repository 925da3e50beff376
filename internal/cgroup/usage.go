package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// CPUTime returns how long the processes of the cgroup at dir in the v2 hierarchy, and those that were below it,
// have run. The kernel counts it whether the cpu controller is on or not (cpu.stat, admin-guide/cgroup-v2.rst).
func CPUTime(dir string) (time.Duration, error) {
	raw, err := os.ReadFile(filepath.Join(dir, "cpu.stat"))
	if err != nil {
		return 0, fmt.Errorf("reading a cgroup's CPU time: %w", err)
	}
	for line := range bytes.Lines(raw) {
		if text, ok := bytes.CutPrefix(line, []byte("usage_usec ")); ok {
			n, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("reading a cgroup's CPU time: %w", err)
			}
			return time.Duration(n) * time.Microsecond, nil
		}
	}
	return 0, fmt.Errorf("reading a cgroup's CPU time: %s/cpu.stat says no usage_usec", dir)
}

// Tasks returns how many processes and threads are in the cgroup at dir and below, zombies included: dir is its
// directory in the hierarchy that has the pids controller. Where the controller is off there, it counts the
// processes of v2dir.
func Tasks(dir, v2dir string) (int64, error) {
	raw, err := os.ReadFile(filepath.Join(dir, "pids.current"))
	if errors.Is(err, fs.ErrNotExist) {
		pids, err := Procs(v2dir)
		return int64(len(pids)), err
	}
	if err != nil {
		return 0, fmt.Errorf("counting the processes of a cgroup: %w", err)
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(raw)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("counting the processes of a cgroup: %w", err)
	}
	return n, nil
}
