package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
)

// Config says what Install installs where. All paths are absolute; the cgroup directories must exist.
type Config struct {
	PinDir        string       // on a mounted BPF filesystem; made by Install
	KidsCgroup    string       // parent of every kid's cgroup, in the v2 hierarchy
	DaemonCgroups []string     // the cgroups of proxy and dnsfilter, in the v2 hierarchy
	KidLevel      int          // ancestor level of a kid's own cgroup, the root being 0
	Gateway       netip.Addr   // IPv4, inside KidNet
	KidNet        netip.Prefix // IPv4
	Virtual       netip.Prefix // IPv4
	BoxMark       uint32       // SO_MARK of the daemons' own traffic, not 0
	GID           int          // may read the pinned maps, except the events
	KillUID       int          // may write sessions, stops, leases and the global flag
}

func (c Config) check() error {
	switch {
	case !filepath.IsAbs(c.PinDir) || !filepath.IsAbs(c.KidsCgroup):
		return errors.New("PinDir and KidsCgroup must be absolute paths")
	case c.KidLevel < 1:
		return fmt.Errorf("kid cgroup level %d: a kid's cgroup lies below the root", c.KidLevel)
	case !c.KidNet.Addr().Is4() || !c.Virtual.Addr().Is4() || !c.KidNet.Contains(c.Gateway):
		return fmt.Errorf("gateway %v, kid net %v, virtual net %v: all must be IPv4, the gateway inside the kid net", c.Gateway, c.KidNet, c.Virtual)
	case c.BoxMark == 0:
		return errors.New("the box mark must not be 0")
	}
	return nil
}

// defaultBudget is how many events a session may emit in about a second: enough for every attempt of an honest
// mistake, too few for one kid to fill the ring for the others.
const defaultBudget = 128

// constants are the values that the verifier sees as constants in the programs.
type constants struct {
	gateway, kidNet, virtual netip.Prefix
	boxMark, kidLevel        uint32
	budget                   uint32
}

func (c Config) constants() constants {
	return constants{
		gateway: netip.PrefixFrom(c.Gateway, 32), kidNet: c.KidNet.Masked(), virtual: c.Virtual.Masked(),
		boxMark: c.BoxMark, kidLevel: uint32(c.KidLevel), budget: defaultBudget, // checked positive
	}
}

func (c constants) set(spec *ebpf.CollectionSpec) error {
	current := uint8(0)
	if haveCurrent() == nil {
		current = 1
	}
	for name, value := range map[string]any{
		tagoutVarGateway: hostOrder(c.gateway.Addr()),
		tagoutVarKidNet:  hostOrder(c.kidNet.Addr()), tagoutVarKidMask: mask(c.kidNet),
		tagoutVarVirtualNet: hostOrder(c.virtual.Addr()), tagoutVarVirtualMask: mask(c.virtual),
		tagoutVarBoxMark: c.boxMark, tagoutVarKidLevel: c.kidLevel,
		tagoutVarEventBudget: c.budget, tagoutVarHaveCurrent: current,
	} {
		v, ok := spec.Variables[name]
		if !ok {
			return fmt.Errorf("setting %s: the BPF object has no such constant", name)
		}
		if err := v.Set(value); err != nil {
			return fmt.Errorf("setting %s: %w", name, err)
		}
	}
	return nil
}

func hostOrder(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

func mask(p netip.Prefix) uint32 { return ^uint32(0) << (32 - p.Bits()) } // 0 to 32

// wire returns the address as the programs hold it: four bytes in network order.
func wire(a netip.Addr) uint32 {
	b := a.As4()
	return binary.NativeEndian.Uint32(b[:])
}

// haveCurrent says whether cgroup programs may ask who is calling (Linux 6.1). Without it events name no
// process; verdicts are the same.
func haveCurrent() error {
	for _, pt := range []ebpf.ProgramType{ebpf.CGroupSockAddr, ebpf.CGroupSock} {
		for _, fn := range []asm.BuiltinFunc{asm.FnGetCurrentPidTgid, asm.FnGetCurrentUidGid, asm.FnGetCurrentComm} {
			if err := features.HaveProgramHelper(pt, fn); err != nil {
				return fmt.Errorf("%v in %v programs: %w", fn, pt, err)
			}
		}
	}
	return nil
}
