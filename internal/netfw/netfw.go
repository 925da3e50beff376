// Package netfw keeps the static firewall rules of an instance: the wall behind the BPF programs. Everything
// that arrives on a kid's link is either sent to the gateway's three ports or refused; nothing from a kid is
// ever forwarded, and nothing is let through because a connection is already established.
//
// The rules are desired state: they follow from the instance alone, are the same for all of its kids, and lie
// in chains of its own, IPv4 and IPv6 together. Ensure makes the kernel agree with them, Remove needs nothing
// but the instance's name. Both work in the network namespace of the calling thread, because the iptables
// command inherits it.
//
// It promises nothing about packets that another tool's nftables hooks take away before iptables sees them.
package netfw

import (
	"fmt"
	"net/netip"
	"strings"

	"tagout/internal/instance"
)

// Chain name endings. A name is at most 28 bytes (XT_EXTENSION_MAXNAMELEN less one): "TGO-", 12 of the
// instance and these.
const (
	endNAT     = "-nat"
	endIn      = "-in"
	endGateway = "-gw"
	endOut     = "-out"
	endForward = "-fwd"
	endCredd   = "-cred"
	endHold    = "-hold" // drops everything while the others are being rebuilt
)

// chain is one chain of ours and its rules, spelled as `iptables -S` prints them, so that text compares.
type chain struct {
	table, name string
	rules       []string
}

// jump is one rule at the head of a built-in chain.
type jump struct {
	table, builtin, rule string
}

// family is the desired state of one address family.
type family struct {
	name   string
	jumps  []jump
	chains []chain
}

// own is the prefix that marks a chain as the named instance's. The dash keeps "main" from "main2".
func own(inst instance.Instance) string { return inst.ChainPrefix() + "-" }

// anyOwner begins the chains of every instance.
const anyOwner = "TGO-"

// Text renders the desired rules of both families, one rule a line: table, chain, rule.
func Text(inst instance.Instance, calls ...Call) string {
	var b strings.Builder
	for _, f := range []family{desired4(inst, calls), desired6(inst, calls)} {
		fmt.Fprintf(&b, "# %s\n", f.name)
		for _, j := range f.jumps {
			fmt.Fprintf(&b, "%s %s %s\n", j.table, j.builtin, j.rule)
		}
		for _, c := range f.chains {
			for _, r := range c.rules {
				fmt.Fprintf(&b, "%s %s %s\n", c.table, c.name, r)
			}
		}
	}
	return b.String()
}

func desired4(inst instance.Instance, calls []Call) family {
	p := inst.ChainPrefix()
	gw := netip.PrefixFrom(inst.Gateway(), 32).String()
	return family{
		name: "ipv4",
		jumps: append(filterJumps(inst),
			jump{"filter", "INPUT", "-d " + gw + " ! -i " + inst.LinkPrefix() + "+ -j " + p + endGateway},
			jump{"nat", "PREROUTING", "-i " + inst.LinkPrefix() + "+ -j " + p + endNAT}),
		chains: []chain{
			{"nat", p + endNAT, natRules(inst)},
			{"filter", p + endIn, inRules(inst)},
			{"filter", p + endGateway, gatewayRules()},
			{"filter", p + endOut, outRules(inst)},
			{"filter", p + endForward, forwardRules(inst, refuse4())},
			{"filter", p + endCredd, creddRules(calls, netip.Addr.Is4, refuse4())},
		},
	}
}

// desired6 refuses everything: kids have no IPv6.
func desired6(inst instance.Instance, calls []Call) family {
	p := inst.ChainPrefix()
	refuse := []string{"-p tcp -j REJECT --reject-with tcp-reset", "-p udp -j REJECT --reject-with icmp6-adm-prohibited", "-j DROP"}
	return family{
		name:  "ipv6",
		jumps: filterJumps(inst),
		chains: []chain{
			{"filter", p + endIn, refuse},
			{"filter", p + endOut, []string{
				"-p tcp -m tcp --tcp-flags RST RST -j ACCEPT",
				"-p ipv6-icmp -m icmp6 --icmpv6-type 1 -j ACCEPT",
				"-j DROP",
			}},
			{"filter", p + endForward, forwardRules(inst, refuse)},
			{"filter", p + endCredd, creddRules(calls, netip.Addr.Is6, refuse)},
		},
	}
}

func filterJumps(inst instance.Instance) []jump {
	p, link := inst.ChainPrefix(), inst.LinkPrefix()+"+"
	return []jump{
		{"filter", "INPUT", "-i " + link + " -j " + p + endIn},
		{"filter", "OUTPUT", "-o " + link + " -j " + p + endOut},
		{"filter", "OUTPUT", fmt.Sprintf("-m owner --uid-owner %d -j %s", inst.UID(instance.Credd), p+endCredd)},
		{"filter", "FORWARD", "-i " + link + " -j " + p + endForward},
		{"filter", "FORWARD", "-o " + link + " -j " + p + endForward},
	}
}

// natRules sends DNS to the filter, the explicit proxy's port to itself, other TCP to the transparent port.
// DNAT to the fixed gateway, not REDIRECT, which would pick whichever address the link has. ACCEPT ends the
// table, so that no other tool's rule can send the packet elsewhere. Everything else goes to the gateway too,
// where the input chain refuses it: so a kid is told at once, also where the box forwards nothing.
func natRules(inst instance.Instance) []string {
	gw := inst.Gateway().String()
	return []string{
		fmt.Sprintf("-p udp -m udp --dport 53 -j DNAT --to-destination %s:%d", gw, instance.PortDNS),
		fmt.Sprintf("-p tcp -m tcp --dport 53 -j DNAT --to-destination %s:%d", gw, instance.PortDNS),
		fmt.Sprintf("-d %s/32 -p tcp -m tcp --dport %d -j ACCEPT", gw, instance.PortExplicit),
		fmt.Sprintf("-p tcp -j DNAT --to-destination %s:%d", gw, instance.PortTransparent),
		"-j DNAT --to-destination " + gw,
	}
}

func inRules(inst instance.Instance) []string {
	var out []string
	for _, p := range gatewayPorts() {
		out = append(out, fmt.Sprintf("-s %s -d %s/32 -p %s -m %s --dport %d -j ACCEPT",
			inst.KidNet().Masked(), inst.Gateway(), p.proto, p.proto, p.port))
	}
	return append(out, refuse4()...)
}

// gatewayRules refuses packets to the gateway that did not come from a kid's link. The refusal of one that
// the box itself sent travels to the gateway's own address, so it has to pass.
func gatewayRules() []string {
	return append([]string{
		"-i lo -p tcp -m tcp --tcp-flags RST RST -j ACCEPT",
		"-i lo -p icmp -m icmp --icmp-type 3 -j ACCEPT",
	}, refuse4()...)
}

// outRules lets the gateway's ports answer, and lets a refusal through: the kernel's own resets and
// unreachables pass the output chain like any packet.
func outRules(inst instance.Instance) []string {
	var out []string
	for _, p := range gatewayPorts() {
		out = append(out, fmt.Sprintf("-s %s/32 -p %s -m %s --sport %d -j ACCEPT", inst.Gateway(), p.proto, p.proto, p.port))
	}
	return append(out,
		"-p tcp -m tcp --tcp-flags RST RST -j ACCEPT",
		"-p icmp -m icmp --icmp-type 3 -j ACCEPT",
		"-j DROP")
}

// forwardRules refuses what a kid sends and drops what others send to a kid.
func forwardRules(inst instance.Instance, refuse []string) []string {
	var out []string
	for _, r := range refuse {
		out = append(out, "-i "+inst.LinkPrefix()+"+ "+r)
	}
	return append(out, "-j DROP")
}

func refuse4() []string {
	return []string{"-p tcp -j REJECT --reject-with tcp-reset", "-j REJECT --reject-with icmp-admin-prohibited"}
}

type port struct {
	proto string
	port  int
}

func gatewayPorts() []port {
	return []port{
		{"udp", instance.PortDNS}, {"tcp", instance.PortDNS},
		{"tcp", instance.PortExplicit}, {"tcp", instance.PortTransparent},
	}
}
