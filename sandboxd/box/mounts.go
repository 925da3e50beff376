package box

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
)

// mountStops puts the notes of stops under way into memory: a stop waits for its note, and on a machine whose
// /run is on a disk it would wait for the disk. A few hundred bytes each; what is there already stays. It is a memory of
// its own: nothing else can fill it.
func mountStops(_ context.Context, j *job) error {
	dir := j.inst.StopDir()
	mounts, err := mountsBelow(dir)
	if err != nil || slices.Contains(mounts, dir) {
		return err
	}
	return j.mountMemory(dir, unix.MS_NOEXEC, fmt.Sprintf("size=1m,mode=700,uid=%d,gid=%d", j.inst.UID(instance.Killswitchd), j.inst.GroupID()))
}

// mountKids puts what is kept of living kids into memory, where /run is on a disk. Nothing of it is worth keeping, their
// tokens do not belong on a disk, and a spawn makes some fifty files and a destroy removes them, which takes ext4 tens of
// milliseconds. Where kids live already, all stays as it is.
func mountKids(_ context.Context, j *job) error {
	dirs := kidDirs(j.inst)
	for _, d := range dirs {
		entries, err := os.ReadDir(d.path)
		if err != nil || len(entries) > 0 {
			return err
		}
	}
	for _, d := range dirs {
		var fs unix.Statfs_t
		if err := unix.Statfs(d.path, &fs); err != nil {
			return fmt.Errorf("looking at the filesystem of %s: %w", d.path, err)
		}
		if fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC {
			continue
		}
		if err := j.mountMemory(d.path, 0, fmt.Sprintf("size=10%%,mode=%o,uid=%d,gid=%d", d.mode, d.uid, d.gid)); err != nil {
			return err
		}
	}
	return nil
}

// mountMemory mounts a tmpfs (tmpfs(5)) at dir, without set-uid programs and devices.
func (j *job) mountMemory(dir string, flags uintptr, options string) error {
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|flags, options); err != nil {
		return fmt.Errorf("mounting memory at %s: %w", dir, err)
	}
	j.undo = append(j.undo, func(context.Context) error { return unmountBelow(dir) })
	return nil
}

// mountsBelow lists the mount points at or below dir in this mount namespace, deepest first
// (proc_pid_mountinfo(5)).
func mountsBelow(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("reading mounts: %w", err)
	}
	defer f.Close() // only read
	var out []string
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		if len(fields) < 5 {
			return nil, fmt.Errorf("reading mounts: %q is not a mountinfo line", sc.Text())
		}
		if p := unescape(fields[4]); p == dir || strings.HasPrefix(p, dir+"/") {
			out = append(out, p)
		}
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("reading mounts: %w", err)
	}
	// A mount below another is listed after it, and has the longer path.
	slices.Reverse(out)
	slices.SortStableFunc(out, func(a, b string) int { return strings.Count(b, "/") - strings.Count(a, "/") })
	return out, nil
}

// unescape undoes the kernel's octal escapes of space, tab, newline and backslash.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
