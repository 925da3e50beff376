package filewatch

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mount is one mount of a kid.
type mount struct {
	id    uint64
	point string // in the kid
	fs    string
}

// mountsOf lists the mounts that a process sees (proc_pid_mountinfo(5)).
func mountsOf(pid int) ([]mount, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	var out []mount
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20) // overlay lines are long
	for sc.Scan() {
		head, tail, ok := strings.Cut(sc.Text(), " - ")
		left, right := strings.Fields(head), strings.Fields(tail)
		if !ok || len(left) < 6 || len(right) < 1 {
			return nil, fmt.Errorf("reading the kid's mounts: %q is no mount", sc.Text())
		}
		id, err := strconv.ParseUint(left[0], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("reading the kid's mounts: %w", err)
		}
		point := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(left[4])
		out = append(out, mount{id: id, point: point, fs: right[0]})
	}
	return out, sc.Err()
}

// pseudo says whether a file system holds no files of anybody's.
func pseudo(fs string) bool {
	switch fs {
	case "proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2":
		return true
	}
	return false
}

// markMounts puts marks on every mount of the kid in which files are: on all of them for starts of programs, and on
// those that hold more than scratch places for writes. It returns the mounts' ids.
func markMounts(group, pid int, w Wants) (map[uint64]bool, error) {
	mounts, err := mountsOf(pid)
	if err != nil {
		return nil, err
	}
	ids := map[uint64]bool{}
	for _, m := range mounts {
		if pseudo(m.fs) {
			continue
		}
		at := fmt.Sprintf("/proc/%d/root%s", pid, m.point)
		var st unix.Stat_t
		switch err := unix.Stat(at, &st); {
		case errors.Is(err, unix.ENOENT):
			continue // below a mount that hides it
		case err != nil:
			return nil, fmt.Errorf("looking at %s: %w", m.point, err)
		}
		if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFDIR && kind != unix.S_IFREG {
			continue // a device
		}
		mask := uint64(0)
		if len(w.Forbidden) > 0 {
			mask |= unix.FAN_OPEN_EXEC
		}
		if w.Writes && !w.isScratch(m.point) {
			mask |= unix.FAN_MODIFY | unix.FAN_CLOSE_WRITE
		}
		if mask == 0 {
			continue
		}
		if err := unix.FanotifyMark(group, unix.FAN_MARK_ADD|unix.FAN_MARK_MOUNT, mask, unix.AT_FDCWD, at); err != nil {
			return nil, fmt.Errorf("marking %s: %w", m.point, err)
		}
		ids[m.id] = true
	}
	return ids, nil
}
