package bpf

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// startIn starts a program in a cgroup and waits for its end.
func startIn(t *testing.T, cgroup, path string, args ...string) {
	t.Helper()
	dir, err := os.Open(cgroup)
	must(t, err)
	defer dir.Close()
	cmd := exec.Command(path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	_ = cmd.Run() // how it ends is its own business
}

// followExecs hands starts over to a channel until the test ends.
func followExecs(t *testing.T, m *Maps) chan Exec {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	out, done := make(chan Exec, 4096), make(chan error, 1)
	go func() { done <- m.Execs(ctx, func(e Exec) { out <- e }) }()
	t.Cleanup(func() { cancel(); must(t, <-done) })
	return out
}

func nextExec(t *testing.T, from chan Exec) Exec {
	t.Helper()
	select {
	case e := <-from:
		return e
	case <-time.After(10 * time.Second):
		t.Fatal("no start of a program was told")
		return Exec{}
	}
}

// A program that ends at once is told with what it was started with, also when nobody listened at the time; one
// outside the kids is not told.
func TestStartsOfPrograms(t *testing.T) {
	s, m := installed(t, "tbpfp")
	odd := "\x01\n\xff'\""
	long := strings.Repeat("x", 3*len(tagoutExecEvent{}.Args))
	startIn(t, s.kid, "/bin/true", "one", odd)
	startIn(t, s.cfg.KidsCgroup, "/bin/true", "nobody's")
	startIn(t, s.daemon, "/bin/true", "a daemon's")
	script := filepath.Join(t.TempDir(), "a script")
	must(t, os.WriteFile(script, []byte("#!/bin/sh\nexit 0\n"), 0o755))
	startIn(t, s.kid, script, long)
	events := followExecs(t, m)
	e := nextExec(t, events)
	if e.Mark != tMark || e.Path != "/bin/true" || e.File != "true" || e.Comm != "true" || e.Parent != os.Getpid() || e.PID == 0 || e.Inode == 0 || e.Cut ||
		!slices.Equal(e.Args, []string{"/bin/true", "one", odd}) {
		t.Errorf("of true: %+v", e)
	}
	e = nextExec(t, events)
	if e.Path != script || e.File == "true" || len(e.Args) < 3 || e.Args[1] != script || !e.Cut || e.ArgsLength < len(long) || !strings.HasPrefix(long, e.Args[2]) {
		t.Errorf("of a script: %+v", e)
	}
	must(t, m.DrainExecs(t.Context()))
	if len(events) != 0 {
		t.Errorf("told also: %+v", <-events)
	}
	if c, err := m.ExecCount(tMark); err != nil || c != (ExecCount{Started: 2}) {
		t.Errorf("counted %+v, %v", c, err)
	}
	// The control: without the link nothing is seen.
	must(t, m.SeesExecs())
	must(t, detachExec(s.cfg.PinDir))
	if m.SeesExecs() == nil {
		t.Error("nobody sees starts of programs, and nobody is told")
	}
	unseen := func() bool { // the kernel lets go of the program a little later
		before, err := m.ExecCount(tMark)
		must(t, err)
		startIn(t, s.kid, "/bin/true")
		must(t, m.DrainExecs(t.Context()))
		after, err := m.ExecCount(tMark)
		must(t, err)
		return before == after
	}
	eventually(t, "a start that nobody sees", unseen)
	for len(events) > 0 {
		<-events
	}
	must(t, Install(s.cfg))
	startIn(t, s.kid, "/bin/true")
	if e := nextExec(t, events); e.File != "true" {
		t.Errorf("after another setup %+v", e)
	}
	must(t, m.ToldExecs(tMark, 7))
	if c, err := m.ExecCount(tMark); err != nil || c.Told != 7 {
		t.Errorf("after 7 were told: %+v, %v", c, err)
	}
	must(t, m.ForgetExecs(tMark))
	if all, err := m.ExecCounts(); err != nil || len(all) != 0 {
		t.Errorf("left over: %v, %v", all, err)
	}
}

// What goes beyond a session's budget is counted exactly.
func TestBudgetOfStarts(t *testing.T) {
	s, m := installed(t, "tbpfq")
	const storm = defaultBudget + 150
	for range storm {
		startIn(t, s.kid, "/bin/true")
	}
	events := followExecs(t, m)
	must(t, eventuallyReads(t, m))
	c, err := m.ExecCount(tMark)
	must(t, err)
	if c.Started != storm || uint64(len(events)) != c.Started-c.Untold {
		t.Errorf("%+v counted, %d told, want %d together", c, len(events), storm)
	}
}

// eventuallyReads waits for the reader to be there and to have read everything.
func eventuallyReads(t *testing.T, m *Maps) error {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var err error
	eventually(t, "a reader", func() bool { err = m.DrainExecs(ctx); return err == nil })
	return err
}

func FuzzDecodeExec(f *testing.F) {
	f.Add(make([]byte, execHead))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, raw []byte) {
		e, err := decodeExec(raw)
		if err == nil && len(strings.Join(e.Args, "")) > len(raw) {
			t.Errorf("%d bytes became %+v", len(raw), e)
		}
	})
}
