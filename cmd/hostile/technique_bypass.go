package main

import (
	"time"

	"golang.org/x/sys/unix"
)

var _ = register(technique{
	Name:   "bypass",
	What:   "sockets that would go around the proxy (packet, raw, SCTP, vsock, XDP, netlink, kernel crypto), and every way out by name and address",
	Layers: []string{"network"},
	Signs:  []sign{{What: "work", N: 200}, {What: "refused", N: 100}},
	parts:  "ticks,token,bypass",
	run:    oddSockets,
})

// oddSockets counts attempts; what it gets is closed again and tried anew.
func oddSockets(s *scene) error {
	kinds := [][3]int{
		{unix.AF_PACKET, unix.SOCK_RAW, 0x0300}, {unix.AF_PACKET, unix.SOCK_DGRAM, 0x0300},
		{unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW}, {unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP},
		{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP}, {unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP},
		{unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP}, {unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6},
		{unix.AF_VSOCK, unix.SOCK_STREAM, 0}, {unix.AF_XDP, unix.SOCK_RAW, 0}, {unix.AF_ALG, unix.SOCK_SEQPACKET, 0},
		{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, {unix.AF_BLUETOOTH, unix.SOCK_RAW, 1}, {unix.AF_TIPC, unix.SOCK_RDM, 0},
	}
	for i := 0; ; i++ {
		k := kinds[i%len(kinds)]
		fd, err := unix.Socket(k[0], k[1], k[2])
		if err != nil {
			s.denied()
		} else {
			unix.Close(fd) // having it was the point
		}
		s.did()
		time.Sleep(time.Millisecond)
	}
}
