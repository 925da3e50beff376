package box

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/netfw"
	"tagout/internal/supervise"
	"tagout/internal/vaultseal"
)

// killWait bounds how long killed processes may take to be gone.
const killWait = 20 * time.Second

// found is what is known of an instance that is to be removed.
type found struct {
	Boxes
	inst    instance.Instance
	slotted bool // the slot is known: names made from it are ours
	layout  cgroup.Layout
}

// Cleanup kills every process of the instance and removes everything that it made, also what a killed daemon
// left half-made. With purge, its state (audit log, tags, vault, CA, configuration) goes too. It goes on past
// errors and returns all of them; the slot is given back only when nothing is left. Cleaning up what was
// never set up is not an error.
func (b Boxes) Cleanup(ctx context.Context, name string, purge bool) error {
	f, err := b.find(name)
	if err != nil {
		return err
	}
	if uid := os.Geteuid(); uid != 0 {
		return fmt.Errorf("cleaning up instance %s needs root, this is uid %d: run it with sudo", name, uid)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*killWait)
	defer cancel()
	// Before the lock: a supervisor that ends may have a cleanup of its own to do.
	if err := supervise.Stop(ctx, f.inst); err != nil {
		return fmt.Errorf("cleaning up instance %s: stopping its supervisor: %w", name, err)
	}
	unlock, err := instance.Lock(ctx, name)
	if err != nil {
		return fmt.Errorf("cleaning up instance %s: %w", name, err)
	}
	defer unlock()
	if f, err = b.find(name); err != nil { // it may have come or gone meanwhile
		return err
	}
	errs := []error{}
	for _, s := range f.teardown(purge) {
		err := s.do(ctx)
		if err == nil {
			continue
		}
		errs = append(errs, fmt.Errorf("cleaning up instance %s: %s: %w", name, s.name, err))
		if s.barrier {
			return errors.Join(errs...)
		}
	}
	left, err := f.leftovers(purge)
	if err != nil {
		errs = append(errs, err)
	}
	for _, l := range left {
		errs = append(errs, fmt.Errorf("cleaning up instance %s: still there: %s", name, l))
	}
	if len(errs) > 0 || !f.slotted {
		return errors.Join(errs...)
	}
	return f.inst.Release()
}

// find opens the instance, by its slot file or else by its gateway link. Where neither is there, only what is
// named after the instance's name can be found.
func (b Boxes) find(name string) (found, error) {
	f := found{Boxes: b, slotted: true}
	inst, err := instance.Open(name)
	if errors.Is(err, instance.ErrUnknown) {
		slot, ok := slotByLink(name)
		f.slotted = ok
		inst, err = instance.New(name, slot)
	}
	if err != nil {
		return found{}, err
	}
	f.inst = inst
	f.layout, err = cgroup.Detect()
	return f, err
}

type teardownStep struct {
	name    string
	do      func(ctx context.Context) error
	barrier bool // where it fails, kids may live: the walls around them stay
}

// teardown lists the steps in the order in which nothing can come back: who would start processes again
// first, then processes, then what they used.
func (f found) teardown(purge bool) []teardownStep {
	kids, daemons := cgroupDirs(f.layout, f.inst)
	steps := []teardownStep{
		{name: "stopping its supervisor", barrier: true, do: func(ctx context.Context) error { return supervise.Stop(ctx, f.inst) }},
		{name: "killing its processes", barrier: true, do: f.killAll},
		{name: "unmounting", do: func(context.Context) error { return unmountBelow(f.inst.RunDir()) }},
	}
	if f.slotted {
		steps = append(steps, teardownStep{name: "removing links", do: func(context.Context) error { return f.removeLinks() }})
		for _, e := range f.Extras {
			steps = append(steps, teardownStep{name: "removing what else it made", do: func(context.Context) error { return e.Cleanup(f.inst) }})
		}
	}
	steps = append(steps,
		teardownStep{name: "removing the firewall", do: func(context.Context) error { return netfw.Remove(f.inst) }},
		teardownStep{name: "removing the BPF programs", do: func(context.Context) error { return f.BPF.Uninstall(f.inst, kids, daemons) }},
		teardownStep{name: "removing cgroups", do: func(ctx context.Context) error { return f.layout.Remove(ctx, f.inst.CgroupRel()) }},
		teardownStep{name: "removing " + f.inst.RunDir(), do: func(context.Context) error { return removeTree(f.inst.RunDir()) }},
	)
	if purge {
		steps = append(steps, teardownStep{name: "removing " + f.inst.StateDir(), do: func(context.Context) error { return removeTree(f.inst.StateDir()) }},
			teardownStep{name: "removing what opens its vault", do: func(context.Context) error { return f.removeCredential() }})
	}
	return steps
}

// removeCredential removes the key that systemd keeps for the instance's vault, which is gone by then.
func (f found) removeCredential() error {
	var errs []error
	for _, file := range vaultseal.Of(f.inst.Name()).Files() {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	os.Remove(vaultseal.Dir) // as far as nothing else is in it
	return errors.Join(errs...)
}

// killAll kills the daemons and the kids through their common cgroup, then what is outside of it: tasks that
// reached only a v1 hierarchy (a kid that was being made), and daemons that somebody started by hand.
func (f found) killAll(ctx context.Context) error {
	top := f.layout.V2(f.inst.CgroupRel())
	if err := cgroup.Kill(top); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// What is frozen does not die before it is thawed.
	if err := f.thaw(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, killWait)
	defer cancel()
	if err := end(ctx, f.strays()); err != nil {
		return err
	}
	return cgroup.WaitEmpty(ctx, top)
}

func (f found) thaw() error {
	for _, top := range []string{f.layout.V2(f.inst.CgroupRel()), f.layout.Freezer(f.inst.CgroupRel())} {
		if top == "" {
			continue
		}
		err := filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || !e.IsDir() {
				return err
			}
			if top == f.layout.V2(f.inst.CgroupRel()) {
				return cgroup.Thaw(path, "")
			}
			return cgroup.Thaw("", path)
		})
		if err != nil {
			return fmt.Errorf("thawing: %w", err)
		}
	}
	return nil
}

func (f found) removeLinks() error {
	names, err := links(f.inst)
	if err != nil {
		return err
	}
	var errs []error
	for _, n := range names {
		errs = append(errs, deleteLink(n))
	}
	return errors.Join(errs...)
}

// removeTree removes a directory with all that is in it. It refuses while anything is mounted below: through
// a kid's bind mount, it would remove the host's own files.
func removeTree(dir string) error {
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return fmt.Errorf("%s is still mounted: run `umount %s`", mounts[0], mounts[0])
	}
	return os.RemoveAll(dir)
}

// unmountBelow unmounts everything below dir, deepest first. Lazily: the processes that used it are dead or
// about to be, and a mount that hangs must not keep the rest.
func unmountBelow(dir string) error {
	for range 8 { // mounts can be stacked on one another
		mounts, err := mountsBelow(dir)
		if err != nil || len(mounts) == 0 {
			return err
		}
		for _, m := range mounts {
			if err := unix.Unmount(m, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("unmounting %s: %w", m, err)
			}
		}
	}
	return nil
}
