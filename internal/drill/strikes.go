package drill

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/clockstep"
	"tagout/internal/practice"
)

// daemonPIDs lists the processes of a daemon of the drill's own instance.
func (d *duel) daemonPIDs(daemon string) ([]int, error) {
	layout, err := cgroup.Detect()
	if err != nil {
		return nil, err
	}
	pids, err := cgroup.Procs(layout.V2(d.Inst.DaemonCgroupRel(daemon)))
	if err == nil && len(pids) == 0 {
		err = fmt.Errorf("%s is not running", daemon)
	}
	return pids, err
}

func (d *duel) signal(daemon string, sig unix.Signal) ([]int, error) {
	pids, err := d.daemonPIDs(daemon)
	if err != nil {
		return nil, err
	}
	for _, pid := range pids {
		if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
			return nil, fmt.Errorf("signalling %s: %w", daemon, err)
		}
	}
	return pids, nil
}

// halting stops daemons with SIGSTOP and waits until they stand still: alive, and deaf.
func halting(daemons ...string) func(context.Context, *duel) (func(context.Context) error, error) {
	return func(ctx context.Context, d *duel) (func(context.Context) error, error) {
		mend := func(ctx context.Context) error {
			for _, daemon := range daemons {
				d.signal(daemon, unix.SIGCONT) // credd was killed over it, and its successor runs
			}
			return d.waitWell(ctx)
		}
		for _, daemon := range daemons {
			pids, err := d.signal(daemon, unix.SIGSTOP)
			if err == nil {
				err = practice.Wait(ctx, daemon+" stands still", func() bool {
					return !slices.ContainsFunc(pids, func(pid int) bool {
						p, alive := readProcess(pid)
						return alive && p.state != 'T'
					})
				})
			}
			if err != nil {
				return mend, errors.Join(err, mend(ctx))
			}
		}
		return mend, nil
	}
}

// killing kills a daemon; whoever supervises it starts it again.
func killing(daemon string) func(context.Context, *duel) (func(context.Context) error, error) {
	return func(_ context.Context, d *duel) (func(context.Context) error, error) {
		_, err := d.signal(daemon, unix.SIGKILL)
		return d.waitWell, err
	}
}

// killNow kills a daemon in the middle of a stop.
func killNow(daemon string) func(*duel) {
	return func(d *duel) {
		d.signal(daemon, unix.SIGKILL) // one that is gone already is as good
	}
}

// watching breaks nothing beforehand, and waits for the daemons afterwards.
func watching(_ context.Context, d *duel) (func(context.Context) error, error) {
	return d.waitWell, nil
}

// hangSink makes the alerts' receiver take requests and answer none.
func hangSink(ctx context.Context, d *duel) (func(context.Context) error, error) {
	wake := d.Internet.Webhook.Hang()
	mend := func(context.Context) error { wake(); return nil }
	ctx, cancel := context.WithTimeout(ctx, d.ReadyWithin)
	defer cancel()
	if err := practice.Wait(ctx, "an alert waits for its receiver", func() bool { return d.Internet.Webhook.Held() > 0 }); err != nil {
		wake()
		return mend, err
	}
	return mend, nil
}

// fillDisk fills the filesystem of the audit log. It must be one of the drill's own (Stage).
func fillDisk(_ context.Context, d *duel) (func(context.Context) error, error) {
	if !staged(d.Inst.AuditDir()) {
		return nil, &notHere{d.Inst.AuditDir() + " is not a filesystem of the drill's own: filling it would fill this machine's disk"}
	}
	file := filepath.Join(d.Inst.AuditDir(), ballast)
	mend := func(ctx context.Context) error { return errors.Join(os.Remove(file), d.waitWell(ctx)) }
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return mend, err
	}
	defer f.Close() // being full is the point
	for _, block := range [][]byte{make([]byte, 1<<20), make([]byte, 4<<10)} {
		for err == nil {
			_, err = f.Write(block)
		}
		if !errors.Is(err, unix.ENOSPC) {
			return mend, errors.Join(err, mend(context.Background()))
		}
		err = nil
	}
	return mend, nil
}

// ballast is what fills the audit log's filesystem.
const ballast = ".drill-ballast"

// ClockStep is how far the wall clock is moved, and ClockLimit how long it stays there at most.
const (
	ClockStep  = time.Hour
	ClockLimit = 2 * time.Second
)

// At the step, the kid must go on for clockRest, long enough for killswitchd to look at every lease a few times, and be
// seen to by clockSeen.
const (
	clockRest = time.Second
	clockSeen = 1500 * time.Millisecond
)

// stepClock sets the wall clock of the whole machine, so it must be allowed. What hangs on it would stop the kid now;
// letGoOfClock sets it back in the middle of the stop.
func stepClock(ctx context.Context, d *duel) (func(context.Context) error, error) {
	if len(d.ClockHelper) == 0 {
		return nil, &notHere{"it sets the clock of the whole machine for up to 2 s: allow it with --allow-clock-step"}
	}
	limit, cancel := context.WithTimeout(ctx, d.ReadyWithin)
	defer cancel()
	s, err := clockstep.Start(limit, d.ClockHelper, ClockStep)
	if err != nil {
		return nil, &notHere{"the wall clock cannot be set: " + err.Error()}
	}
	d.clock = s
	at := practice.Now()
	d.noteAt(at, "the wall clock is set an hour forward")
	rest, cancel := context.WithTimeout(ctx, clockSeen)
	defer cancel()
	last := func() time.Duration {
		return min(d.Internet.Sink.LastByte(d.kid), d.Internet.API.Uses.Tally("agent:"+d.kid).LastAccepted)
	}
	err = practice.Wait(rest, "the agent is at work an hour later", func() bool {
		return practice.Now() >= at+clockRest && last() > at+clockRest-fresh
	})
	if err != nil {
		d.spoilt = fmt.Sprintf("the step alone stopped the kid: its last byte or token use came %v after it", max(0, last()-at).Round(time.Millisecond))
	}
	return func(ctx context.Context) error {
		late, err := s.Back()
		if late {
			d.void = "the clock was set back before the stop was under way: this machine is too busy for it"
		}
		return errors.Join(err, d.waitWell(ctx))
	}, nil
}

// letGoOfClock sets the clock back, an hour, at the first sign of the stop.
func letGoOfClock(d *duel) {
	if d.clock != nil {
		d.clock.LetGo()
	}
}

// unmountPins unmounts the BPF filesystem with the instance's pins, which must be one of the drill's own (Stage).
// Nothing mends it: it comes last.
func unmountPins(_ context.Context, d *duel) (func(context.Context) error, error) {
	if !staged(d.Inst.PinDir()) {
		return nil, &notHere{d.Inst.PinDir() + " is not a BPF filesystem of the drill's own: unmounting it would take it from everybody"}
	}
	if err := unix.Unmount(d.Inst.PinDir(), unix.MNT_DETACH); err != nil {
		return nil, fmt.Errorf("unmounting %s: %w", d.Inst.PinDir(), err)
	}
	// Where the whole filesystem goes, the mount's directory goes with it.
	if err := os.Remove(d.Inst.PinDir()); err != nil {
		return nil, err
	}
	return func(context.Context) error { return nil }, nil
}
