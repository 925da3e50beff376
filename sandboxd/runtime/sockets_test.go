package runtime

import (
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// actions are those of the profile's rules that match a call: they overlap nowhere, so there is at most one.
func actions(t *testing.T, p *specs.LinuxSeccomp, call string, args [3]uint64) (out []specs.LinuxSeccompAction) {
	t.Helper()
	for _, rule := range p.Syscalls {
		if !slices.Contains(rule.Names, call) {
			continue
		}
		match, seen := true, map[uint]bool{}
		for _, a := range rule.Args {
			if seen[a.Index] {
				t.Fatalf("rule %+v compares an argument twice, which runc takes for two rules", rule)
			}
			seen[a.Index] = true
			v := args[a.Index]
			switch a.Op {
			case specs.OpEqualTo:
				match = match && v == a.Value
			case specs.OpGreaterThan:
				match = match && v > a.Value
			case specs.OpMaskedEqual:
				match = match && v&a.Value == a.ValueTwo
			default:
				t.Fatalf("rule %+v", rule)
			}
		}
		if match {
			out = append(out, rule.Action)
		}
	}
	return out
}

// allowed is the rule in words: local and netlink sockets of every kind, TCP and UDP.
func allowed(call string, family, kind, proto uint64) bool {
	if call == "socketpair" {
		return family == unix.AF_UNIX
	}
	switch family {
	case unix.AF_UNIX, unix.AF_NETLINK:
		return true
	case unix.AF_INET, unix.AF_INET6:
		return kind == unix.SOCK_STREAM && (proto == 0 || proto == unix.IPPROTO_TCP) || kind == unix.SOCK_DGRAM && (proto == 0 || proto == unix.IPPROTO_UDP)
	}
	return false
}

// allowedOnHost is the rule on the machine's network: pairs that stay pairs, netlink's interfaces and routes, TCP.
func allowedOnHost(call string, family, kind, proto uint64) bool {
	switch {
	case call == "socketpair":
		return family == unix.AF_UNIX && (kind == unix.SOCK_STREAM || kind == unix.SOCK_SEQPACKET)
	case family == unix.AF_NETLINK:
		return proto == unix.NETLINK_ROUTE
	}
	return family != unix.AF_UNIX && kind != unix.SOCK_DGRAM && allowed(call, family, kind, proto)
}

func TestSocketRulesLeaveNothingOut(t *testing.T) {
	t.Run("a network of its own", func(t *testing.T) { leavesNothingOut(t, false, allowed) })
	t.Run("the machine's network", func(t *testing.T) { leavesNothingOut(t, true, allowedOnHost) })
}

// leavesNothingOut: every call is either let through or asked about. Without a listener, nobody is
// asked, and the same calls are let through.
func leavesNothingOut(t *testing.T, onHost bool, allowed func(call string, family, kind, proto uint64) bool) {
	t.Helper()
	alone, err := seccompProfile(Refusals{}, false, onHost)
	if err != nil {
		t.Fatal(err)
	}
	told, err := seccompProfile(Refusals{Listener: "/run/s", Metadata: "7"}, false, onHost)
	if err != nil {
		t.Fatal(err)
	}
	if alone.ListenerPath != "" || told.ListenerPath != "/run/s" || told.ListenerMetadata != "7" {
		t.Errorf("listeners %q and %q %q", alone.ListenerPath, told.ListenerPath, told.ListenerMetadata)
	}
	families, protos := []uint64{1 << 31, 1 << 32, 1<<32 | unix.AF_INET, ^uint64(0)}, []uint64{256, unix.IPPROTO_MPTCP, 1<<31 | 6, 1 << 32, 1<<32 | 6, ^uint64(0)}
	for n := range uint64(64) {
		families, protos = append(families, n), append(protos, n)
	}
	for _, call := range []string{"socket", "socketpair"} {
		for _, family := range families {
			for kind := range uint64(16) {
				for _, proto := range protos {
					args := [3]uint64{family, kind | unix.SOCK_CLOEXEC, proto}
					want, wantAlone := []specs.LinuxSeccompAction{specs.ActNotify}, []specs.LinuxSeccompAction(nil)
					if allowed(call, family, kind, proto) {
						want = []specs.LinuxSeccompAction{specs.ActAllow}
						wantAlone = want
					}
					if got := actions(t, told, call, args); !slices.Equal(got, want) {
						t.Fatalf("%s %v: %v, want %v", call, args, got, want)
					}
					if got := actions(t, alone, call, args); !slices.Equal(got, wantAlone) {
						t.Fatalf("%s %v without a listener: %v, want %v", call, args, got, wantAlone)
					}
				}
			}
		}
	}
}
