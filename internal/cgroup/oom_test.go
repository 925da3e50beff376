package cgroup

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestOOMOnV1 makes a process run out of memory in a cgroup below the watched one.
func TestOOMOnV1(t *testing.T) {
	l, rel := scratch(t)
	dir := l.V1("memory", rel)
	if dir == "" {
		t.Log("the memory controller is in v2 here: TestOOMKillsOnV2 and TestModifications cover that")
		return
	}
	inner := filepath.Join(dir, "inner")
	if err := os.MkdirAll(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"memory.limit_in_bytes", "memory.memsw.limit_in_bytes"} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte("8388608"), 0o644); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	o, err := WatchOOM(l.V2(rel), dir)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := o.Kills(); n != 0 || err != nil {
		t.Fatalf("before: %d, %v", n, err)
	}
	waited := make(chan error, 1)
	go func() { waited <- o.Wait() }()
	select {
	case err := <-waited:
		t.Fatalf("nothing happened yet: %v", err)
	case <-time.After(50 * time.Millisecond): // long enough for a watch that fires at once
	}
	cmd := exec.Command("/bin/sh", "-c", "echo $$ > "+inner+"/cgroup.procs && exec dd if=/dev/zero of=/dev/null bs=64M count=1")
	out, err := cmd.CombinedOutput()
	if err == nil || cmd.ProcessState.ExitCode() != -1 {
		t.Errorf("the process was not killed: %v, %s", err, out)
	}
	select {
	case err := <-waited:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("no event")
	}
	if n, err := o.Kills(); n == 0 || err != nil {
		t.Errorf("after: %d, %v", n, err)
	}
	again := make(chan error, 1)
	go func() { again <- o.Wait() }()
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-again:
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("Close did not end Wait")
	}
}

// TestOOMKillsOnV2 reads what the kernel's documentation shows.
func TestOOMKillsOnV2(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "memory.events")
	o := &OOM{v2: dir}
	for text, want := range map[string]uint64{
		"low 0\nhigh 0\nmax 5\noom 1\noom_kill 3\noom_group_kill 1\n": 3,
		"low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n":                   0,
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if n, err := o.Kills(); n != want || err != nil {
			t.Errorf("%q: %d, %v, want %d", text, n, err, want)
		}
	}
	if err := os.WriteFile(file, []byte("low 0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Kills(); err == nil {
		t.Error("a file without the line: no error")
	}
}

// TestModifications: the kernel reports changes of a cgroup v2 event file through inotify.
func TestModifications(t *testing.T) {
	l, rel := scratch(t)
	fd, err := modifications(filepath.Join(l.V2(rel), "cgroup.events"))
	if err != nil {
		t.Fatal(err)
	}
	o := &OOM{events: os.NewFile(uintptr(fd), "events")}
	defer o.Close() // a test
	waited := make(chan error, 1)
	go func() { waited <- o.Wait() }()
	start(t, l, rel, "/bin/true")
	select {
	case err := <-waited:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Error("no event")
	}
}
