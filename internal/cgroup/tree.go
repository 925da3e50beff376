package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// wanted are the controllers that a kid's limits need.
var wanted = []string{"pids", "memory", "cpu"}

// Create makes the cgroup rel and its parents in the v2 hierarchy; one that is there already is left as it
// is. On a pure v2 machine it also hands the pids, memory and cpu controllers down to rel. The caller owns the
// directory and removes it with Remove.
func (l Layout) Create(rel string) error {
	dir := l.v2
	for _, part := range strings.Split(strings.Trim(filepath.Clean("/"+rel), "/"), "/") {
		if !l.Hybrid() {
			if err := delegate(dir); err != nil {
				return fmt.Errorf("creating cgroup %s: %w", rel, err)
			}
		}
		dir = filepath.Join(dir, part)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) { // cgroupfs: world-readable as all of it
			return fmt.Errorf("creating cgroup %s: %w", rel, err)
		}
	}
	return nil
}

// delegate switches the wanted controllers on for the children of dir.
func delegate(dir string) error {
	file := filepath.Join(dir, "cgroup.subtree_control")
	on, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("reading which controllers are on: %w", err)
	}
	have := strings.Fields(string(on))
	for _, c := range wanted {
		if slices.Contains(have, c) {
			continue
		}
		// One at a time: the kernel takes all of a line or nothing of it.
		if err := write(file, "+"+c); err != nil {
			return fmt.Errorf("enabling %s below %s: is the controller there (cgroup.controllers) and is no process in that cgroup? %w", c, dir, err)
		}
	}
	return nil
}

// SetWeight sets how much of the processors the cgroup rel gets beside its siblings when there is not enough for
// all (cpu.weight: 1 to 10000, 100 by default). On a hybrid machine it does nothing: the v2 hierarchy has no
// controllers there, and the daemons are in the v1 root.
func (l Layout) SetWeight(rel string, weight int) error {
	if l.Hybrid() {
		return nil
	}
	if err := write(filepath.Join(l.V2(rel), "cpu.weight"), strconv.Itoa(weight)); err != nil {
		return fmt.Errorf("setting the processor weight of cgroup %s: %w", rel, err)
	}
	return nil
}

// removeRetry is the pause between attempts to remove a cgroup that is still busy: a killed process leaves its
// cgroup a little after cgroup.events says that the cgroup is empty.
const removeRetry = 2 * time.Millisecond

// Remove removes the cgroup rel with all below it, in every hierarchy. It kills nothing: where processes
// remain it tries again until ctx ends and then says which directory is busy. Removing what is not there is
// not an error. The hierarchies' roots are never removed.
func (l Layout) Remove(ctx context.Context, rel string) error {
	clean := filepath.Clean("/" + rel)
	if clean == "/" {
		return fmt.Errorf("removing cgroup %q: this is the root", rel)
	}
	var errs []error
	for _, h := range l.hierarchies() {
		if err := removeTree(ctx, filepath.Join(h, clean)); err != nil {
			errs = append(errs, fmt.Errorf("removing cgroup: %w", err))
		}
	}
	return errors.Join(errs...)
}

func removeTree(ctx context.Context, dir string) error {
	for {
		err := removeOnce(dir)
		if err == nil || !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOTEMPTY) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: kill its processes first (%w)", err, ctx.Err())
		case <-time.After(removeRetry):
		}
	}
}

// removeOnce removes children before their parent.
func removeOnce(dir string) error {
	entries, err := os.ReadDir(dir)
	if gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if err := removeOnce(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	// rmdir, never RemoveAll: the files of a cgroup cannot be unlinked, they go with the directory.
	if err := unix.Rmdir(dir); err != nil && !gone(err) {
		return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
	}
	return nil
}

// gone says whether err means that the cgroup does not exist any more: ENODEV is what an open cgroup file
// answers after its directory was removed.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}
