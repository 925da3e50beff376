package supervise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
)

// Stop ends the instance's supervisor, if one runs: it asks with SIGTERM and waits until ctx ends or 15 s
// have passed, then kills. Whoever removes an instance calls it first: a living supervisor would start the
// daemons again.
func Stop(ctx context.Context, inst instance.Instance) error {
	return stopWithin(ctx, inst, 15*time.Second)
}

func stopWithin(ctx context.Context, inst instance.Instance, ask time.Duration) error {
	path := lockFile(inst)
	held, pid, err := holder(path)
	if err != nil || !held {
		return err
	}
	if pid == os.Getpid() {
		return fmt.Errorf("this process itself keeps instance %s up: end that first", inst.Name())
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening the supervisor, process %d: %w", pid, err)
	}
	defer unix.Close(fd) // nothing was written
	// The lock is held and names this pid: only now is it certain that the descriptor is the supervisor's.
	if stillHeld, again, err := holder(path); err != nil || !stillHeld || again != pid {
		return err
	}
	for _, try := range []struct {
		sig  unix.Signal
		wait time.Duration
	}{{unix.SIGTERM, ask}, {unix.SIGKILL, 5 * time.Second}} {
		if err := unix.PidfdSendSignal(fd, try.sig, nil, 0); errors.Is(err, unix.ESRCH) {
			return nil
		} else if err != nil {
			return fmt.Errorf("stopping the supervisor, process %d: %w", pid, err)
		}
		if ended(ctx, fd, try.wait) {
			return nil
		}
	}
	return fmt.Errorf("stopping the supervisor, process %d: it does not end", pid)
}

// ended waits until the process behind the pidfd has ended; a pidfd is readable then.
func ended(ctx context.Context, fd int, wait time.Duration) bool {
	deadline := time.Now().Add(wait)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	for time.Now().Before(deadline) && ctx.Err() == nil {
		left := min(time.Until(deadline), 200*time.Millisecond)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds())+1) // descriptors are small
		if err == nil && n > 0 {
			return true
		}
	}
	return false
}

func lockFile(inst instance.Instance) string { return filepath.Join(inst.RunDir(), "pid", "up.lock") }

// holder says whether a supervisor holds the lock, and which process it is.
func holder(path string) (held bool, pid int, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, os.ErrNotExist) {
		return false, 0, nil
	}
	if err != nil {
		return false, 0, fmt.Errorf("opening the supervisor's lock: %w", err)
	}
	defer f.Close() // nothing was written
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err == nil {
		return false, 0, nil
	} else if !errors.Is(err, unix.EWOULDBLOCK) {
		return false, 0, fmt.Errorf("asking for the supervisor's lock: %w", err)
	}
	raw := make([]byte, 32)
	n, err := f.ReadAt(raw, 0)
	if n == 0 && err != nil {
		return true, 0, fmt.Errorf("reading who holds the supervisor's lock: %w", err)
	}
	pid, err = strconv.Atoi(strings.TrimSpace(string(raw[:n])))
	if err != nil {
		return true, 0, fmt.Errorf("reading who holds the supervisor's lock: %w", err)
	}
	return true, pid, nil
}
