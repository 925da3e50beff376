package trial

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/testroot"
)

const roleVar = "TAGOUT_TEST_TRIAL"

func TestMain(m *testing.M) {
	if init := os.Getenv(roleVar); init != "" {
		_, err := Run(context.Background(), init)
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func buildInit(t *testing.T) string {
	t.Helper()
	testroot.Require(t)
	dir, err := os.MkdirTemp("", "tagout-trial-test-") // t.TempDir is closed to the container's users
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	bin := filepath.Join(dir, "kid-init")
	cmd := exec.Command("go", "build", "-o", bin, "tagout/cmd/kid-init")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building kid-init: %v\n%s", err, out)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return bin
}

// fake puts a runc first on PATH that is there and does this.
func fake(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "runc"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// left lists what a trial of the process pid has not removed.
func left(t *testing.T, pid int) (out []string) {
	t.Helper()
	layout, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprint(prefix, pid)
	for _, pattern := range []string{"/run/" + name, layout.V2("/" + name), "/sys/fs/cgroup/*/" + name} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, found...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), "/"+name+"/") {
		out = append(out, "a mount")
	}
	return out
}

// TestTrial is case K16: what is installed is tried, and only what runs is found to run.
func TestTrial(t *testing.T) {
	init := buildInit(t)
	found, err := Run(t.Context(), init)
	if err != nil {
		t.Errorf("on this machine: %v", err)
	}
	t.Log(found)
	for name, script := range map[string]string{
		"cannot run here":   `echo "cgroups: this hierarchy is not mine" >&2; exit 1`,
		"does nothing":      `exit 0`,
		"hangs":             `exec sleep 20`,
		"starts and no run": `[ "$1" = "--version" ] && exec /usr/sbin/runc "$@"; for a; do [ "$a" = create ] && exit 0; done; exit 0`,
	} {
		t.Run(name, func(t *testing.T) {
			fake(t, script)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			began := time.Now()
			if found, err := Run(ctx, init); err == nil {
				t.Errorf("found to run: %s", found)
			} else {
				t.Log(err)
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("it took %s", took)
			}
			if l := left(t, os.Getpid()); len(l) > 0 {
				t.Errorf("left: %v", l)
			}
		})
	}
	if l := left(t, os.Getpid()); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
	if found, err := Run(t.Context(), filepath.Join(filepath.Dir(init), "none")); err == nil {
		t.Errorf("without kid-init: %s", found)
	}
}

// TestAKilledTrialIsRemoved by the next one.
func TestAKilledTrialIsRemoved(t *testing.T) {
	init := buildInit(t)
	started := filepath.Join(t.TempDir(), "started")
	path := os.Getenv("PATH")
	fake(t, "touch "+started+"; exec sleep 3")
	victim := exec.Command("/proc/self/exe")
	victim.Env = append(os.Environ(), roleVar+"="+init)
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(started); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the trial did not come to its runtime in a minute")
		}
	}
	victim.Process.Kill()
	victim.Wait() // killed on purpose
	if l := left(t, victim.Process.Pid); len(l) == 0 {
		t.Error("the killed trial left nothing: the test shows nothing")
	}
	mountAsRuncDoes(t, victim.Process.Pid)
	t.Setenv("PATH", path)
	if _, err := Run(t.Context(), init); err != nil {
		t.Error(err)
	}
	if l := left(t, victim.Process.Pid); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
}

// mountAsRuncDoes mounts a program where runc keeps its state of the killed trial: a runc that is killed while it makes a
// container leaves that.
func mountAsRuncDoes(t *testing.T, pid int) {
	t.Helper()
	dir := filepath.Join("/run", fmt.Sprint(prefix, pid), "runc", name)
	file := filepath.Join(dir, "runc.left")
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = os.WriteFile(file, nil, 0o600)
	}
	if err == nil {
		err = unix.Mount("/proc/self/exe", file, "", unix.MS_BIND, "")
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); !errors.Is(err, unix.EBUSY) {
		t.Errorf("removing it without unmounting: %v, want %v: the test shows nothing", err, unix.EBUSY)
	}
}
