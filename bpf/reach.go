package bpf

import (
	"fmt"
	"net/netip"
)

// reachFixed is REACH_FIXED of maps.h; a test compares the two.
const reachFixed = 64

// AllowReach lets the session, whose kid lives on the machine's network, open TCP connections to a port of the IPv4
// addresses in the range. Metadata addresses, multicast and Tagout's own networks stay refused whatever the range is.
func (m *Maps) AllowReach(mark uint32, to netip.Prefix, port uint16) error {
	if !to.IsValid() || !to.Addr().Is4() || port == 0 || mark == 0 {
		return fmt.Errorf("allowing session %#x to reach %v port %d: not an IPv4 range, or no port or mark", mark, to, port)
	}
	key := tagoutReachKey{Bits: reachFixed + uint32(to.Bits()), Mark: mark, Port: port, Addr: wire(to.Masked().Addr())} // 0 to 32
	return m.put(tagoutMapReach, &key, uint8(1))
}

// ForgetReach takes everything away that AllowReach gave the session.
func (m *Maps) ForgetReach(mark uint32) error {
	return sweep(m, tagoutMapReach, func(key tagoutReachKey, _ uint8) bool { return key.Mark != mark })
}
