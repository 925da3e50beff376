// Package testpty runs a command on a terminal of its own, as somebody who types does. It imports nothing of Tagout, so that
// any test may use it.
package testpty

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// limit bounds each wait, on a busy machine with two cores.
const limit = 30 * time.Second

// Session is a command on a terminal. Its methods fail the test rather than return errors.
type Session struct {
	t        testing.TB
	cmd      *exec.Cmd
	keyboard *os.File // the master
	tty      *os.File
	done     chan struct{} // closed when the command has ended

	mu   sync.Mutex
	out  []byte // guarded by mu
	seen int    // guarded by mu; of out, what Wait has passed by
}

// Start starts cmd on a new terminal, which is what it has of the standard streams that are nil. It is killed when the test
// ends.
func Start(t testing.TB, cmd *exec.Cmd, rows, cols uint16) *Session {
	t.Helper()
	keyboard, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	s := &Session{t: t, cmd: cmd, keyboard: keyboard, tty: tty, done: make(chan struct{})}
	s.Resize(rows, cols)
	if cmd.Stdin == nil {
		cmd.Stdin = tty
	}
	if cmd.Stdout == nil {
		cmd.Stdout = tty
	}
	if cmd.Stderr == nil {
		cmd.Stderr = tty
	}
	cmd.ExtraFiles = []*os.File{tty}
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true, Ctty: 3}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		cmd.Wait() // how it ended is in ProcessState
		close(s.done)
	}()
	go func() {
		s.read()
		close(read)
	}()
	t.Cleanup(func() {
		cmd.Process.Kill() // it may have ended
		<-s.done
		tty.Close()
		keyboard.Close()
		<-read
	})
	return s
}

func (s *Session) read() {
	buf := make([]byte, 4096)
	for {
		n, err := s.keyboard.Read(buf)
		s.mu.Lock()
		s.out = append(s.out, buf[:n]...)
		s.mu.Unlock()
		if err != nil {
			return // the terminal is closed
		}
	}
}

// Type types.
func (s *Session) Type(keys string) {
	s.t.Helper()
	if _, err := s.keyboard.WriteString(keys); err != nil {
		s.t.Fatal(err)
	}
}

// Wait waits until text is on the screen, after what was waited for before.
func (s *Session) Wait(text string) {
	s.t.Helper()
	s.Until(text+" is on the screen", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		at := bytes.Index(s.out[s.seen:], []byte(text))
		if at < 0 {
			return false
		}
		s.seen += at + len(text)
		return true
	})
}

// Until waits until it is so.
func (s *Session) Until(what string, so func() bool) {
	s.t.Helper()
	deadline := time.Now().Add(limit)
	for !so() {
		if time.Now().After(deadline) {
			s.t.Fatalf("waited %s until %s; the screen:\n%q", limit, what, s.Screen())
		}
		time.Sleep(5 * time.Millisecond) // between looks
	}
}

// Screen returns all that was written so far.
func (s *Session) Screen() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.out)
}

// Resize gives the terminal another size.
func (s *Session) Resize(rows, cols uint16) {
	s.t.Helper()
	if err := pty.Setsize(s.keyboard, &pty.Winsize{Rows: rows, Cols: cols}); err != nil {
		s.t.Fatal(err)
	}
}

// Modes returns what the terminal does with keys and output.
func (s *Session) Modes() unix.Termios {
	s.t.Helper()
	m, err := unix.IoctlGetTermios(int(s.tty.Fd()), unix.TCGETS)
	if err != nil {
		s.t.Fatal(err)
	}
	return *m
}

// WaitRaw waits until the terminal hands every key through.
func (s *Session) WaitRaw() {
	s.t.Helper()
	s.Until("the terminal is raw", func() bool { return s.Modes().Lflag&(unix.ICANON|unix.ISIG|unix.ECHO) == 0 })
}

// Signal sends the command a signal.
func (s *Session) Signal(sig unix.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		s.t.Fatal(err)
	}
}

// End waits until the command has ended, and returns its exit code: -1 where a signal killed it.
func (s *Session) End() (code int) {
	s.t.Helper()
	select {
	case <-s.done:
		return s.cmd.ProcessState.ExitCode()
	case <-time.After(limit):
		s.t.Fatalf("waited %s for the command's end; the screen:\n%q", limit, s.Screen())
		return 0
	}
}

// Pid is the command's.
func (s *Session) Pid() int { return s.cmd.Process.Pid }
