package main

import (
	"net"
	"net/netip"
	"strconv"

	"tagout/internal/config"
)

// served is where the box's daemons serve over TCP. A place without an address of its own counts as every address.
func served(box *config.Box) []netip.AddrPort {
	var out []netip.AddrPort
	if box.API.Listen.IsValid() {
		out = append(out, box.API.Listen)
	}
	if box.Issuer.Listen.IsValid() {
		out = append(out, box.Issuer.Listen)
	}
	for _, where := range box.MetricsListen {
		host, service, err := net.SplitHostPort(where)
		port, portErr := strconv.ParseUint(service, 10, 16)
		if err != nil || portErr != nil {
			continue // the daemon that was to listen there did not start
		}
		addr, err := netip.ParseAddr(host)
		if err != nil {
			addr = netip.IPv4Unspecified()
		}
		out = append(out, netip.AddrPortFrom(addr, uint16(port)))
	}
	return out
}
