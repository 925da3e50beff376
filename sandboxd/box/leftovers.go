package box

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"tagout/internal/cgroup"
	"tagout/internal/netfw"
	"tagout/internal/vaultseal"
)

// Leftovers lists, in words for people, everything of the instance that is still there: processes,
// namespaces, mounts, links, firewall rules, BPF pins, cgroups, files. Empty proves a cleanup. The state
// directory, which a cleanup keeps unless told otherwise, counts only where state is true.
func (b Boxes) Leftovers(name string, state bool) ([]string, error) {
	f, err := b.find(name)
	if err != nil {
		return nil, err
	}
	return f.leftovers(state)
}

func (f found) leftovers(state bool) ([]string, error) {
	var out []string
	var errs []error
	for _, look := range []func() ([]string, error){
		f.leftProcesses, f.leftMounts, f.leftNetwork, f.leftCgroups, func() ([]string, error) { return f.leftFiles(state) },
	} {
		found, err := look()
		out = append(out, found...)
		if err != nil {
			errs = append(errs, fmt.Errorf("looking for leftovers of instance %s: %w", f.inst.Name(), err))
		}
	}
	return out, errors.Join(errs...)
}

func (f found) leftProcesses() ([]string, error) {
	var out []string
	pids, err := cgroup.Procs(f.layout.V2(f.inst.CgroupRel()))
	for _, pid := range pids {
		out = append(out, fmt.Sprintf("process %d in its cgroup: %s", pid, commandLine(pid)))
	}
	for _, p := range byCommand(f.inst.Name()) {
		out = append(out, fmt.Sprintf("process %d: %s", p.pid, p.text))
	}
	return out, err
}

// leftMounts includes the kids' network namespaces, which are pinned by mounts below the run directory.
func (f found) leftMounts() ([]string, error) {
	var out []string
	mounts, err := mountsBelow(f.inst.RunDir())
	for _, m := range mounts {
		kind := "mount"
		if filepath.Dir(m) == f.inst.NetNSDir() {
			kind = "network namespace"
		}
		out = append(out, kind+" "+m)
	}
	return out, err
}

func (f found) leftNetwork() ([]string, error) {
	out, err := netfw.Leftovers(f.inst)
	if !f.slotted {
		return out, err
	}
	names, linkErr := links(f.inst)
	for _, n := range names {
		out = append(out, "network link "+n)
	}
	for _, e := range f.Extras {
		out = append(out, e.Leftovers(f.inst)...)
	}
	return out, errors.Join(err, linkErr)
}

func (f found) leftCgroups() ([]string, error) {
	var out []string
	rel := f.inst.CgroupRel()
	dirs := []string{f.layout.V2(rel)}
	for _, c := range []string{"pids", "memory", "cpu", "cpuacct", "cpuset", "freezer", "devices", "blkio", "net_cls", "net_prio", "perf_event", "hugetlb", "rdma", "misc"} {
		if d := f.layout.V1(c, rel); d != "" {
			dirs = append(dirs, d)
		}
	}
	for _, d := range dirs {
		if exists(d) {
			out = append(out, "cgroup "+d)
		}
	}
	return out, nil
}

func (f found) leftFiles(state bool) ([]string, error) {
	var out []string
	if pins := f.inst.PinDir(); exists(pins) {
		out = append(out, "BPF pins "+pins)
	}
	if exists(f.inst.RunDir()) {
		out = append(out, "directory "+f.inst.RunDir())
	}
	if state && exists(f.inst.StateDir()) {
		out = append(out, "directory "+f.inst.StateDir())
	}
	for _, file := range vaultseal.Of(f.inst.Name()).Files() {
		if state && exists(file) {
			out = append(out, "file "+file)
		}
	}
	return out, nil
}

// exists errs on the side of there being something.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
