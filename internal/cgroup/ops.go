package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Kill sends SIGKILL to every process in dir and below, those that are being forked included, with one write
// (cgroup.kill, kernel 5.14). errors.Is(err, fs.ErrNotExist) where there is no such cgroup.
func Kill(dir string) error {
	if err := write(filepath.Join(dir, "cgroup.kill"), "1"); err != nil {
		return fmt.Errorf("killing cgroup: %w", err)
	}
	return nil
}

// KillAndWait kills every process in dir and below and returns when all that were in it at the call are gone,
// whatever was started there since: a supervisor may be quicker than any look at whether dir is empty. n counts
// them; 0 also where there is no such cgroup. When ctx ends first it returns ctx's error.
func KillAndWait(ctx context.Context, dir string) (n int, err error) {
	held, err := hold(dir)
	defer func() {
		for _, fd := range held {
			unix.Close(fd) // nothing was written
		}
	}()
	if err != nil {
		return 0, err
	}
	if err := Kill(dir); err != nil && !gone(err) {
		return len(held), err
	}
	for _, fd := range held {
		if err := WaitExit(ctx, fd); err != nil {
			return len(held), fmt.Errorf("waiting for the processes of cgroup %s to die: %w", dir, err)
		}
	}
	return len(held), nil
}

// hold opens a pidfd for every process in dir and below: unlike a pid, it never comes to mean another one.
func hold(dir string) (fds []int, err error) {
	pids, err := Procs(dir)
	if err != nil {
		return nil, err
	}
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if errors.Is(err, unix.ESRCH) {
			continue // gone already
		}
		if err != nil {
			return fds, fmt.Errorf("opening process %d: %w", pid, err)
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// WaitExit waits until the process behind a pidfd has ended, or returns ctx's error; a pidfd is readable then
// (pidfd_open(2)), and its process a zombie at most.
func WaitExit(ctx context.Context, fd int) error {
	for {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}} // descriptors fit
		n, err := retry(func() (int, error) { return unix.Poll(fds, int(lookAgain/time.Millisecond)) })
		if err != nil {
			return fmt.Errorf("polling: %w", err)
		}
		if n > 0 {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// CanKill says whether Kill would be permitted, without killing anything.
func CanKill(dir string) error {
	file := filepath.Join(dir, "cgroup.kill")
	fd, err := open(file, unix.O_WRONLY)
	if err != nil {
		return fmt.Errorf("checking cgroup.kill: %w", err)
	}
	unix.Close(fd) // nothing was written
	return nil
}

// Freeze stops every process in the cgroup from running. v2dir is its directory in the v2 hierarchy,
// freezerDir that in the v1 freezer or "". The kernel finishes the freeze in its own time.
func Freeze(v2dir, freezerDir string) error {
	if freezerDir != "" {
		if err := write(filepath.Join(freezerDir, "freezer.state"), "FROZEN"); err != nil {
			return fmt.Errorf("freezing cgroup: %w", err)
		}
		return nil
	}
	if err := write(filepath.Join(v2dir, "cgroup.freeze"), "1"); err != nil {
		return fmt.Errorf("freezing cgroup: %w", err)
	}
	return nil
}

// Thaw undoes Freeze in both hierarchies, whichever of them froze the cgroup. A directory that does not exist
// is not an error: there is nothing to thaw.
func Thaw(v2dir, freezerDir string) error {
	var errs []error
	if freezerDir != "" {
		errs = append(errs, write(filepath.Join(freezerDir, "freezer.state"), "THAWED"))
	}
	errs = append(errs, write(filepath.Join(v2dir, "cgroup.freeze"), "0"))
	for i, err := range errs {
		if gone(err) {
			errs[i] = nil
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("thawing cgroup: %w", err)
	}
	return nil
}

// Frozen says whether the v2 hierarchy holds dir frozen, by its own file or a parent's: nothing in it runs.
// Unlike one of the v1 freezer, a process that is frozen there dies of SIGKILL at once.
func Frozen(dir string) (bool, error) {
	raw, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		return false, fmt.Errorf("reading whether a cgroup is frozen: %w", err)
	}
	return bytes.Contains(raw, []byte("frozen 1\n")), nil
}

// WaitFrozen returns nil as soon as everything in dir is frozen, or ctx's error when that ends first: a task in
// uninterruptible sleep takes its time.
func WaitFrozen(ctx context.Context, dir string) error {
	for {
		frozen, err := Frozen(dir)
		if err != nil || frozen {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for cgroup %s to freeze: %w", dir, ctx.Err())
		case <-time.After(lookAgain):
		}
	}
}

// Populated says whether a process that is not a zombie is in dir or below. A cgroup that does not exist is
// not populated.
func Populated(dir string) (bool, error) {
	fd, err := open(filepath.Join(dir, "cgroup.events"), unix.O_RDONLY)
	if gone(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading whether the cgroup is populated: %w", err)
	}
	defer unix.Close(fd) // only read
	return populated(fd, dir)
}

func populated(fd int, dir string) (bool, error) {
	var buf [256]byte
	n, err := retry(func() (int, error) { return unix.Pread(fd, buf[:], 0) })
	if gone(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading cgroup.events of %s: %w", dir, err)
	}
	switch {
	case bytes.Contains(buf[:n], []byte("populated 0\n")):
		return false, nil
	case bytes.Contains(buf[:n], []byte("populated 1\n")):
		return true, nil
	}
	return false, fmt.Errorf("reading cgroup.events of %s: no populated line in %q", dir, buf[:n])
}

// lookAgain is the longest that WaitEmpty sleeps without looking. The kernel holds notifications of one file
// 10 ms apart (CGROUP_FILE_NOTIFY_MIN_INTV) and drops the one that is due when the cgroup is removed.
const lookAgain = 2 * time.Millisecond

// WaitEmpty returns nil as soon as no process that is not a zombie is left in dir or below, or the cgroup is
// gone; it sleeps in poll(2) until the kernel reports a change. When ctx ends first it returns ctx's error.
func WaitEmpty(ctx context.Context, dir string) error {
	fd, err := open(filepath.Join(dir, "cgroup.events"), unix.O_RDONLY)
	if gone(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("waiting for cgroup to empty: %w", err)
	}
	defer unix.Close(fd) // only read
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("waiting for cgroup to empty: making an eventfd: %w", err)
	}
	defer unix.Close(wake) // ours alone
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(woken)
		unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // cannot fail: the counter is 0
	})
	defer func() {
		if !stop() {
			<-woken // the eventfd must not be closed, and its number used again, under the writer
		}
	}()
	for {
		some, err := populated(fd, dir)
		if err != nil || !some {
			return err
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("waiting for cgroup %s to empty: %w", dir, err)
		}
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}, {Fd: int32(wake), Events: unix.POLLIN}} // descriptors fit
		if _, err := retry(func() (int, error) { return unix.Poll(fds, int(lookAgain/time.Millisecond)) }); err != nil {
			return fmt.Errorf("waiting for cgroup %s to empty: polling: %w", dir, err)
		}
	}
}

// Procs returns the pids, as this process's pid namespace numbers them, of all processes in dir and below. A
// cgroup that does not exist has none.
func Procs(dir string) ([]int, error) {
	var pids []int
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if gone(err) {
			return nil
		}
		if err != nil || !d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if gone(err) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, word := range bytes.Fields(raw) {
			pid, err := strconv.Atoi(string(word))
			if err != nil {
				return fmt.Errorf("reading %s/cgroup.procs: %w", path, err)
			}
			pids = append(pids, pid)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing the processes of a cgroup: %w", err)
	}
	return pids, nil
}

// ID returns the cgroup's id, as BPF programs see it: the inode number of its v2 directory.
func ID(dir string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, fmt.Errorf("reading the id of cgroup %s: %w", dir, err)
	}
	return st.Ino, nil
}

// Join moves the process pid into the cgroup at dir.
func Join(dir string, pid int) error {
	if err := write(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(pid)); err != nil {
		return fmt.Errorf("moving process %d into a cgroup: %w", pid, err)
	}
	return nil
}

// write is a bare open and write: package os would first try to put the file into its poller.
func write(file, value string) error {
	fd, err := open(file, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd) // kernfs has taken or refused the value by now
	if _, err := retry(func() (int, error) { return unix.Write(fd, []byte(value)) }); err != nil {
		return &fs.PathError{Op: "write", Path: file, Err: err}
	}
	return nil
}

func open(file string, mode int) (int, error) {
	fd, err := retry(func() (int, error) { return unix.Open(file, mode|unix.O_CLOEXEC, 0) })
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: file, Err: err}
	}
	return fd, nil
}

// retry repeats a system call that a signal interrupted.
func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
