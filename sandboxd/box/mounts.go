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
// /run is on a disk it would wait for the disk. A few hundred bytes each; what is there already stays.
func mountStops(_ context.Context, j *job) error {
	dir := j.inst.StopDir()
	mounts, err := mountsBelow(dir)
	if err != nil || slices.Contains(mounts, dir) {
		return err
	}
	options := fmt.Sprintf("size=1m,mode=700,uid=%d,gid=%d", j.inst.UID(instance.Killswitchd), j.inst.GroupID())
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
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
