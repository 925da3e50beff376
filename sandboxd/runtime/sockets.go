package runtime

import (
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// whole are the address families of which a kid may open every socket. Netlink is needed to list interfaces;
// without capabilities it changes nothing.
var whole = []uint64{unix.AF_UNIX, unix.AF_NETLINK}

// internet are the families of which it may open TCP and UDP sockets alone.
var internet = []uint64{unix.AF_INET, unix.AF_INET6}

// transports are the types of internet sockets, each with the protocol that it stands for.
var transports = map[uint64]uint64{unix.SOCK_STREAM: unix.IPPROTO_TCP, unix.SOCK_DGRAM: unix.IPPROTO_UDP}

const kindMask = 0xf // SOCK_TYPE_MASK: what is above are flags

// pairs are the types of local sockets that a kid on the machine's network may pair. A pair of theirs stays one: a
// datagram socket could be connected again, to an abstract address of the machine's.
var pairs = []uint64{unix.SOCK_STREAM, unix.SOCK_SEQPACKET}

// hostRules are socketRules for a kid on the machine's network. Abstract addresses of local sockets and everything that
// netlink tells and does belong to the network namespace (unix(7), network_namespaces(7)), which is the machine's: so
// there are no local sockets but pairs, of netlink only what lists interfaces and routes, and of the internet only TCP.
func hostRules() []specs.LinuxSyscall {
	rules := []specs.LinuxSyscall{callRule("socket", specs.ActAllow, equal(0, unix.AF_NETLINK), equal(2, unix.NETLINK_ROUTE))}
	for _, kind := range pairs {
		rules = append(rules, callRule("socketpair", specs.ActAllow, equal(0, unix.AF_UNIX), ofKind(kind)))
	}
	for _, family := range internet {
		for _, p := range []uint64{0, unix.IPPROTO_TCP} {
			rules = append(rules, callRule("socket", specs.ActAllow, equal(0, family), ofKind(unix.SOCK_STREAM), equal(2, p)))
		}
	}
	return rules
}

// hostRefusals are the counterpart of hostRules: they ask about what those leave out of what socketRules lets through.
func hostRefusals() []specs.LinuxSyscall {
	rules := []specs.LinuxSyscall{
		callRule("socket", specs.ActNotify, equal(0, unix.AF_UNIX)),
		callRule("socket", specs.ActNotify, equal(0, unix.AF_NETLINK), above(2, unix.NETLINK_ROUTE)),
	}
	for kind := uint64(0); kind <= kindMask; kind++ {
		if !slices.Contains(pairs, kind) {
			rules = append(rules, callRule("socketpair", specs.ActNotify, equal(0, unix.AF_UNIX), ofKind(kind)))
		}
	}
	for _, family := range internet {
		for _, p := range []uint64{0, unix.IPPROTO_UDP} {
			rules = append(rules, callRule("socket", specs.ActNotify, equal(0, family), ofKind(unix.SOCK_DGRAM), equal(2, p)))
		}
	}
	return rules
}

// socketRules lets through socket(2) of whole and internet, and socketpair(2) of the one family that has pairs:
// it makes both sockets, of any family, before it finds out whether the family can pair them.
func socketRules() []specs.LinuxSyscall {
	rules := []specs.LinuxSyscall{callRule("socketpair", specs.ActAllow, equal(0, unix.AF_UNIX))}
	for _, family := range whole {
		rules = append(rules, callRule("socket", specs.ActAllow, equal(0, family)))
	}
	for _, family := range internet {
		for kind, proto := range transports {
			for _, p := range []uint64{0, proto} {
				rules = append(rules, callRule("socket", specs.ActAllow, equal(0, family), ofKind(kind), equal(2, p)))
			}
		}
	}
	return rules
}

// refusedRules are the counterpart of socketRules: they ask about every call that those do not let through. A rule
// compares each argument once at most, and rules that overlap have no order (seccomp_rule_add(3)), so they are
// many and leave socketRules' calls out.
func refusedRules() []specs.LinuxSyscall {
	const last = unix.AF_NETLINK // of the families that any rule lets through
	rules := []specs.LinuxSyscall{
		callRule("socketpair", specs.ActNotify, equal(0, unix.AF_UNSPEC)), callRule("socketpair", specs.ActNotify, above(0, unix.AF_UNIX)),
		callRule("socket", specs.ActNotify, above(0, last)),
	}
	for family := uint64(0); family <= last; family++ {
		switch family {
		case unix.AF_UNIX, unix.AF_NETLINK:
		case unix.AF_INET, unix.AF_INET6:
			rules = append(rules, refusedKinds(family)...)
		default:
			rules = append(rules, callRule("socket", specs.ActNotify, equal(0, family)))
		}
	}
	return rules
}

// refusedKinds are the rules for one of the internet's families.
func refusedKinds(family uint64) []specs.LinuxSyscall {
	var rules []specs.LinuxSyscall
	for kind := uint64(0); kind <= kindMask; kind++ {
		proto, ok := transports[kind]
		if !ok {
			rules = append(rules, callRule("socket", specs.ActNotify, equal(0, family), ofKind(kind)))
			continue
		}
		for _, other := range otherThan(proto) {
			rules = append(rules, callRule("socket", specs.ActNotify, equal(0, family), ofKind(kind), other))
		}
	}
	return rules
}

// otherThan covers every protocol but 0 and proto.
func otherThan(proto uint64) []specs.LinuxSeccompArg {
	out := []specs.LinuxSeccompArg{above(2, proto)}
	for other := uint64(1); other < proto; other++ {
		out = append(out, equal(2, other))
	}
	return out
}

func callRule(call string, action specs.LinuxSeccompAction, args ...specs.LinuxSeccompArg) specs.LinuxSyscall {
	return specs.LinuxSyscall{Names: []string{call}, Action: action, Args: args}
}

func equal(index uint, value uint64) specs.LinuxSeccompArg {
	return specs.LinuxSeccompArg{Index: index, Value: value, Op: specs.OpEqualTo}
}

func above(index uint, value uint64) specs.LinuxSeccompArg {
	return specs.LinuxSeccompArg{Index: index, Value: value, Op: specs.OpGreaterThan}
}

// ofKind compares the second argument without its flags.
func ofKind(kind uint64) specs.LinuxSeccompArg {
	return specs.LinuxSeccompArg{Index: 1, Value: kindMask, ValueTwo: kind, Op: specs.OpMaskedEqual}
}
