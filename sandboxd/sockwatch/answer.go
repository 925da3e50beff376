package sockwatch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A filter that asks more than burst times within a breath waits for the rest of it: a process that asks in a loop
// costs its own time and not the box's. Nothing else of the kid waits, and a process that waits can be killed.
const (
	burst  = 256
	breath = 100 * time.Millisecond
)

// notification is the kernel's struct seccomp_notif (linux/seccomp.h). It must be zero when it is handed over.
type notification struct {
	id    uint64
	tid   uint32 // in this process's pid namespace
	flags uint32
	nr    int32 // system call
	arch  uint32
	ip    uint64
	args  [6]uint64
}

// response is the kernel's struct seccomp_notif_resp. Without flags it ends the call with errno.
type response struct {
	id    uint64
	value int64
	errno int32 // negative
	flags uint32
}

// answer refuses whatever the filter asks until no process has the filter any more, and returns nil then.
func (w *Watch) answer(ctx context.Context, mark uint32, file *os.File) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var gone bool
	for !gone && err == nil {
		began, n := time.Now(), 0
		waitErr := raw.Read(func(fd uintptr) (done bool) {
			var ready bool
			for {
				ready, gone, err = asked(fd)
				if gone || err != nil {
					return true
				}
				if !ready {
					return false
				}
				if time.Since(began) > breath {
					began, n = time.Now(), 0
				}
				if n++; n > burst {
					return true
				}
				if gone, err = w.one(fd, mark); gone || err != nil {
					return true
				}
			}
		})
		if waitErr != nil {
			return fmt.Errorf("waiting for a filter: %w", waitErr)
		}
		if n > burst {
			pause(ctx, breath-time.Since(began))
		}
	}
	return err
}

// asked says, without waiting, whether a call waits for an answer and whether the filter is gone.
func asked(fd uintptr) (ready, gone bool, err error) {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(fds, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return false, false, fmt.Errorf("polling a filter: %w", err)
		}
		events := fds[0].Revents
		return events&unix.POLLIN != 0, events&(unix.POLLHUP|unix.POLLERR) != 0, nil
	}
}

// one refuses one call and records it. The process is looked at while it waits for the answer: it is the one that
// called, and still there, if it gets the answer.
func (w *Watch) one(fd uintptr, mark uint32) (gone bool, err error) {
	var n notification
	switch err := ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n)); {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINTR): // taken back by a signal; or ours
		return false, nil
	case errors.Is(err, unix.ENOTCONN):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("receiving a question: %w", err)
	}
	call := callOf(n)
	who := processOf(int(n.tid))
	r := response{id: n.id, errno: -int32(call.errno())}
	err = ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r))
	for errors.Is(err, unix.EINTR) {
		err = ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r))
	}
	switch {
	case errors.Is(err, unix.ENOENT): // taken back by a signal
		return false, nil
	case err != nil:
		return false, fmt.Errorf("answering: %w", err)
	}
	w.note(mark, who, call)
	return false, nil
}

func ioctl(fd, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(arg))
	runtime.KeepAlive(arg)
	if errno != 0 {
		return errno
	}
	return nil
}
