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
	raw, err := readCPUStat(dir)
	if err != nil {
		return 0, err
	}
	return cpuStat(dir, raw, "usage_usec")
}

// CPUSplit is CPUTime, in user mode and in the kernel apart.
func CPUSplit(dir string) (user, system time.Duration, err error) {
	raw, err := readCPUStat(dir)
	if err != nil {
		return 0, 0, err
	}
	user, userErr := cpuStat(dir, raw, "user_usec")
	system, systemErr := cpuStat(dir, raw, "system_usec")
	return user, system, errors.Join(userErr, systemErr)
}

func readCPUStat(dir string) ([]byte, error) {
	raw, err := os.ReadFile(filepath.Join(dir, "cpu.stat"))
	if err != nil {
		return nil, fmt.Errorf("reading a cgroup's CPU time: %w", err)
	}
	return raw, nil
}

// cpuStat returns one figure of the cpu.stat file in dir.
func cpuStat(dir string, raw []byte, name string) (time.Duration, error) {
	for line := range bytes.Lines(raw) {
		if text, ok := bytes.CutPrefix(line, []byte(name+" ")); ok {
			n, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("reading a cgroup's CPU time: %w", err)
			}
			return time.Duration(n) * time.Microsecond, nil
		}
	}
	return 0, fmt.Errorf("reading a cgroup's CPU time: %s/cpu.stat says no %s", dir, name)
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
