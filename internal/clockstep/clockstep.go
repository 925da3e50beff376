// Package clockstep sets this machine's wall clock forward for a moment and back again, for drills and tests of what
// must not follow it. Everybody on the machine sees it, so it makes sure that the clock is right again whoever is
// killed in between: a helper process holds the step and takes it back when its standard input ends, or after a time
// that it was given; where the helper is killed, the one who started it does; and where both were, whoever comes next
// does (Recover), by a note in the run directory.
//
// The clock is moved by an amount, in one step within the kernel (clock_adjtime(2), ADJ_SETOFFSET), and moved back by
// the same: no time is lost or won. Whether that happened is told by comparing with CLOCK_BOOTTIME, which nobody sets.
// It does not hold against somebody else who sets the clock meanwhile.
package clockstep

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/bootclock"
)

// noteFile holds, while the clock is stepped, how to put it right. It is locked for as long (flock(2)); the helper
// inherits the lock and keeps it when whoever started it is killed.
const noteFile = "/run/tagout/.clock"

// note says what the clock was. Offset is CLOCK_REALTIME less CLOCK_BOOTTIME before the step.
type note struct {
	Boot   string        `json:"boot"` // the offset means nothing after another one
	Offset time.Duration `json:"offset_ns"`
	By     time.Duration `json:"by_ns"`
}

// lock waits until nobody else has the clock stepped, and puts right what somebody who was killed left. The caller
// closes the file, which unlocks it.
func lock(ctx context.Context) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(noteFile), 0o755); err != nil { // names are not secret
		return nil, err
	}
	f, err := os.OpenFile(noteFile, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close() // nothing was written
			return nil, fmt.Errorf("locking %s: %w", noteFile, err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			f.Close() // as above
			return nil, fmt.Errorf("somebody else has the clock stepped: %w", ctx.Err())
		}
	}
	if err := recoverFrom(f); err != nil {
		f.Close() // already failing
		return nil, err
	}
	return f, nil
}

// Recover puts the clock right where both the helper and whoever started it were killed. Where nobody was, it does
// nothing. Where somebody has the clock stepped, it waits for the end of that.
func Recover(ctx context.Context) error {
	if _, err := os.Stat(noteFile); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	f, err := lock(ctx)
	if err != nil {
		return fmt.Errorf("looking for a clock that was left stepped: %w", err)
	}
	return f.Close()
}

// Left says, for people, that the clock is stepped and nobody is left to step it back; nil where it is right.
func Left() []string {
	f, err := os.OpenFile(noteFile, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer f.Close() // nothing was written
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return nil // somebody has it, and steps back
	}
	if n, ok, err := read(f); err == nil && ok && n.stepped(offset()) {
		return []string{fmt.Sprintf("the machine's wall clock, %v off", n.By)}
	}
	return nil
}

// recoverFrom puts the clock right by the note in f, where there is one, and clears it.
func recoverFrom(f *os.File) error {
	n, ok, err := read(f)
	if err != nil {
		return err
	}
	if ok {
		if err := n.putRight(); err != nil {
			return err
		}
	}
	return f.Truncate(0)
}

// read returns the note in f. ok is false where there is none of this boot; one that is half written was written
// before the step.
func read(f *os.File) (n note, ok bool, err error) {
	raw, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<10))
	if err != nil || len(raw) == 0 {
		return n, false, err
	}
	boot, err := bootclock.Boot()
	if err != nil {
		return n, false, err
	}
	return n, json.Unmarshal(raw, &n) == nil && n.Boot == boot, nil
}

// putRight takes the step back where it is still in force.
func (n note) putRight() error {
	if !n.stepped(offset()) {
		return nil
	}
	return adjust(-n.By)
}

// stepped says whether the clock, now so far from the boot clock, is nearer to where the step has put it than to where
// it was, and not somewhere else altogether: then somebody has set it since.
func (n note) stepped(now time.Duration) bool {
	off := now - n.Offset - n.By
	return off.Abs() < n.By.Abs()/2
}

// offset returns CLOCK_REALTIME less CLOCK_BOOTTIME: the best of some tries, since this thread may have to wait for a
// processor in between.
func offset() (best time.Duration) {
	least := time.Duration(1<<63 - 1)
	for range 20 {
		before := bootclock.Now()
		wall := wallClock()
		took := bootclock.Now() - before
		if took < least {
			least, best = took, wall-before-took/2
		}
	}
	return best
}

func wallClock() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME, &ts); err != nil {
		panic("reading CLOCK_REALTIME: " + err.Error()) // never refused on Linux
	}
	return time.Duration(ts.Nano())
}

// Bits of clock_adjtime(2) that x/sys does not name.
const (
	adjSetOffset = 0x0100
	adjNano      = 0x2000
)

// adjust moves the wall clock by an amount. It needs CAP_SYS_TIME.
func adjust(by time.Duration) error {
	sec, nsec := by/time.Second, by%time.Second
	if nsec < 0 { // the kernel wants it so
		sec, nsec = sec-1, nsec+time.Second
	}
	tx := &unix.Timex{Modes: adjSetOffset | adjNano, Time: unix.Timeval{Sec: int64(sec), Usec: int64(nsec)}}
	if _, err := unix.ClockAdjtime(unix.CLOCK_REALTIME, tx); err != nil {
		return fmt.Errorf("moving the wall clock by %v: %w", by, err)
	}
	return nil
}
