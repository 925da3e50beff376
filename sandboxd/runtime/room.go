package runtime

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
)

// What runc needs is less. What it lacked it does not say in every case: Go dies where it gets no thread.
const (
	roomBytes = 64 << 10 // in a directory
	roomFiles = 8
	roomTasks = 32 // processes and threads
)

// roomIn says whether runc could have written to the directory.
func roomIn(dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("looking for room in %s: %w", dir, err)
	}
	if fs.Bavail*uint64(fs.Bsize) < roomBytes || fs.Files > 0 && fs.Ffree < roomFiles { // no files at all: as many as there is room for
		return fmt.Errorf("%s: %w", dir, unix.ENOSPC)
	}
	return nil
}

// roomToFork says whether the limits of this process's cgroup and of those above it let runc start.
func roomToFork() error {
	layout, err := cgroup.Detect()
	if err != nil {
		return err
	}
	raw, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return fmt.Errorf("looking for the limits on sandboxd: %w", err)
	}
	for dir := pidsDir(layout, raw); ; dir = filepath.Dir(dir) {
		most, err := number(filepath.Join(dir, "pids.max"))
		if err != nil {
			return nil // the root has none, and no more is above it
		}
		has, err := number(filepath.Join(dir, "pids.current"))
		if err == nil && has+roomTasks > most {
			return fmt.Errorf("%s has %d of at most %d: %w", dir, has, most, unix.EAGAIN)
		}
	}
}

// pidsDir returns the directory of the pids controller in a /proc/PID/cgroup (cgroups(7)), "" where it has none.
func pidsDir(layout cgroup.Layout, raw []byte) string {
	for lines := bufio.NewScanner(bytes.NewReader(raw)); lines.Scan(); {
		fields := strings.SplitN(lines.Text(), ":", 3)
		if len(fields) < 3 {
			continue
		}
		if slices.Contains(strings.Split(fields[1], ","), "pids") {
			return layout.V1("pids", fields[2])
		}
		if fields[0] == "0" && layout.V1("pids", "/") == "" {
			return layout.V2(fields[2])
		}
	}
	return ""
}

// number reads a limit or a count; without a limit, no number.
func number(file string) (int, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	text := strings.TrimSpace(string(raw))
	if text == "max" {
		return int(^uint(0) >> 1), nil
	}
	return strconv.Atoi(text)
}
