package card

import (
	"tagout/internal/session"
	"tagout/internal/yamlx"
)

// outboundOnly is the network of a card that names none: what its egress allows can be reached, and nobody reaches
// the kid.
const outboundOnly = "outbound-only"

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
	default:
		v.Refuse("write "+outboundOnly+" or none", "unknown network %s", yamlx.Quote(mode))
	}
}
