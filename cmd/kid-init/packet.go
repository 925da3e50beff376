package main

import (
	"errors"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// sendMarked waits for the end of its standard input, when sandboxd has it where the packet is to come from. Then it
// sends one packet with a mark to a port of this machine's own loopback and ends: with 0 where it was sent, with 3 where
// a program refused it, with 1 otherwise.
func sendMarked(mark, port, text string) {
	hold()
	m, err1 := strconv.ParseUint(mark, 10, 32)
	p, err2 := strconv.ParseUint(port, 10, 16)
	fd, err3 := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if errors.Join(err1, err2, err3) != nil {
		os.Exit(1)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(m)); err != nil {
		os.Exit(1)
	}
	switch err := unix.Sendto(fd, []byte(text), 0, &unix.SockaddrInet4{Port: int(p), Addr: [4]byte{127, 0, 0, 1}}); err {
	case nil:
		os.Exit(0)
	case unix.EPERM: // the answer to a packet that a program at the cgroup drops
		os.Exit(3)
	}
	os.Exit(1)
}
