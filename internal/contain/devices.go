package contain

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// basic are the devices that every container has; none of them is the machine's.
var basic = []string{"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"}

func devices() []attempt {
	const class = "device nodes"
	return []attempt{
		{class, "make a node of a disk", func(t Target) error { return made(t, unix.S_IFBLK, 254) }},
		{class, "make a node of the memory", func(t Target) error { return made(t, unix.S_IFCHR, 1) }},
		{class, "open a disk", func(t Target) error { return opens(t.Disk, unix.O_RDONLY) }},
		{class, "open the kernel's log", func(Target) error { return opens("/dev/kmsg", unix.O_RDONLY) }},
		{class, "open the machine's tools (loop, fuse, kvm, tun)", func(Target) error {
			return anyOf([]string{"loop-control", "fuse", "kvm", "net/tun", "mem", "port"}, func(name string) error { return opens("/dev/"+name, unix.O_RDWR) })
		}},
		{class, "find more than the basic devices", func(Target) error { return others() }},
	}
}

// made makes a device node with a number of that kind's, minor 1, and removes it.
func made(t Target, kind, major uint32) error {
	path := filepath.Join(t.Dir, fmt.Sprint("node-", kind, "-", major))
	if err := unix.Mknod(path, kind|0o600, int(unix.Mkdev(major, 1))); err != nil {
		return err
	}
	return os.Remove(path)
}

func others() error {
	found := errors.New("only the basic ones are there")
	err := filepath.WalkDir("/dev", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return fs.SkipDir
		}
		name := strings.TrimPrefix(path, "/dev/")
		if d.Type()&fs.ModeDevice != 0 && !strings.HasPrefix(name, "pts/") && !slices.Contains(basic, name) {
			found = nil
			return fs.SkipAll
		}
		return nil
	})
	return errors.Join(found, err)
}
