package bpf

import (
	"errors"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
)

// Feature is one thing that the kernel must have, or had better have.
type Feature struct {
	Name     string
	Since    string // the first Linux that has it
	Use      string // what Tagout does with it: what is lost without
	Optional bool   // Install works without
	Err      error  // nil where the kernel has it
}

// Probe asks the running kernel for everything that Install needs. It needs root; what cannot be asked counts
// as missing. Nothing stays loaded.
func Probe() []Feature {
	progType := func(t ebpf.ProgramType) error { return features.HaveProgramType(t) }
	helper := func(t ebpf.ProgramType, fn asm.BuiltinFunc) error { return features.HaveProgramHelper(t, fn) }
	return []Feature{
		{"bpf-cgroup-skb", "4.10", "drops packets of kids and of stopped sessions", false, progType(ebpf.CGroupSKB)},
		{"bpf-cgroup-sock-addr", "4.17", "refuses connect and sendto at once", false, progType(ebpf.CGroupSockAddr)},
		{"bpf-cgroup-sock", "4.10", "refuses raw sockets", false, progType(ebpf.CGroupSock)},
		{"bpf-sched-cls", "4.1", "checks packets on a kid's link", false, progType(ebpf.SchedCLS)},
		linkFeature(),
		{"bpf-ringbuf", "5.8", "tells of each denial", false, features.HaveMapType(ebpf.RingBuf)},
		{"bpf-lru-hash", "4.10", "names the process of a connection", false, features.HaveMapType(ebpf.LRUHash)},
		{"bpf-cgroup-id", "5.6", "tells kids apart", false, errors.Join(
			helper(ebpf.CGroupSockAddr, asm.FnGetCurrentAncestorCgroupId),
			helper(ebpf.CGroupSock, asm.FnGetCurrentAncestorCgroupId),
			helper(ebpf.CGroupSKB, asm.FnSkbAncestorCgroupId))},
		{"bpf-boot-time", "5.8", "ends leases", false, helper(ebpf.CGroupSKB, asm.FnKtimeGetBootNs)},
		{"bpf-socket-mark", "5.1", "stops a session's upstream traffic", false, helper(ebpf.CGroupSKB, asm.FnSkFullsock)},
		{"bpf-current-process", "6.1", "names the process behind a denial", true, haveCurrent()},
		{"bpf-kernel-types", "5.5", "records every program that a kid starts", true, haveKernelTypes()},
		{"bpf-programs", "6.1", "the programs themselves, through the kernel's verifier", false, haveAll()},
	}
}

// linkFeature is tcx or, where the kernel has none, clsact: either will do, and its use says which one it is.
func linkFeature() Feature {
	f := Feature{Name: "bpf-link", Since: "4.5", Use: "checks packets on a kid's link, by tcx"}
	tcx, err := haveTCX()
	if tcx {
		return f
	}
	if err == nil {
		err = errors.New("no tcx (Linux 6.6)")
	}
	f.Use = "checks packets on a kid's link, by clsact: this kernel has no tcx (Linux 6.6)"
	if other := tryClsact(); other != nil {
		f.Err = errors.Join(err, other)
	}
	return f
}

func haveAll() error {
	coll, err := load(constants{
		gateway: netip.MustParsePrefix("198.19.0.1/32"), kidNet: netip.MustParsePrefix("198.19.0.0/20"),
		virtual: netip.MustParsePrefix("198.18.0.0/20"), boxMark: 1, kidLevel: 1, budget: 1,
	}, nil)
	if err != nil {
		return err
	}
	coll.Close()
	return nil
}
