package cgroup

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestUsage reads what both kinds of machine show: on a pure v2 one, and on a hybrid one with the pids controller
// on, all files are in one directory.
func TestUsage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := CPUTime(dir); err == nil {
		t.Error("a cgroup that is not there has a CPU time")
	}
	put("cgroup.procs", "1\n2\n")
	if n, err := Tasks(dir, dir); n != 2 || err != nil {
		t.Errorf("without the pids controller: %d, %v", n, err)
	}
	put("pids.current", "17\n")
	if n, err := Tasks(dir, dir); n != 17 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	put("pids.current", "x\n")
	if _, err := Tasks(dir, dir); err == nil {
		t.Error("x is a number")
	}
	put("cpu.stat", "user_usec 1\nusage_usec 2500000\nsystem_usec 2\n")
	if d, err := CPUTime(dir); d != 2500*time.Millisecond || err != nil {
		t.Errorf("%v, %v", d, err)
	}
	put("cpu.stat", "user_usec 1\n")
	if _, err := CPUTime(dir); err == nil {
		t.Error("a file without the number has one")
	}
}
