package main

import (
	"encoding/binary"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	resolverPort = 53
	lookupEvery  = 20_000_000 // nanoseconds
)

// lookUp sends a query for name to the resolver at addr, again and again until it is killed. It takes no interest in
// the answers, and none in being refused: whether the packets pass is what others count.
func lookUp(addr, name string) {
	to, err := netip.ParseAddr(addr)
	if err != nil || !to.Is4() {
		os.Exit(2)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		os.Exit(1)
	}
	// Connected, so that each query is judged as a packet: otherwise the call would be refused before there is one.
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: resolverPort, Addr: to.As4()}); err != nil {
		os.Exit(1)
	}
	msg := query(name)
	var answer [512]byte
	for {
		unix.SendmsgN(fd, msg, nil, nil, unix.MSG_DONTWAIT)    // see above
		unix.Recvfrom(fd, answer[:], unix.MSG_DONTWAIT)        // likewise
		unix.Nanosleep(&unix.Timespec{Nsec: lookupEvery}, nil) // a signal only makes it shorter
	}
}

// query is a DNS query for the name's IPv4 addresses (RFC 1035, section 4.1).
func query(name string) []byte {
	const recursionDesired, typeA, classIN = 0x0100, 1, 1
	msg := binary.BigEndian.AppendUint16(nil, uint16(os.Getpid())) // an id
	for _, n := range []uint16{recursionDesired, 1, 0, 0, 0} {     // flags, then one question and nothing else
		msg = binary.BigEndian.AppendUint16(msg, n)
	}
	for _, label := range strings.Split(name, ".") {
		msg = append(append(msg, byte(len(label))), label...) // at most 63, as the card's check has it
	}
	msg = append(msg, 0)
	msg = binary.BigEndian.AppendUint16(msg, typeA)
	return binary.BigEndian.AppendUint16(msg, classIN)
}
