package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// hook is where one program belongs. The program's name is how an attached program is recognised as ours.
type hook struct {
	program string
	attach  ebpf.AttachType
}

var (
	kidHooks = []hook{
		{tagoutProgTagoutConnect4, ebpf.AttachCGroupInet4Connect},
		{tagoutProgTagoutConnect6, ebpf.AttachCGroupInet6Connect},
		{tagoutProgTagoutSendmsg4, ebpf.AttachCGroupUDP4Sendmsg},
		{tagoutProgTagoutSendmsg6, ebpf.AttachCGroupUDP6Sendmsg},
		{tagoutProgTagoutSocket, ebpf.AttachCGroupInetSockCreate},
		{tagoutProgTagoutBind4, ebpf.AttachCGroupInet4Bind},
		{tagoutProgTagoutBind6, ebpf.AttachCGroupInet6Bind},
		{tagoutProgTagoutKidUp, ebpf.AttachCGroupInetEgress},
		{tagoutProgTagoutKidDown, ebpf.AttachCGroupInetIngress},
	}
	daemonHooks = []hook{
		{tagoutProgTagoutDmnUp, ebpf.AttachCGroupInetEgress},
		{tagoutProgTagoutDmnDown, ebpf.AttachCGroupInetIngress},
	}
	linkHooks = []hook{
		{tagoutProgTagoutLinkUp, ebpf.AttachTCXIngress},
		{tagoutProgTagoutLinkDn, ebpf.AttachTCXEgress},
	}
)

func attachAll(coll *ebpf.Collection, cfg Config) error {
	for _, h := range kidHooks {
		if err := attachCgroup(cfg.KidsCgroup, h, coll.Programs[h.program]); err != nil {
			return err
		}
	}
	for _, dir := range cfg.DaemonCgroups {
		for _, h := range daemonHooks {
			if err := attachCgroup(dir, h, coll.Programs[h.program]); err != nil {
				return err
			}
		}
	}
	return nil
}

func attachCgroup(dir string, h hook, prog *ebpf.Program) error {
	f, err := os.Open(dir) // the caller's cgroup
	if err != nil {
		return fmt.Errorf("attaching %s: %w", h.program, err)
	}
	defer f.Close() // only a descriptor
	if err := h.exchange(int(f.Fd()), prog, unix.BPF_F_ALLOW_MULTI); err != nil {
		return fmt.Errorf("attaching %s to %s: %w", h.program, dir, err)
	}
	return nil
}

// exchange attaches prog to target (a cgroup descriptor or an ifindex) in place of older programs of ours. The
// first is replaced in one step, further ones go after that, so there is no moment without a program.
func (h hook) exchange(target int, prog *ebpf.Program, flags uint32) error {
	old, err := h.attached(target)
	if err != nil {
		return err
	}
	defer closePrograms(old)
	id, err := programID(prog)
	if err != nil {
		return err
	}
	there := false
	for _, p := range old {
		if pid, err := programID(p); err == nil && pid == id {
			there = true
		}
	}
	opts := link.RawAttachProgramOptions{Target: target, Program: prog, Attach: h.attach, Flags: flags}
	if !there {
		if len(old) > 0 {
			opts.Anchor = link.ReplaceProgram(old[0])
			old = old[1:]
		}
		if err := link.RawAttachProgram(opts); err != nil {
			return err
		}
	}
	return h.detachOthers(target, old, id)
}

func (h hook) detachOthers(target int, old []*ebpf.Program, keep ebpf.ProgramID) error {
	for _, p := range old {
		if id, err := programID(p); err == nil && id == keep {
			continue
		}
		opts := link.RawDetachProgramOptions{Target: target, Program: p, Attach: h.attach}
		if err := link.RawDetachProgram(opts); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("detaching an older %s: %w", h.program, err)
		}
	}
	return nil
}

// detach takes every program of ours off target.
func (h hook) detach(target int) error {
	old, err := h.attached(target)
	if err != nil {
		return err
	}
	defer closePrograms(old)
	return h.detachOthers(target, old, 0)
}

// attached returns the programs of ours at target; the caller closes them.
func (h hook) attached(target int) ([]*ebpf.Program, error) {
	res, err := link.QueryPrograms(link.QueryOptions{Target: target, Attach: h.attach})
	if err != nil {
		return nil, fmt.Errorf("asking what is attached: %w", err)
	}
	var out []*ebpf.Program
	for _, a := range res.Programs {
		p, err := ebpf.NewProgramFromID(a.ID)
		if errors.Is(err, fs.ErrNotExist) {
			continue // detached in between
		}
		if err != nil {
			closePrograms(out)
			return nil, fmt.Errorf("opening attached program %d: %w", a.ID, err)
		}
		if info, err := p.Info(); err == nil && info.Name == h.program {
			out = append(out, p)
			continue
		}
		p.Close() // only a descriptor
	}
	return out, nil
}

func programID(p *ebpf.Program) (ebpf.ProgramID, error) {
	info, err := p.Info()
	if err != nil {
		return 0, fmt.Errorf("reading a program's id: %w", err)
	}
	id, ok := info.ID()
	if !ok {
		return 0, errors.New("reading a program's id: the kernel gives none")
	}
	return id, nil
}

func closePrograms(ps []*ebpf.Program) {
	for _, p := range ps {
		p.Close() // only a descriptor
	}
}

// reattachLinks puts new programs on every link that carries a kid.
func reattachLinks(coll *ebpf.Collection) error {
	for _, ifindex := range kidLinks(coll.Maps[tagoutMapKidLinks]) {
		err := attachLink(ifindex, coll.Programs[tagoutProgTagoutLinkUp], coll.Programs[tagoutProgTagoutLinkDn])
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	return nil
}

func kidLinks(m *ebpf.Map) []int {
	var out []int
	var ifindex, mark uint32
	for it := m.Iterate(); it.Next(&ifindex, &mark); {
		out = append(out, int(ifindex))
	}
	return out
}

func attachLink(ifindex int, up, down *ebpf.Program) error {
	tcx, err := haveTCX()
	if err != nil {
		return err
	}
	if !tcx {
		return attachClsact(ifindex, up, down)
	}
	for i, prog := range []*ebpf.Program{up, down} {
		if err := linkHooks[i].exchange(ifindex, prog, 0); err != nil {
			return fmt.Errorf("attaching %s to link %d: %w", linkHooks[i].program, ifindex, err)
		}
	}
	return nil
}

// findMaps returns the maps that are in use: those of our attached programs, else those in pinDir. What cannot
// be read is left out. The caller closes them.
func findMaps(pinDir string, cgroups []string) map[string]*ebpf.Map {
	found := map[string]*ebpf.Map{}
	spec, err := loadTagout()
	if err != nil {
		return found
	}
	keep := func(name string, m *ebpf.Map, err error) {
		if err != nil {
			return
		}
		if spec.Maps[name] == nil || !isOurMap(name) || found[name] != nil {
			m.Close() // only a descriptor
			return
		}
		found[name] = m
	}
	for _, dir := range cgroups {
		for _, id := range attachedMaps(dir) {
			if m, err := ebpf.NewMapFromID(id); err == nil {
				keep(mapName(m), m, nil)
			}
		}
	}
	for name := range spec.Maps {
		m, err := ebpf.LoadPinnedMap(filepath.Join(pinDir, name), nil)
		keep(name, m, err)
	}
	return found
}

func mapName(m *ebpf.Map) string {
	info, err := m.Info()
	if err != nil {
		return ""
	}
	return info.Name
}

// attachedMaps returns the ids of the maps that our programs at the cgroup use.
func attachedMaps(dir string) []ebpf.MapID {
	f, err := os.Open(dir) // the caller's cgroup
	if err != nil {
		return nil
	}
	defer f.Close() // only a descriptor
	var out []ebpf.MapID
	for _, h := range append(append([]hook{}, kidHooks...), daemonHooks...) {
		progs, err := h.attached(int(f.Fd()))
		if err != nil {
			continue
		}
		for _, p := range progs {
			if info, err := p.Info(); err == nil {
				ids, _ := info.MapIDs()
				out = append(out, ids...)
			}
		}
		closePrograms(progs)
	}
	return out
}
