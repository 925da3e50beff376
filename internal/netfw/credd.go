package netfw

import (
	"fmt"
	"net/netip"
	"slices"
)

// Call is one thing that credd may open a connection to, or ask over UDP: the providers that secrets are leased from, and
// the resolvers that say where they are.
type Call struct {
	To   netip.Addr // zero: wherever the port is; credd itself then looks that it is a public address
	Port uint16
	UDP  bool
}

// creddRules lets credd call what is named and refuses all else that it begins. What it says on connections that others
// have opened to it, its metrics and its issuer's door, opens nothing: such packets are never a bare SYN.
func creddRules(calls []Call, of func(netip.Addr) bool, refuse []string) []string {
	out := []string{"-p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN -j ACCEPT"}
	for _, c := range calls {
		proto, to := "tcp", ""
		if c.UDP {
			proto = "udp"
		}
		if c.To.IsValid() {
			if !of(c.To) {
				continue
			}
			to = fmt.Sprintf("-d %s ", netip.PrefixFrom(c.To, c.To.BitLen()))
		}
		rule := fmt.Sprintf("%s-p %s -m %s --dport %d -j ACCEPT", to, proto, proto, c.Port)
		if !slices.Contains(out, rule) {
			out = append(out, rule)
		}
	}
	return append(out, refuse...)
}
