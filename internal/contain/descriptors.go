package contain

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// descriptors is about what a runtime leaves behind in a process that it starts: CVE-2024-21626 was a directory of
// the host's that stayed open, CVE-2019-5736 the runtime's own program, writable through /proc.
func descriptors() []attempt {
	const class = "the runtime's descriptors (CVE-2019-5736, CVE-2024-21626)"
	return []attempt{
		{class, "leave through a directory that was left open", func(t Target) error { return leaked(t.Marker) }},
		{class, "leave through the working directory", func(t Target) error { return climbs(unix.AT_FDCWD, t.Marker) }},
		{class, "open the program of a process outside", func(t Target) error { return opens(fmt.Sprintf("/proc/%d/exe", t.PID), unix.O_RDONLY) }},
		{class, "look at its descriptors", func(t Target) error { return opens(fmt.Sprintf("/proc/%d/fd", t.PID), unix.O_RDONLY) }},
	}
}

// leaked looks for a way to the marker from each open directory.
func leaked(marker string) error {
	var fds []int
	for fd := range 1024 {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			fds = append(fds, fd)
		}
	}
	if len(fds) == 0 {
		return errors.New("no directory is open")
	}
	return anyOf(fds, func(fd int) error { return climbs(fd, marker) })
}

// climbs goes up from a directory, as far as that goes, and from there to the marker. Inside a root, going up ends
// at the root; from outside it does not.
func climbs(fd int, marker string) error {
	at, err := unix.Openat(fd, strings.Repeat("../", 64)+strings.TrimPrefix(filepath.Clean(marker), "/"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		unix.Close(at)
	}
	return err
}
