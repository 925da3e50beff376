package clockstep

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"tagout/internal/bootclock"
)

// Step is a clock that was moved. Back must be called.
type Step struct {
	note note
	file *os.File
	cmd  *exec.Cmd
	in   io.Closer
	out  *bufio.Reader
	err  *bytes.Buffer
	back func() (late bool, err error) // once
}

// Start moves the wall clock through a helper. helper is the command line of a program that calls Hold with the same
// amount and a limit, standard input and standard output. It returns once the clock is moved; on an error it is not.
func Start(ctx context.Context, helper []string, by time.Duration) (*Step, error) {
	s, err := prepare(ctx, helper, by)
	if err != nil {
		return nil, fmt.Errorf("stepping the clock: %w", err)
	}
	if err := s.start(); err != nil {
		_, back := s.Back()
		return nil, errors.Join(fmt.Errorf("stepping the clock: %w", err), back)
	}
	return s, nil
}

func prepare(ctx context.Context, helper []string, by time.Duration) (*Step, error) {
	boot, err := bootclock.Boot()
	if err != nil {
		return nil, err
	}
	f, err := lock(ctx)
	if err != nil {
		return nil, err
	}
	s := &Step{note: note{Boot: boot, Offset: offset(), By: by}, file: f, err: &bytes.Buffer{}}
	raw, err := json.Marshal(s.note)
	if err == nil {
		_, err = f.WriteAt(raw, 0)
	}
	if err != nil {
		f.Close() // already failing
		return nil, err
	}
	s.back = sync.OnceValues(s.goBack)
	s.cmd = exec.Command(helper[0], helper[1:]...) // not ctx's: it ends by itself, and being killed is no good end for it
	s.cmd.ExtraFiles = []*os.File{f}
	s.cmd.Stderr = s.err
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // a ^C for the caller is not one for the helper
	return s, nil
}

func (s *Step) start() error {
	in, err := s.cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	s.in, s.out = in, bufio.NewReader(out)
	if err := s.cmd.Start(); err != nil {
		return err
	}
	if said, err := s.out.ReadString('\n'); said != saidStepped {
		return fmt.Errorf("the helper said %q, %w: %s", said, err, s.err)
	}
	return nil
}

// LetGo has the helper move the clock back, and does not wait for it.
func (s *Step) LetGo() {
	if s.in != nil {
		s.in.Close() // that it ends is what counts
	}
}

// giveUp is how long the helper may take to end: it was stopped by a signal then, and is killed.
const giveUp = time.Second

// Back moves the clock back and returns when it is right again; an error means that it may not be. late says that the
// helper's limit was over before anybody let go. Doing it again is fine.
func (s *Step) Back() (late bool, err error) { return s.back() }

func (s *Step) goBack() (late bool, err error) {
	defer s.file.Close() // unlocks; the helper's is closed by then
	s.LetGo()
	var ended error
	if s.cmd.Process != nil {
		kill := time.AfterFunc(giveUp, func() { s.cmd.Process.Kill() })
		rest, _ := io.ReadAll(s.out) // until it has ended
		late = string(rest) == saidLate
		ended = s.cmd.Wait()
		kill.Stop()
	}
	// The helper is gone: whatever it has not done is done here.
	if err := s.note.putRight(); err != nil {
		return late, fmt.Errorf("the wall clock is %v off: set it right (`date -s`): %w", s.note.By, errors.Join(err, ended))
	}
	return late, s.file.Truncate(0)
}
