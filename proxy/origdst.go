package proxy

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// originalDst returns where the connection was going before DNAT: SO_ORIGINAL_DST, ip(7) and
// linux/netfilter_ipv4.h. A connection that no rule changed yields either its own address or an error.
func originalDst(c net.Conn) (netip.AddrPort, error) {
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("reading the original destination: %w", err)
	}
	var dst netip.AddrPort
	var optErr error
	err = raw.Control(func(fd uintptr) {
		// The option fills in a sockaddr_in; an ipv6_mreq is the type of x/sys that is long enough to hold it.
		var mreq *unix.IPv6Mreq
		mreq, optErr = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST)
		if optErr != nil {
			return
		}
		sa := mreq.Multiaddr // family (2), port (2, network order), address (4)
		dst = netip.AddrPortFrom(netip.AddrFrom4([4]byte(sa[4:8])), binary.BigEndian.Uint16(sa[2:4]))
	})
	if err == nil {
		err = optErr
	}
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("reading the original destination: %w", err)
	}
	return dst, nil
}

// setMark sets SO_MARK, by which the BPF programs and SOCK_DESTROY find a session's upstream sockets.
func setMark(fd uintptr, mark uint32) error {
	if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		return fmt.Errorf("setting mark %#x: %w", mark, err)
	}
	return nil
}

// probeMark says whether this process may mark sockets.
func probeMark() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) // a probe
	return setMark(uintptr(fd), 1)
}
