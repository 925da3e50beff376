package contain

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

func mounts() []attempt {
	const host, release, core, sysrq = "host mounts", "cgroup release_agent", "core_pattern", "/proc/sysrq"
	write := func(path string) func(Target) error {
		return func(Target) error { return opens(path, unix.O_WRONLY) }
	}
	return []attempt{
		{host, "read a file outside", func(t Target) error { return opens(t.Marker, unix.O_RDONLY) }},
		{host, "read the machine's passwords", func(Target) error { return opens("/etc/shadow", unix.O_RDONLY) }},
		{host, "write to the machine's programs", func(t Target) error { return writesPrograms(t.Device) }},
		{host, "make the root writable", func(Target) error { return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND, "") }},
		{host, "look into the machine's devices and kernel", func(Target) error { return opens("/sys/kernel", unix.O_RDONLY|unix.O_DIRECTORY) }},
		{release, "mount the cgroups", func(t Target) error { return mounted(t, "cgroup2") }},
		{release, "open the root cgroup for writing", func(Target) error {
			files, err := filepath.Glob("/sys/fs/cgroup/*/release_agent")
			if err != nil {
				return err
			}
			return anyOf(append(files, "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/unified/cgroup.procs"), func(f string) error { return opens(f, unix.O_WRONLY) })
		}},
		{core, "open core_pattern for writing", write("/proc/sys/kernel/core_pattern")},
		{core, "open core_pipe_limit for writing", write("/proc/sys/kernel/core_pipe_limit")},
		{sysrq, "open sysrq-trigger for writing", write("/proc/sysrq-trigger")},
		{sysrq, "open the panic switch for writing", write("/proc/sys/kernel/panic")},
	}
}

// writesPrograms makes a nameless file among the programs. A kid may have a throw-away layer of its own there, which is
// another device than the machine's.
func writesPrograms(machine uint64) error {
	dev, err := programDevice()
	if err == nil && dev != machine {
		err = errors.New("what is written there is not the machine's")
	}
	return err
}

// ProgramDevice tells the file system to which whoever calls it writes below /usr: 0 where it cannot.
func ProgramDevice() uint64 {
	dev, err := programDevice()
	if err != nil {
		return 0
	}
	return dev
}

func programDevice() (uint64, error) {
	fd, err := unix.Open("/usr", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd) // it goes with that
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	return st.Dev, err
}

// mounted mounts a filesystem, takes it off again, and says how that went.
func mounted(t Target, kind string) error {
	dir, err := os.MkdirTemp(t.Dir, "mount-")
	if err != nil {
		return nil // as in privileges
	}
	defer os.Remove(dir) // empty
	if err := unix.Mount("none", dir, kind, 0, ""); err != nil {
		return err
	}
	return unix.Unmount(dir, unix.MNT_DETACH)
}

func namespaces() []attempt {
	const class = "user namespaces and mounts"
	tmpfs := []byte("tmpfs\x00")
	slash := []byte("/\x00")
	return []attempt{
		{class, "make a user namespace", func(Target) error { return cloned(unix.CLONE_NEWUSER) }},
		{class, "make a mount namespace", func(Target) error { return cloned(unix.CLONE_NEWNS) }},
		{class, "mount a filesystem", func(t Target) error { return mounted(t, "tmpfs") }},
		{class, "mount a second /proc", func(t Target) error { return mounted(t, "proc") }},
		{class, "make a filesystem with fsopen", func(Target) error { return descriptor(unix.SYS_FSOPEN, address(tmpfs), 0) }},
		{class, "copy the mount tree", func(Target) error {
			return descriptor3(unix.SYS_OPEN_TREE, unix.AT_FDCWD, address(slash), unix.OPEN_TREE_CLONE)
		}},
		{class, "enter a namespace", func(Target) error {
			ns, err := unix.Open("/proc/self/ns/uts", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(ns)
			return unix.Setns(ns, unix.CLONE_NEWUTS)
		}},
	}
}
