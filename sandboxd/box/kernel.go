package box

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"tagout/internal/doctor"
	"tagout/internal/instance"
	"tagout/internal/netfw"
)

// makeCgroups makes the parents of the kids' and the daemons' cgroups. killswitchd is not root: it owns the
// switches that it must be able to pull.
func makeCgroups(_ context.Context, j *job) error {
	top := j.layout.V2(j.inst.CgroupRel())
	if _, err := os.Stat(top); errors.Is(err, fs.ErrNotExist) {
		j.undo = append(j.undo, func(ctx context.Context) error { return j.layout.Remove(ctx, j.inst.CgroupRel()) })
	}
	rels := []string{j.inst.KidsCgroupRel()}
	for _, d := range instance.Daemons() {
		rels = append(rels, j.inst.DaemonCgroupRel(d))
	}
	for _, rel := range rels {
		if err := j.layout.Create(rel); err != nil {
			return err
		}
	}
	if err := weigh(j); err != nil {
		return err
	}
	kids, credd := j.layout.V2(j.inst.KidsCgroupRel()), j.layout.V2(j.inst.DaemonCgroupRel(instance.Credd))
	for _, file := range []string{
		filepath.Join(kids, "cgroup.kill"), filepath.Join(kids, "cgroup.freeze"),
		filepath.Join(credd, "cgroup.kill"),
	} {
		if err := os.Chown(file, j.inst.UID(instance.Killswitchd), j.inst.GroupID()); err != nil {
			return fmt.Errorf("giving killswitchd its switch: %w", err)
		}
	}
	return nil
}

// mostWeight is the kernel's most.
const mostWeight = 10000

// weigh lets the daemons run before the kids, and the two that a stop waits for before the other daemons,
// however many processes the kids have.
func weigh(j *job) error {
	for _, rel := range []string{
		filepath.Dir(j.inst.DaemonCgroupRel(instance.Killswitchd)),
		j.inst.DaemonCgroupRel(instance.Killswitchd), j.inst.DaemonCgroupRel(instance.Credd),
	} {
		if err := j.layout.SetWeight(rel, mostWeight); err != nil {
			return err
		}
	}
	return nil
}

// mountBPF has no matching teardown: the BPF filesystem is the machine's.
func mountBPF(context.Context, *job) error {
	_, err := doctor.MountBPF(filepath.Dir(filepath.Dir(pinRoot)))
	return err
}

// pinRoot is any instance's pin directory; its grandparent is where the BPF filesystem is mounted.
const pinRoot = "/sys/fs/bpf/tagout/x"

func installBPF(_ context.Context, j *job) error {
	kids, daemons := cgroupDirs(j.layout, j.inst)
	if _, err := os.Stat(j.inst.PinDir()); errors.Is(err, fs.ErrNotExist) {
		j.undo = append(j.undo, func(context.Context) error { return j.BPF.Uninstall(j.inst, kids, daemons) })
	}
	return j.BPF.Install(j.inst, kids, daemons)
}

// cgroupDirs returns the directories to which BPF programs are attached: the kids' parent, and the two
// daemons that send on behalf of sessions.
func cgroupDirs(l interface{ V2(string) string }, i instance.Instance) (kids string, daemons []string) {
	return l.V2(i.KidsCgroupRel()), []string{
		l.V2(i.DaemonCgroupRel(instance.Proxy)), l.V2(i.DaemonCgroupRel(instance.DNSFilter)),
	}
}

func installFirewall(_ context.Context, j *job) error {
	left, err := netfw.Leftovers(j.inst)
	if err != nil {
		return err
	}
	if len(left) == 0 {
		j.undo = append(j.undo, func(context.Context) error { return netfw.Remove(j.inst) })
	}
	return netfw.Ensure(j.inst, j.calls...)
}
