package e2e

import (
	"net/netip"
	"os/exec"
	"path/filepath"
	"strconv"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// fragmentsPy sends a UDP datagram in two IP fragments, or the second one alone, past every check of sockets: it is
// root's, in the kid's network namespace. The kernel completes the IP headers' checksums.
const fragmentsPy = `
import socket, struct, sys
src, dst, port, size, which = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
data = struct.pack('!HHHH', 4444, port, 8 + size, 0) + b'f' * size
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
for part, where in ((data[:1024], 0x2000), (data[1024:], 128)):
    if which == 'later' and where == 0x2000: continue
    head = struct.pack('!BBHHHBBH4s4s', 0x45, 0, 20 + len(part), 77, where, 64, 17, 0, socket.inet_aton(src), socket.inet_aton(dst))
    s.sendto(head + part, (dst, 0))
`

const fragmented = 1500 // bytes of the datagram, without its UDP header

// sendFragments sends from the kid's address, on the kid's link. The address must not lead away from this machine.
func (c *cases) sendFragments(from netip.Addr, kid string, to netip.AddrPort, which string) {
	c.t.Helper()
	c.mustStay(to.Addr())
	out, err := exec.Command("nsenter", "--net="+filepath.Join(c.box.Inst.NetNSDir(), kid), "/usr/bin/python3", "-c", fragmentsPy,
		from.String(), to.Addr().String(), strconv.Itoa(int(to.Port())), strconv.Itoa(fragmented), which).CombinedOutput()
	if err != nil {
		c.t.Fatalf("sending fragments: %v: %s", err, out)
	}
}

// fragments: E22. A datagram that is longer than the link carries is cut up behind every check of calls, without any
// privilege: the link drops the pieces, also those to the one resolver that a kid may ask. A later piece alone says no
// port. That such pieces arrive where nothing drops them: fragmentsArrive.
func (c *cases) fragments() {
	kid := c.box.Spawn(bareCard, nil)
	defer c.box.Destroy(kid.Name)
	if o := c.attack(kid.Name, step{Kind: "udp", Host: c.gateway(), Port: 53, Send: [][]byte{noise(4000)}})[0]; o.Error != "" && o.Error != "EPERM" {
		c.t.Errorf("a long datagram: %+v", o)
	}
	pieces := uint64(3) // of 4,008 bytes, 1,480 each at most
	for _, r := range c.waitDenied("a long datagram's pieces", kid, pieces, code(reason.Fragment)) {
		if r.Dst == nil || r.Dst.Addr != c.box.Inst.Gateway() {
			c.t.Errorf("a piece's record does not say where it was sent: %+v", r)
		}
	}
	if got := c.denied(kid, func(r *audit.Record) bool { return r.Event == audit.EventLookup }); len(got) != 0 {
		c.t.Errorf("the filter got the datagram: %+v", got)
	}
	evil := c.box.Net.EvilAddr()
	c.sendFragments(kid.Addr, kid.Name, netip.AddrPortFrom(evil, 53), "later")
	c.waitDenied("a later piece alone", kid, 1, func(r *audit.Record) bool {
		return r.Reason == reason.Fragment && r.Dst != nil && r.Dst.Addr == evil
	})
}
