package bpf

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Kernels before 6.6 have no tcx. There the programs of a kid's link are direct-action filters of a clsact
// qdisc: the same programs at the same two places with the same return codes (TCX_NEXT is TC_ACT_UNSPEC, TCX_DROP
// is TC_ACT_SHOT). The link holds qdisc and filters, so they too live as long as it does.

// A filter of ours is known by its place. It comes first, so that no other filter passes a packet before it is
// judged; priority and handle are the same for ever, because only that lets the kernel exchange a filter in one step.
const (
	filterPriority = 1
	filterHandle   = 0x7461676f // "tago"
)

// parents are the two places of a clsact qdisc, in the order of linkHooks.
var parents = []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS}

// noTCX makes tests take the way of older kernels.
var noTCX bool

var tcxOnce struct {
	sync.Mutex
	known, have bool
}

// haveTCX says whether links take tcx programs. Once the kernel has said yes or no, it is not asked again.
func haveTCX() (bool, error) {
	if noTCX {
		return false, nil
	}
	tcxOnce.Lock()
	defer tcxOnce.Unlock()
	if tcxOnce.known {
		return tcxOnce.have, nil
	}
	err := askTCX()
	no := errors.Is(err, unix.EINVAL) || errors.Is(err, unix.E2BIG) || errors.Is(err, ebpf.ErrNotSupported)
	if err != nil && !no {
		return false, err // not an answer, for example EPERM
	}
	tcxOnce.known, tcxOnce.have = true, err == nil
	return tcxOnce.have, nil
}

// askTCX asks for the programs on the loopback link, which every network namespace has.
func askTCX() error {
	if _, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress}); err != nil {
		return fmt.Errorf("asking for tcx programs: %w", err)
	}
	return nil
}

const loopback = 1 // its ifindex in every network namespace

// plainLinkPrograms takes the word tcx out of the programs, which an older kernel need not know.
func plainLinkPrograms(spec *ebpf.CollectionSpec) {
	for _, h := range linkHooks {
		spec.Programs[h.program].AttachType = ebpf.AttachNone
	}
}

func clsact(ifindex int) *netlink.GenericQdisc {
	return &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
		QdiscType:  "clsact",
	}
}

func filter(ifindex int, parent uint32, name string, fd int) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: parent, Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		},
		Fd: fd, Name: name, DirectAction: true,
	}
}

// attachClsact attaches up and down; where filters of ours are there already, the kernel exchanges them.
func attachClsact(ifindex int, up, down *ebpf.Program) error {
	if err := netlink.QdiscAdd(clsact(ifindex)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("adding a clsact qdisc to link %d: %w", ifindex, err)
	}
	for i, prog := range []*ebpf.Program{up, down} {
		name := linkHooks[i].program
		if err := netlink.FilterReplace(filter(ifindex, parents[i], name, prog.FD())); err != nil {
			return fmt.Errorf("attaching filter %s to link %d: %w", name, ifindex, err)
		}
	}
	return nil
}

// detachClsact takes our filters off the link, and the qdisc with the last of them unless others have filters there.
func detachClsact(ifindex int) error {
	ours, others := 0, 0
	for i, parent := range parents {
		all, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}, parent)
		if err != nil {
			return fmt.Errorf("asking for the filters of link %d: %w", ifindex, err)
		}
		for _, f := range all {
			if !isFilter(f, linkHooks[i].program) {
				others++
				continue
			}
			ours++
			if err := netlink.FilterDel(f); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("taking filter %s off link %d: %w", linkHooks[i].program, ifindex, err)
			}
		}
	}
	if ours == 0 || others > 0 {
		return nil
	}
	if err := netlink.QdiscDel(clsact(ifindex)); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("taking the clsact qdisc off link %d: %w", ifindex, err)
	}
	return nil
}

func isFilter(f netlink.Filter, name string) bool {
	b, ok := f.(*netlink.BpfFilter)
	return ok && b.Name == name
}

// tryClsact attaches programs and takes them off again, in a network namespace of its own.
func tryClsact() error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		return fmt.Errorf("loading a program to try clsact with: %w", err)
	}
	defer closePrograms([]*ebpf.Program{prog})
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and the namespace with it
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("making a network namespace: %w", err)
			return
		}
		if err := attachClsact(loopback, prog, prog); err != nil {
			done <- err
			return
		}
		done <- detachClsact(loopback)
	}()
	return <-done
}
