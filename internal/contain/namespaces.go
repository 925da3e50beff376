package contain

import (
	"os/exec"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// cloned starts a program in new namespaces. Whoever is told that there is no such program, as on an image without it, was in
// them by then.
func cloned(flags uintptr) error {
	cmd := exec.Command("/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
	return unless(cmd.Run(), unix.ENOENT)
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }

// descriptor is a system call that returns a file descriptor, which it closes.
func descriptor(nr, a, b uintptr) error { return descriptor3(nr, a, b, 0) }

func descriptor3[N ~int | ~uintptr](nr uintptr, a N, b, c uintptr) error {
	fd, _, errno := unix.Syscall(nr, uintptr(a), b, c)
	if errno != 0 {
		return errno
	}
	return unix.Close(int(fd))
}
