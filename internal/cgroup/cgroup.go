// Package cgroup finds and handles control groups on the two kinds of machine that Tagout runs on: pure
// cgroup v2, and hybrid, where v1 hierarchies hold the controllers and an empty v2 hierarchy lies beside them.
//
// On both, a kid is a directory of the v2 hierarchy: cgroup.kill, cgroup.events and the BPF programs live
// there. The v1 freezer matters on hybrid machines only: a task frozen by it does not die before it is
// thawed, whatever signal it got (kernel documentation, admin-guide/cgroup-v1/freezer-subsystem.rst).
//
// The package promises that what it reports as empty holds no process that can still run. It does not promise
// that zombies are reaped: they are not counted by cgroup.events (admin-guide/cgroup-v2.rst).
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Layout says where a machine's hierarchies are mounted. The zero value is of no use; see Detect.
type Layout struct {
	v2      string            // mount point of the v2 hierarchy
	freezer string            // mount point of the v1 freezer, "" where there is none
	v1      []string          // mount points of every v1 hierarchy, named ones included
	by      map[string]string // v1 controller -> its mount point
}

// Detect reads the layout of this machine from /proc/self/mountinfo (proc_pid_mountinfo(5)). It fails where
// no v2 hierarchy is mounted.
func Detect() (Layout, error) { return detect("/proc/self/mountinfo", "") }

// detect reads the mountinfo file at path; root is put before every mount point, so that tests can lay out a
// machine of their own.
func detect(path, root string) (Layout, error) {
	f, err := os.Open(path)
	if err != nil {
		return Layout{}, fmt.Errorf("finding cgroups: %w", err)
	}
	defer f.Close() // only read
	l, err := parse(f, root)
	if err != nil {
		return Layout{}, fmt.Errorf("finding cgroups: %w", err)
	}
	return l, nil
}

var errNoV2 = errors.New("no cgroup2 filesystem is mounted: run `mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified` (hybrid) or boot with systemd.unified_cgroup_hierarchy=1")

func parse(r io.Reader, root string) (Layout, error) {
	l := Layout{by: map[string]string{}}
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 1<<20) // overlay lines are long
	for sc.Scan() {
		m, ok := parseMount(sc.Text())
		if !ok {
			continue
		}
		point := filepath.Join(root, m.point)
		switch {
		case m.fs == "cgroup2" && l.v2 == "":
			l.v2 = point
		case m.fs == "cgroup":
			l.addV1(point, m.options)
		}
	}
	if err := sc.Err(); err != nil {
		return Layout{}, fmt.Errorf("reading mountinfo: %w", err)
	}
	if l.v2 == "" {
		return Layout{}, errNoV2
	}
	return l, nil
}

func (l *Layout) addV1(point string, options []string) {
	if slices.Contains(l.v1, point) {
		return
	}
	l.v1 = append(l.v1, point)
	for _, o := range options {
		if _, known := l.by[o]; !known && isController(o) {
			l.by[o] = point
		}
	}
	l.freezer = l.by["freezer"]
}

// isController tells a controller's name in a v1 mount's super options from the generic options.
func isController(o string) bool {
	switch o {
	case "rw", "ro", "xattr", "noprefix", "clone_children", "cpuset_v2_mode", "release_agent", "none":
		return false
	}
	return o != "" && !strings.Contains(o, "=")
}

type mount struct {
	point, fs string
	options   []string // of the superblock
}

// parseMount reads one mountinfo line; ok is false for lines that are not whole and for mounts that show only
// a part of a hierarchy's tree, where a cgroup's path would not be what we compute.
func parseMount(line string) (m mount, ok bool) {
	head, tail, found := strings.Cut(line, " - ")
	if !found {
		return mount{}, false
	}
	left, right := strings.Fields(head), strings.Fields(tail)
	if len(left) < 6 || len(right) < 3 {
		return mount{}, false
	}
	fs := right[0]
	if (fs != "cgroup" && fs != "cgroup2") || left[3] != "/" {
		return mount{}, false
	}
	return mount{point: unescape(left[4]), fs: fs, options: strings.Split(right[2], ",")}, true
}

// unescape undoes the octal escapes for space, tab, newline and backslash.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// V2 returns the absolute directory of the cgroup rel in the v2 hierarchy.
func (l Layout) V2(rel string) string { return filepath.Join(l.v2, rel) }

// Freezer returns the absolute directory of the cgroup rel in the v1 freezer hierarchy, "" where the machine
// has none.
func (l Layout) Freezer(rel string) string { return l.V1("freezer", rel) }

// V1 returns the absolute directory of the cgroup rel in the hierarchy of a v1 controller, "" where that
// controller is not mounted as v1.
func (l Layout) V1(controller, rel string) string {
	point, ok := l.by[controller]
	if !ok {
		return ""
	}
	return filepath.Join(point, rel)
}

// Hybrid says whether v1 hierarchies hold the controllers.
func (l Layout) Hybrid() bool { return len(l.by) > 0 }

// hierarchies returns every mount point, v2 first.
func (l Layout) hierarchies() []string { return append([]string{l.v2}, l.v1...) }
