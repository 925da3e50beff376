package instance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// lockRetry is how often Lock tries again.
const lockRetry = 20 * time.Millisecond

// Lock keeps other processes from setting up or removing the instance called name, and waits for one that is at
// it until ctx ends. The kernel drops the lock when the process dies. It does not hold up whoever only uses the
// instance. Not for two callers within one process at once: each gets a lock of its own.
//
// All instances share one file, of which each locks a byte of its own (F_OFD_SETLK, fcntl(2)), so that no lock
// file is left of any.
func Lock(ctx context.Context, name string) (unlock func(), err error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	at, err := strconv.ParseInt(name, 36, 64) // 12 digits to the base of 36 fit
	if err != nil {
		return nil, fmt.Errorf("locking instance %s: %w", name, err)
	}
	if err := os.MkdirAll(slotDir(), 0o755); err != nil {
		return nil, fmt.Errorf("locking instance %s: %w", name, err)
	}
	f, err := os.OpenFile(filepath.Join(slotDir(), "lock"), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o644) // stays empty
	if err != nil {
		return nil, fmt.Errorf("locking instance %s: %w", name, err)
	}
	tick := time.NewTicker(lockRetry)
	defer tick.Stop()
	for {
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1})
		if err == nil {
			return func() { f.Close() }, nil // nothing was written
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EINTR) {
			f.Close() // as above
			return nil, fmt.Errorf("locking instance %s: %w", name, err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			f.Close() // as above
			return nil, fmt.Errorf("another command is setting up or removing instance %s: wait until it is done: %w", name, ctx.Err())
		}
	}
}
