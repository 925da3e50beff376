package practice

import (
	"net/netip"

	"tagout/internal/config"
)

// Authority is the person whom the practice box lets give orders, as the example cards name her.
const Authority = "Ada Operator"

// BoxConfig is the configuration of a box whose outside world is this internet: it resolves here, trusts the
// practice CA beside the system's, and posts its alerts to the webhook.
func (n *Internet) BoxConfig() config.Box {
	return config.Box{
		Resolvers:    []netip.AddrPort{netip.AddrPortFrom(n.DNSAddr(), 53)},
		UpstreamCAs:  []string{n.CAFile()},
		AlertWebhook: n.WebhookURL(),
		Authorities:  []config.Authority{{Name: Authority, Roles: []string{"spawn", "grant", "stop", "release"}}},
	}
}
