package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

// scratch makes a cgroup of the test's own on this machine and removes it, and all in it, at the end.
func scratch(t *testing.T) (l Layout, rel string) {
	t.Helper()
	testroot.Require(t)
	l, err := Detect()
	if err != nil {
		t.Fatal(err)
	}
	rel = fmt.Sprintf("/tcg%d/%s", os.Getpid(), t.Name())
	if err := l.Create(rel); err != nil {
		t.Fatal(err)
	}
	if dir := l.Freezer(rel); dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		Kill(l.V2(rel))                 // may be gone
		Thaw(l.V2(rel), l.Freezer(rel)) // may be gone
		if err := l.Remove(ctx, filepath.Dir(rel)); err != nil {
			t.Error(err)
		}
	})
	return l, rel
}

// start runs argv inside the cgroup, in the v1 freezer too where there is one.
func start(t *testing.T, l Layout, rel string, argv ...string) *exec.Cmd {
	t.Helper()
	dir, err := os.Open(l.V2(rel))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close() // only a handle
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill() // may be dead
		cmd.Wait()         // killed on purpose
	})
	if fz := l.Freezer(rel); fz != "" {
		if err := os.MkdirAll(fz, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := Join(fz, cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
	}
	return cmd
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestKillAndWaitEmpty(t *testing.T) {
	l, rel := scratch(t)
	dir := l.V2(rel)
	if some, err := Populated(dir); err != nil || some {
		t.Fatalf("new cgroup: populated %v, %v", some, err)
	}
	// A double fork in a child cgroup: the grandchild outlives the shell that made it.
	child := rel + "/inner"
	if err := l.Create(child); err != nil {
		t.Fatal(err)
	}
	cmd := start(t, l, child, "/bin/sh", "-c", "trap '' TERM INT HUP; (sleep 600 & sleep 600 &) ; sleep 600")
	waitFor(t, func() bool { pids, _ := Procs(dir); return len(pids) >= 4 }) // tried again
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	if err := WaitEmpty(ctx, dir); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("WaitEmpty before the kill: %v, want the deadline", err)
	}
	if err := CanKill(dir); err != nil {
		t.Fatal(err)
	}
	if some, err := Populated(dir); err != nil || !some {
		t.Fatalf("CanKill killed: populated %v, %v", some, err)
	}
	if err := Kill(dir); err != nil {
		t.Fatal(err)
	}
	if err := WaitEmpty(within(t, 5*time.Second), dir); err != nil {
		t.Fatal(err)
	}
	if pids, err := Procs(dir); err != nil || len(pids) != 0 {
		// the shell may still be a zombie of ours, but it is in no cgroup.procs
		t.Errorf("processes left: %v, %v", pids, err)
	}
	cmd.Wait() // killed on purpose
}

func TestFrozenDiesOnlyWithThaw(t *testing.T) {
	l, rel := scratch(t)
	dir, fz := l.V2(rel), l.Freezer(rel)
	start(t, l, rel, "/bin/sleep", "600")
	if err := Freeze(dir, fz); err != nil {
		t.Fatal(err)
	}
	if fz != "" {
		waitFor(t, func() bool {
			raw, _ := os.ReadFile(filepath.Join(fz, "freezer.state")) // tried again
			return string(raw) == "FROZEN\n"
		})
	}
	if err := Kill(dir); err != nil {
		t.Fatal(err)
	}
	if fz != "" {
		// The v1 freezer holds even a killed task: without the thaw the kill is not enough.
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		if err := WaitEmpty(ctx, dir); err == nil {
			t.Error("a task frozen by the v1 freezer died without a thaw: the test shows nothing")
		}
	}
	if err := Thaw(dir, fz); err != nil {
		t.Fatal(err)
	}
	if err := WaitEmpty(within(t, 5*time.Second), dir); err != nil {
		t.Fatal(err)
	}
}

func TestGoneIsEmpty(t *testing.T) {
	l, rel := scratch(t)
	dir := l.V2(rel + "/never")
	if err := Kill(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Kill of no cgroup: %v", err)
	}
	if err := Thaw(dir, ""); err != nil {
		t.Error(err)
	}
	if some, err := Populated(dir); some || err != nil {
		t.Errorf("populated %v, %v", some, err)
	}
	if err := WaitEmpty(context.Background(), dir); err != nil {
		t.Error(err)
	}
	if pids, err := Procs(dir); len(pids) != 0 || err != nil {
		t.Errorf("procs %v, %v", pids, err)
	}
}

func TestWaitEmptyEndsWhenTheCgroupIsRemoved(t *testing.T) {
	l, rel := scratch(t)
	cmd := start(t, l, rel, "/bin/sleep", "600")
	done := make(chan error, 1)
	go func() { done <- WaitEmpty(within(t, 5*time.Second), l.V2(rel)) }()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait() // killed on purpose
	if err := l.Remove(within(t, 5*time.Second), rel); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestRemoveSaysWhatIsBusy(t *testing.T) {
	l, rel := scratch(t)
	start(t, l, rel, "/bin/sleep", "600")
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	err := l.Remove(ctx, rel)
	if !errors.Is(err, unix.EBUSY) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Remove of a busy cgroup: %v", err)
	}
}

func TestIDIsTheDirectorysInode(t *testing.T) {
	l, rel := scratch(t)
	a, err := ID(l.V2(rel))
	if err != nil {
		t.Fatal(err)
	}
	b, err := ID(filepath.Dir(l.V2(rel)))
	if err != nil {
		t.Fatal(err)
	}
	if a == 0 || a == b {
		t.Errorf("ids %d and %d", a, b)
	}
}

func waitFor(t *testing.T, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(10 * time.Second)
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("condition not met in 10 s")
		}
	}
}

// TestKillAndWaitLooksAtWhatWasThere: what a supervisor starts in the cgroup meanwhile is no survivor.
func TestKillAndWaitLooksAtWhatWasThere(t *testing.T) {
	l, rel := scratch(t)
	dir := l.V2(rel)
	old := start(t, l, rel, "/bin/sleep", "600").Process.Pid
	stop, done := make(chan struct{}), make(chan struct{})
	var later []*exec.Cmd
	go func() { // never leaves the cgroup empty for long
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
			}
			cmd := exec.Command("/bin/sleep", "600")
			if err := cmd.Start(); err != nil {
				t.Error(err)
				return
			}
			later = append(later, cmd)
			if err := Join(dir, cmd.Process.Pid); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	n, err := KillAndWait(within(t, 5*time.Second), dir)
	close(stop)
	<-done
	if err != nil || n == 0 {
		t.Errorf("killed %d, %v", n, err)
	}
	if pids, err := Procs(dir); err != nil || slices.Contains(pids, old) {
		t.Errorf("process %d is still among %v, %v", old, pids, err)
	}
	for _, cmd := range later {
		cmd.Process.Kill() // may be dead
		cmd.Wait()         // killed on purpose
	}
	if n, err := KillAndWait(within(t, 5*time.Second), dir); n != 0 || err != nil {
		t.Errorf("an empty cgroup: %d, %v", n, err)
	}
	if n, err := KillAndWait(within(t, time.Second), dir+"-none"); n != 0 || err != nil {
		t.Errorf("no such cgroup: %d, %v", n, err)
	}
}
