package bench

import (
	"fmt"
	"strings"
)

// asking is the processor time of the client for one answer, in microseconds: with it goes what the kernel does on
// the query's way to the resolver, the kid's programs and firewall among it.
func (r loadResult) asking() float64 { return r.CPU / float64(r.Count) }

// dnsLimits says where the processors go while DNS is measured: what each answer costs the client and the resolver,
// in a kid and beside the peers.
func dnsLimits(rs map[string][]loadResult) string {
	var parts []string
	for _, name := range []string{wayTagout, peerDnsmasq, peerCoredns} {
		if len(rs[name]) > 0 {
			parts = append(parts, fmt.Sprintf("%s %.1f + %.1f", name, median(rs[name], loadResult.asking), median(rs[name], loadResult.cost)))
		}
	}
	return "the processors that both share, µs an answer of the client (with the query's way through its programs, link and firewall) + of the resolver: " +
		strings.Join(parts, ", ")
}
