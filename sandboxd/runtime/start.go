package runtime

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// fifoName is the pipe in a container's state directory at which kid-init's process waits: it writes to it, and becomes
// kid-init when somebody has read that. A container that has it is `created`, one that has not is `running`.
const fifoName = "exec.fifo"

// look is how often a start that waits looks whether it was called off.
const look = 100 * time.Millisecond

// Start lets kid-init run, of a container that this process made. `runc start` does no more than read the container's pipe
// and remove it, and takes a tenth of a spawn for it; so that is done here.
func (r *Runc) Start(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, r.Patience)
	defer cancel()
	m := r.master(id)
	if m == nil {
		return fmt.Errorf("starting container %s: another process made it", id)
	}
	if err := release(ctx, filepath.Join(r.root, id, fifoName), m.init); err != nil {
		return fmt.Errorf("starting container %s: %w", id, err)
	}
	m.prepare()
	return nil
}

var errNoFIFO = errors.New("runc left no pipe to start the container by")

// release reads what the process pid writes to the pipe at path, and removes the pipe.
func release(ctx context.Context, path string, pid int) error {
	init, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("opening process %d: %w", pid, err)
	}
	defer unix.Close(init) // only a handle
	fifo, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return errNoFIFO
	}
	if err != nil {
		return fmt.Errorf("opening %s: %w", path, err)
	}
	defer unix.Close(fifo) // only read
	for {
		// The pipe first: who has written may be gone since.
		waits := []unix.PollFd{{Fd: int32(fifo), Events: unix.POLLIN}, {Fd: int32(init), Events: unix.POLLIN}}
		_, err := unix.Poll(waits, int(look.Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("waiting at %s: %w", path, err)
		case waits[0].Revents&unix.POLLIN != 0:
			var b [1]byte
			if _, err := unix.Read(fifo, b[:]); err != nil { // what it is does not matter
				return fmt.Errorf("reading %s: %w", path, err)
			}
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("removing the pipe of a container that runs: %w", err)
			}
			return nil
		case waits[1].Revents != 0:
			return errors.New("its first process ended before kid-init ran")
		}
		if ctx.Err() != nil {
			return fmt.Errorf("kid-init's process does not come to its start: %w", ctx.Err())
		}
	}
}
