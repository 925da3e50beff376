package clockstep

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

// little is a step that harms nobody on the machine: time daemons make larger ones. What is within slack counts as
// right.
const (
	little = 20 * time.Millisecond
	slack  = 2 * time.Millisecond
)

// TestMain lets the test binary be the helper, and one who starts it.
func TestMain(m *testing.M) {
	var err error
	switch os.Getenv("CLOCKSTEP_TEST_ROLE") {
	case "":
		os.Exit(m.Run())
	case "helper":
		limit, _ := time.ParseDuration(os.Getenv("CLOCKSTEP_TEST_LIMIT")) // the test's own
		err = Hold(little, limit, os.Stdin, os.Stdout)
	case "starter":
		var s *Step
		var self []string
		if self, err = helper("1m"); err == nil {
			s, err = Start(context.Background(), self, little)
		}
		if err == nil {
			fmt.Println(s.cmd.Process.Pid)
			time.Sleep(time.Hour) // until it is killed
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// helper is the command line of a helper that gives up after limit.
func helper(limit string) ([]string, error) {
	path, err := os.Executable()
	return []string{"/usr/bin/env", "CLOCKSTEP_TEST_ROLE=helper", "CLOCKSTEP_TEST_LIMIT=" + limit, path}, err
}

// leftWithin waits until the clock is seen to be left stepped.
func leftWithin(t *testing.T) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for len(Left()) != 1 {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("nobody sees that the clock was left stepped")
		}
	}
}

// moved waits until the clock is so far from where it was.
func moved(t *testing.T, was, by time.Duration) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for (offset() - was - by).Abs() > slack {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("the clock is %v from where it was, want %v", offset()-was, by)
		}
	}
}

func start(t *testing.T, limit string) *Step {
	t.Helper()
	self, err := helper(limit)
	if err != nil {
		t.Fatal(err)
	}
	s, err := Start(t.Context(), self, little)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.note.putRight() }) // right already
	return s
}

func TestForwardAndBack(t *testing.T) {
	testroot.Require(t)
	was := offset()
	s := start(t, "1m")
	moved(t, was, little)
	if left := Left(); len(left) != 0 { // it is not left: somebody holds it
		t.Errorf("left: %v", left)
	}
	if late, err := s.Back(); late || err != nil {
		t.Errorf("late %v, %v", late, err)
	}
	moved(t, was, 0)
	noted(t, "")
}

// TestTheHelperGoesBackByItself: nobody keeps the clock wrong for longer than was agreed.
func TestTheHelperGoesBackByItself(t *testing.T) {
	testroot.Require(t)
	was := offset()
	s := start(t, "50ms")
	moved(t, was, 0)
	if late, err := s.Back(); !late || err != nil {
		t.Errorf("late %v, %v", late, err)
	}
	moved(t, was, 0)
}

// TestTheHelperIsKilled: then the one who started it goes back.
func TestTheHelperIsKilled(t *testing.T) {
	testroot.Require(t)
	for _, sig := range []unix.Signal{unix.SIGKILL, unix.SIGSTOP} {
		was := offset()
		s := start(t, "1m")
		if err := s.cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		moved(t, was, little)
		if _, err := s.Back(); err != nil {
			t.Errorf("%v: %v", sig, err)
		}
		moved(t, was, 0)
		noted(t, "")
	}
}

// starter runs somebody who has stepped the clock, and returns the helper's pid.
func starter(t *testing.T) (cmd *exec.Cmd, pid int) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd = exec.Command(self)
	cmd.Env = append(os.Environ(), "CLOCKSTEP_TEST_ROLE=starter")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // dead by then
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	if pid, err = strconv.Atoi(line[:len(line)-1]); err != nil {
		t.Fatal(err)
	}
	return cmd, pid
}

// TestWhoeverStartedItIsKilled: then the helper goes back, and clears the note.
func TestWhoeverStartedItIsKilled(t *testing.T) {
	testroot.Require(t)
	was := offset()
	cmd, _ := starter(t)
	moved(t, was, little)
	cmd.Process.Kill()
	cmd.Wait() // killed on purpose
	moved(t, was, 0)
	if err := Recover(t.Context()); err != nil { // waits for the helper's lock
		t.Error(err)
	}
	noted(t, "")
}

// TestBothAreKilled: then nobody is left to go back, which is the control, and whoever comes next does.
func TestBothAreKilled(t *testing.T) {
	testroot.Require(t)
	was := offset()
	cmd, pid := starter(t)
	t.Cleanup(func() { Recover(context.Background()) }) // right already
	syscall.Kill(pid, unix.SIGSTOP)                     // or it would be quicker
	cmd.Process.Kill()
	cmd.Wait() // killed on purpose
	syscall.Kill(pid, unix.SIGKILL)
	moved(t, was, little)
	leftWithin(t) // the kernel lets go of the lock once the helper has ended
	if err := Recover(t.Context()); err != nil {
		t.Error(err)
	}
	if left := Left(); len(left) != 0 {
		t.Errorf("left after it: %v", left)
	}
	moved(t, was, 0)
	noted(t, "")
}

// TestOneAtATime: while somebody has the clock stepped, nobody else steps it.
func TestOneAtATime(t *testing.T) {
	testroot.Require(t)
	s := start(t, "1m")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Start(ctx, []string{"/bin/false"}, little); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while somebody has the clock stepped: %v", err)
	}
	if _, err := s.Back(); err != nil {
		t.Error(err)
	}
}

// TestAHelperThatIsNone leaves the clock as it was.
func TestAHelperThatIsNone(t *testing.T) {
	testroot.Require(t)
	was := offset()
	for _, h := range [][]string{{"/bin/false"}, {"/bin/echo", "stepped?"}, {"/nonexistent"}} {
		if _, err := Start(t.Context(), h, little); err == nil {
			t.Errorf("%v: no error", h)
		}
		moved(t, was, 0)
		noted(t, "")
	}
}

// TestSomebodyElseSetTheClock: what a note says is not done to a clock that it does not fit.
func TestSomebodyElseSetTheClock(t *testing.T) {
	t.Parallel()
	n := note{Offset: 1000 * time.Hour, By: time.Hour}
	for off, want := range map[time.Duration]bool{
		0: false, time.Second: false, time.Hour: true, time.Hour - time.Minute: true, time.Hour + time.Minute: true,
		2 * time.Hour: false, -time.Hour: false,
	} {
		if got := n.stepped(n.Offset + off); got != want {
			t.Errorf("%v off: %v", off, got)
		}
	}
}

func noted(t *testing.T, want string) {
	t.Helper()
	if raw, err := os.ReadFile(noteFile); err != nil || string(raw) != want {
		t.Errorf("the note says %q, %v", raw, err)
	}
}
