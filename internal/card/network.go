package card

import (
	"slices"

	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/yamlx"
)

// outboundOnly is the network of a card that names none: what its egress allows can be reached, and nobody reaches
// the kid.
const outboundOnly = "outbound-only"

// maxReach bounds a card's reach, in pairs of an address and a port.
const maxReach = 256

// readNetwork reads what network the kid has. Rules for one that it does not have are a mistake: nobody could say
// which of the two was meant.
func (c *Card) readNetwork(v yamlx.Value) {
	mode, ok := v.Text()
	switch {
	case !ok || mode == outboundOnly:
	case mode == session.NetworkNone:
		c.Network = mode
		if len(c.Egress.Allow) > 0 {
			v.Refuse("remove the allow rules, or write `network: "+outboundOnly+"`", "a kid without a network can reach nothing")
		}
	case mode == session.NetworkHost:
		c.Network = mode
		c.checkHost(v)
	default:
		v.Refuse("write "+outboundOnly+", none or host", "unknown network %s", yamlx.Quote(mode))
	}
}

// checkHost refuses what the proxy and dnsfilter would have to do for a kid that goes past both.
func (c *Card) checkHost(v yamlx.Value) {
	switch {
	case len(c.Egress.Allow)+len(c.Egress.Deny) > 0:
		v.Refuse("remove egress and write addresses under `reach`", "on the machine's network there are no names: egress means nothing there")
	case len(c.Identity.Scope) > 0:
		v.Refuse("remove identity, or write `network: "+outboundOnly+"`", "a secret is swapped in by the proxy, past which a kid on the machine's network goes")
	case slices.ContainsFunc(c.Identity.Mint, func(t session.Mint) bool { return t.Env != "" }):
		v.Refuse("write `file:` instead of env and hosts in identity.mint", "a token is exchanged by the proxy, past which a kid on the machine's network goes")
	case c.Image == HostWritable:
		v.Refuse("write another image", "a kid that may install packages cannot be on the machine's network")
	}
}

// readReach reads what a kid on the machine's network may connect to.
func (c *Card) readReach(v yamlx.Value) {
	if v.Present() && c.Network != session.NetworkHost {
		v.Refuse("remove it, or write `network: "+session.NetworkHost+"`", "reach is for kids on the machine's network")
		return
	}
	for _, entry := range v.List() {
		m, ok := entry.Map(reachKeys...)
		if !ok {
			continue
		}
		to, ports := m.Need("addresses"), readPorts(m.Need("ports"))
		if to.IsList() && len(to.Texts()) == 0 {
			to.Refuse("write at least one", "the list of addresses is empty")
		}
		for _, at := range to.Texts() {
			c.reach(at, ports)
		}
	}
	if len(c.Reach) > maxReach {
		v.Refuse("name ranges", "reach has more than %d pairs of an address and a port", maxReach)
	}
}

// reach adds the ports of one address or range.
func (c *Card) reach(at yamlx.TextAt, ports []portAt) {
	prefix, ok := readPrefix(at.Text)
	if !ok {
		at.Refuse("write an address or a range, such as `10.0.0.5` or `10.0.0.0/24`", "%s is not an address", yamlx.Quote(at.Text))
		return
	}
	if err := policy.CheckReach(prefix); err != nil {
		at.Refuse("write another address or a smaller range", "%s cannot be reached: %v", at.Text, err)
		return
	}
	for _, p := range ports {
		one := session.Reach{To: prefix, Port: p.port}
		switch {
		case p.port == 53 || p.port == 853:
			p.Refuse("remove it", "port %d is for name servers, which no kid may reach", p.port)
		case slices.Contains(c.Reach, one):
			at.Refuse("remove it", "%s port %d is in reach already", prefix, p.port)
		default:
			c.Reach = append(c.Reach, one)
		}
	}
}
