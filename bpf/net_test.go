package bpf

import (
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// up gives the link addresses and sets it up; h may be nil for the thread's own namespace.
func up(t testing.TB, h *netlink.Handle, name string, addrs ...string) netlink.Link {
	t.Helper()
	if h == nil {
		h = &netlink.Handle{}
	}
	l, err := h.LinkByName(name)
	must(t, err)
	for _, a := range addrs {
		parsed, err := netlink.ParseAddr(a)
		must(t, err)
		if parsed.IP.To4() == nil {
			parsed.Flags = unix.IFA_F_NODAD
		}
		must(t, h.AddrAdd(l, parsed))
	}
	must(t, h.LinkSetUp(l))
	return l
}

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// echoTCP answers what it gets, in the namespace of the calling thread.
func echoTCP(t testing.TB, where netip.AddrPort) {
	t.Helper()
	ln, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(where))
	must(t, err)
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
}

// echoUDP answers what it gets and keeps the sender's address for the test.
func echoUDP(t testing.TB, where netip.AddrPort) <-chan netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(where))
	must(t, err)
	t.Cleanup(func() { c.Close() })
	from := make(chan netip.AddrPort, 16)
	go func() {
		buf := make([]byte, 2048)
		for {
			n, peer, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort(buf[:n], peer)
			select {
			case from <- peer:
			default: // nobody asks
			}
		}
	}()
	return from
}
