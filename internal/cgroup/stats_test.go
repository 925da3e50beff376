package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestStats reads what both kinds of machine show, and what is left out where the kernel says nothing.
func TestStats(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	put := func(dir, name, text string) {
		t.Helper()
		path := filepath.Join(root, dir, "kid", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	v2 := Layout{v2: filepath.Join(root, "v2"), by: map[string]string{}}
	if _, err := v2.Stats("kid"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a cgroup that is not there: %v", err)
	}
	put("v2", "cpu.stat", "usage_usec 30\nuser_usec 10\nsystem_usec 20\nnr_throttled 1\nthrottled_usec 7\n")
	put("v2", "cgroup.procs", "1\n2\n")
	put("v2", "memory.current", "4096\n")
	put("v2", "memory.max", "max\n")
	s, err := v2.Stats("kid")
	if err != nil || s != (Stats{User: 10 * time.Microsecond, System: 20 * time.Microsecond, Memory: 4096, Tasks: 2}) {
		t.Errorf("with few controllers: %+v, %v", s, err)
	}
	put("v2", "cpu.max", "150000 100000\n")
	put("v2", "memory.peak", "8192\n")
	put("v2", "memory.max", "16384\n")
	put("v2", "pids.current", "3\n")
	put("v2", "pids.max", "64\n")
	put("v2", "io.stat", "8:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0\n254:0 rbytes=100 wbytes=200 rios=3 wios=4\n")
	s, err = v2.Stats("kid")
	if err != nil || s.CPUs != 1.5 || *s.Throttled != 7*time.Microsecond || s.MemoryLimit != 16384 || *s.MemoryPeak != 8192 || s.Tasks != 3 || s.TaskLimit != 64 ||
		*s.IO != (IOStats{110, 220, 4, 6}) {
		t.Errorf("with all: %+v, %v", s, err)
	}
	put("v2", "memory.current", "x\n")
	if _, err := v2.Stats("kid"); err == nil {
		t.Error("x is a number of bytes")
	}

	hybrid := Layout{v2: v2.v2, by: map[string]string{}}
	for _, c := range []string{"cpu", "memory", "pids", "blkio"} {
		hybrid.by[c] = filepath.Join(root, c)
	}
	for _, f := range []struct{ dir, name, text string }{
		{"cpu", "cpu.cfs_quota_us", "-1\n"}, {"cpu", "cpu.cfs_period_us", "100000\n"}, {"cpu", "cpu.stat", "nr_throttled 2\nthrottled_time 9\n"},
		{"memory", "memory.usage_in_bytes", "1\n"}, {"memory", "memory.max_usage_in_bytes", "2\n"}, {"memory", "memory.limit_in_bytes", "9223372036854771712\n"},
		{"pids", "pids.current", "5\n"}, {"pids", "pids.max", "max\n"},
		{"blkio", "blkio.throttle.io_service_bytes_recursive", "254:0 Read 10\n254:0 Write 20\n254:0 Total 30\n7:1 Read 1\nTotal 31\n"},
		{"blkio", "blkio.throttle.io_serviced_recursive", "254:0 Read 3\n254:0 Write 4\nTotal 7\n"},
	} {
		put(f.dir, f.name, f.text)
	}
	s, err = hybrid.Stats("kid")
	if err != nil || s.User != 10*time.Microsecond || s.CPUs != 0 || *s.Throttled != 9 || s.Memory != 1 || *s.MemoryPeak != 2 || s.MemoryLimit != 0 ||
		s.Tasks != 5 || s.TaskLimit != 0 || *s.IO != (IOStats{11, 20, 3, 4}) {
		t.Errorf("hybrid: %+v, %v", s, err)
	}
}
