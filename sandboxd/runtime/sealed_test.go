package runtime

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// program makes `tool` in PATH a copy of a program that ends with the code.
func program(t *testing.T, dir, from string) {
	t.Helper()
	raw, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tool.new"), raw, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "tool.new"), filepath.Join(dir, "tool")); err != nil {
		t.Fatal(err)
	}
}

// TestSealedProgramCannotBeChanged: the copy runs, nobody writes to it, it is made once, and a program that was replaced
// is copied again.
func TestSealedProgramCannotBeChanged(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	program(t, dir, "/bin/true")
	s := sealed{name: "tool"}
	path, err := s.path()
	if err != nil {
		t.Fatal(err)
	}
	if path == filepath.Join(dir, "tool") {
		t.Fatal("this kernel makes no sealed copies")
	}
	// Descriptors that the child is given do not get in the way.
	cmd := exec.Command(path)
	cmd.ExtraFiles = []*os.File{os.Stdin, os.Stdin}
	if err := cmd.Run(); err != nil {
		t.Errorf("running the copy: %v", err)
	}
	if f, err := os.OpenFile(path, os.O_WRONLY, 0); err == nil {
		_, err = f.Write([]byte("x"))
		f.Close()
		if !errors.Is(err, unix.EPERM) {
			t.Errorf("writing to the copy: %v", err)
		}
	} else if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ETXTBSY) {
		t.Errorf("opening the copy to write: %v", err)
	}
	if got, err := unix.FcntlInt(s.copy.Fd(), unix.F_GET_SEALS, 0); err != nil || got != seals {
		t.Errorf("seals %#x, %v: runc wants %#x", got, err, seals)
	}
	if again, err := s.path(); err != nil || again != path {
		t.Errorf("asked again: %s, %v, want %s", again, err, path)
	}
	program(t, dir, "/bin/false")
	newer, err := s.path()
	if err != nil || newer == path {
		t.Fatalf("after an upgrade: %s, %v", newer, err)
	}
	if err := exec.Command(newer).Run(); err == nil {
		t.Error("the older program runs after an upgrade")
	}
	if err := os.Remove(filepath.Join(dir, "tool")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.path(); err == nil {
		t.Error("a program that is gone: no error")
	}
}

// TestAScriptIsStartedAsItIs: a wrapper around the program, whose interpreter opens it by its name.
func TestAScriptIsStartedAsItIs(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if err := os.WriteFile(filepath.Join(dir, "tool"), []byte("#!/bin/sh\nexit 7\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	path, err := (&sealed{name: "tool"}).path()
	if err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := exec.Command(path).Run(); !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("running %s: %v, want the script's 7", path, err)
	}
}

// TestReleaseWaitsForTheWriter: whoever waits at the pipe is let go, one that died does not hold the start up, and a
// runtime without such a pipe is told.
func TestReleaseWaitsForTheWriter(t *testing.T) {
	start := func(line, fifo string) *exec.Cmd {
		cmd := exec.Command("/bin/sh", "-c", line, "sh", fifo)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // dead by then
		return cmd
	}
	fifo := func() string {
		path := filepath.Join(t.TempDir(), fifoName)
		if err := unix.Mkfifo(path, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	path := fifo()
	waiting := start(`exec 3>"$1"; printf 0 >&3; exec sleep 3600`, path)
	if err := release(t.Context(), path, waiting.Process.Pid); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pipe is still there: %v", err)
	}
	if err := release(t.Context(), path, waiting.Process.Pid); !errors.Is(err, errNoFIFO) {
		t.Errorf("without a pipe: %v", err)
	}
	for name, line := range map[string]string{"died": "exit", "opened it and died": `exec 3>"$1"; exit`} {
		path := fifo()
		cmd := start(line, path)
		began := time.Now()
		if err := release(t.Context(), path, cmd.Process.Pid); err == nil || time.Since(began) > patience {
			t.Errorf("a process that %s: %v", name, err)
		}
	}
}
