package main

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

var _ = register(technique{
	Name:   "iouring",
	What:   "io_uring, whose requests no seccomp filter sees: set up, entered and registered again and again",
	Layers: []string{"network", "session"},
	Signs:  []sign{{What: "work", N: 200}, {What: "refused", N: 100}},
	run:    tryRings,
})

func tryRings(s *scene) error {
	for {
		var params [120]byte // struct io_uring_params
		fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 8, uintptr(unsafe.Pointer(&params)), 0)
		s.did()
		if errno != 0 {
			s.denied()
			fd = 0 // standard input is no ring: the calls below are refused, which they are to be anyway
		}
		for _, call := range []uintptr{unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER} {
			if _, _, errno := unix.Syscall6(call, fd, 1, 0, 0, 0, 0); errno != 0 {
				s.denied()
			}
			s.did()
		}
		if errno == 0 {
			unix.Close(int(fd)) // having it was the point
		}
		time.Sleep(2 * time.Millisecond)
	}
}
