package runtime

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
)

// execGroup is one command's own cgroup: a directory below the container's in every hierarchy that runc put
// the container into, because that is what `runc exec --cgroup` joins.
type execGroup struct {
	dirs    []string
	unified string // the one in the v2 hierarchy, which has cgroup.kill
}

// newExecGroup makes the cgroup called name for the container whose runc state lies in stateDir.
func newExecGroup(stateDir, name string) (execGroup, error) {
	paths, err := cgroupPaths(stateDir)
	if err != nil {
		return execGroup{}, err
	}
	var g execGroup
	for controller, parent := range paths {
		dir := filepath.Join(parent, name)
		if err := makeGroup(controller, parent, dir); err != nil {
			g.remove() // already failing
			return execGroup{}, fmt.Errorf("making the command's cgroup: %w", err)
		}
		g.dirs = append(g.dirs, dir)
		if controller == "" {
			g.unified = dir
		}
	}
	if g.unified == "" {
		g.remove() // already failing
		return execGroup{}, errNotUnified
	}
	return g, nil
}

var errNotUnified = errors.New("making a command's cgroup: runc joined no cgroup v2 hierarchy: mount one at /sys/fs/cgroup or /sys/fs/cgroup/unified")

// cgroupPaths returns the directories of the container whose runc state lies in stateDir, by controller; "" is the v2
// hierarchy.
func cgroupPaths(stateDir string) (map[string]string, error) {
	noted, err := readState(stateDir)
	return noted.CgroupPaths, err
}

// noted is what runc wrote down of a container.
type noted struct {
	CgroupPaths map[string]string `json:"cgroup_paths"`
	PID         int               `json:"init_process_pid"`
	Start       uint64            `json:"init_process_start"` // see startOf
}

func readState(stateDir string) (n noted, err error) {
	raw, err := os.ReadFile(filepath.Join(stateDir, "state.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return n, ErrNotFound
	}
	if err != nil {
		return n, fmt.Errorf("reading runc's state: %w", err)
	}
	if err := json.Unmarshal(raw, &n); err != nil {
		return n, fmt.Errorf("reading runc's state: %w", err)
	}
	return n, nil
}

// unifiedDir returns the one in the v2 hierarchy.
func unifiedDir(stateDir string) (string, error) {
	paths, err := cgroupPaths(stateDir)
	if err == nil && paths[""] == "" {
		err = errNotUnified
	}
	return paths[""], err
}

// newUnitGroup makes the cgroup called name below dir, in the v2 hierarchy alone: whoever is moved into it stays where
// it is in every other, below the container's limits.
func newUnitGroup(dir, name string) (execGroup, error) {
	unified := filepath.Join(dir, name)
	if err := makeGroup("", dir, unified); err != nil {
		return execGroup{}, fmt.Errorf("making the command's cgroup: %w", err)
	}
	return execGroup{dirs: []string{unified}, unified: unified}, nil
}

// makeGroup makes one directory. killswitchd, which is not root, lists what is still alive in it, so everybody
// may pass through, as through all of cgroupfs, whatever this process's umask is. A v1 cpuset starts without
// processors and admits nobody until it has some (cpusets(7)); a v1 blkio group is not held to its parent's rates
// (admin-guide/cgroup-v1/blkio-controller.rst).
func makeGroup(controller, parent, dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	switch controller {
	case "cpuset":
		return inherit(parent, dir, "cpuset.cpus", "cpuset.mems")
	case "blkio":
		return inherit(parent, dir, "blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device",
			"blkio.throttle.read_iops_device", "blkio.throttle.write_iops_device")
	}
	return nil
}

// inherit copies what the parent's files say, line by line, as cgroupfs wants it.
func inherit(parent, dir string, files ...string) error {
	for _, file := range files {
		values, err := os.ReadFile(filepath.Join(parent, file))
		for line := range bytes.Lines(values) {
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, file), line, 0o644) // cgroupfs
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// kill kills everything in the group; a group that is gone had nothing in it.
func (g execGroup) kill() error {
	err := cgroup.Kill(g.unified)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("killing a command: %w", err)
	}
	return nil
}

// remove removes the directories; the first that is still in use ends it.
func (g execGroup) remove() error {
	for _, dir := range g.dirs {
		if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("removing a command's cgroup: %w", err)
		}
	}
	return nil
}
