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

	"tagout/internal/bootclock"
	"tagout/internal/cgroup"
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

// step is how far the wall clock is moved.
const step = time.Hour

// stepClock sets the wall clock of the whole machine, so it must be asked for.
func stepClock(_ context.Context, d *duel) (func(context.Context) error, error) {
	if !d.AllowClockStep {
		return nil, &notHere{"it sets the clock of the whole machine: allow it with --allow-clock-step"}
	}
	if err := setClock(time.Now().Round(0).Add(step)); err != nil {
		return nil, &notHere{"the wall clock cannot be set: " + err.Error()}
	}
	// Back by the boot clock, which nobody has touched, so that nothing is lost but the precision of the call.
	forward, since := time.Now().Round(0), bootclock.Now()
	return func(context.Context) error { return setClock(forward.Add(bootclock.Now() - since).Add(-step)) }, nil
}

func setClock(to time.Time) error {
	ts := unix.NsecToTimespec(to.UnixNano())
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
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
