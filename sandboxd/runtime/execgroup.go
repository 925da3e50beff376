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
)

// execGroup is one command's own cgroup: a directory below the container's in every hierarchy that runc put
// the container into, because that is what `runc exec --cgroup` joins.
type execGroup struct {
	dirs    []string
	unified string // the one in the v2 hierarchy, which has cgroup.kill
}

// newExecGroup makes the cgroup called name for the container whose runc state lies in stateDir.
func newExecGroup(stateDir, name string) (execGroup, error) {
	raw, err := os.ReadFile(filepath.Join(stateDir, "state.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return execGroup{}, ErrNotFound
	}
	if err != nil {
		return execGroup{}, fmt.Errorf("reading runc's state: %w", err)
	}
	var state struct {
		CgroupPaths map[string]string `json:"cgroup_paths"` // controller -> directory; "" is the v2 hierarchy
	}
	if err := json.Unmarshal(raw, &state); err != nil {
		return execGroup{}, fmt.Errorf("reading runc's state: %w", err)
	}
	var g execGroup
	for controller, parent := range state.CgroupPaths {
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
		return execGroup{}, errors.New("making the command's cgroup: runc joined no cgroup v2 hierarchy: mount one at /sys/fs/cgroup or /sys/fs/cgroup/unified")
	}
	return g, nil
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
	err := os.WriteFile(filepath.Join(g.unified, "cgroup.kill"), []byte("1"), 0)
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
