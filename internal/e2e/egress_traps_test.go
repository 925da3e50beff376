package e2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/internal/wire"
)

// trap counts the bytes of datagrams that arrive at an address of the host.
type trap struct {
	at  netip.AddrPort
	got atomic.Int64
}

// listenTrap listens until the test ends. Where ifindex is not 0, the address is a group that is joined on that link.
func (c *cases) listenTrap(at netip.AddrPort, ifindex int) *trap {
	c.t.Helper()
	lc := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) (err error) {
		if ifindex == 0 {
			return nil
		}
		join := &unix.IPMreqn{Multiaddr: at.Addr().As4(), Ifindex: int32(ifindex)}
		if ctlErr := rc.Control(func(fd uintptr) { err = unix.SetsockoptIPMreqn(int(fd), unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP, join) }); ctlErr != nil {
			return ctlErr
		}
		return err
	}}
	conn, err := lc.ListenPacket(context.Background(), "udp4", at.String())
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { conn.Close() })
	tr := &trap{at: at}
	go func() {
		for buf := make([]byte, 65536); ; {
			n, _, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			tr.got.Add(int64(n))
		}
	}()
	return tr
}

// thrown is datagrams that a kid may not send, and traps on its own link and on the gateway that would get them. A kid's
// link ends on this host, which forwards nothing, and groups and broadcasts go no further than a link.
type thrown struct {
	c     *cases
	kid   string
	steps []step
	traps []*trap
}

// throwAll sends each datagram and checks that it is refused and arrives nowhere.
func (c *cases) throwAll(kid wire.Kid) *thrown {
	c.t.Helper()
	routes, err := netlink.RouteGet(kid.Addr.AsSlice())
	if err != nil || len(routes) != 1 {
		c.t.Fatalf("%v: %d routes: %v", kid.Addr, len(routes), err)
	}
	h := &thrown{c: c, kid: kid.Name}
	for _, d := range []struct {
		to, at  netip.Addr
		port    uint16
		ifindex int
	}{
		{c.box.Inst.Gateway(), c.box.Inst.Gateway(), 443, 0}, // QUIC
		{netip.MustParseAddr("224.0.0.251"), netip.MustParseAddr("224.0.0.251"), 15353, routes[0].LinkIndex},
		{netip.MustParseAddr("255.255.255.255"), netip.IPv4Unspecified(), c.broadcastPort(), 0},
	} {
		h.traps = append(h.traps, c.listenTrap(netip.AddrPortFrom(d.at, d.port), d.ifindex))
		h.steps = append(h.steps, step{Kind: "udp", Host: d.to.String(), Port: int(d.port), Send: [][]byte{[]byte("thrown")}})
	}
	for i, o := range c.attack(h.kid, h.steps...) {
		if o.Error != "EPERM" {
			c.t.Errorf("%s port %d: %+v", h.steps[i].Host, h.steps[i].Port, o)
		}
		if n := h.traps[i].got.Load(); n != 0 {
			c.t.Errorf("%s port %d: %d bytes arrived", h.steps[i].Host, h.steps[i].Port, n)
		}
	}
	return h
}

// broadcastPort is another one on each box of this machine: the trap listens on every address.
func (c *cases) broadcastPort() uint16 { return 20000 + uint16(c.box.Inst.Slot()) }

// arrive sends them again, with nothing in the way: each is trapped.
func (h *thrown) arrive() {
	h.c.t.Helper()
	for i, o := range h.c.attack(h.kid, h.steps...) {
		if o.Error != "" {
			h.c.t.Errorf("without the walls, %s port %d: %+v", h.steps[i].Host, h.steps[i].Port, o)
		}
	}
	for i, tr := range h.traps {
		h.c.box.Until(soon, fmt.Sprintf("what was sent to %s port %d arrives", h.steps[i].Host, h.steps[i].Port), func() error {
			if n := tr.got.Load(); n != int64(len("thrown")) {
				return fmt.Errorf("%d bytes did", n)
			}
			return nil
		})
	}
}
