package main

import (
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var _ = register(technique{
	Name:   "cgroupescape",
	What:   "tries to leave its cgroup: by writing itself elsewhere, by mounting the hierarchy, and by new or others' namespaces",
	Layers: []string{"session"},
	Signs:  []sign{{What: "work", N: 100}, {What: "refused", N: 50}},
	run:    escapeCgroup,
})

func escapeCgroup(s *scene) error {
	me := []byte(strconv.Itoa(os.Getpid()))
	tries := []func() error{
		func() error { return unix.Mount("cgroup2", "/tmp", "cgroup2", 0, "") },
		func() error { return unix.Mount("cgroup", "/tmp", "cgroup", 0, "freezer") },
		func() error { return unix.Unshare(unix.CLONE_NEWCGROUP) },
		func() error { return unix.Unshare(unix.CLONE_NEWUSER) },
		func() error { return enter("/proc/1/ns/cgroup") },
		func() error { return enter("/proc/1/ns/mnt") },
		func() error { return startIn(unix.CLONE_NEWUSER | unix.CLONE_NEWCGROUP) },
		func() error { return startIn(unix.CLONE_NEWPID) },
	}
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/proc/1/root/sys/fs/cgroup", "/tmp"} {
		for _, dir := range []string{"", "..", "../..", "system.slice"} {
			file := filepath.Join(root, dir, "cgroup.procs")
			tries = append(tries, func() error { return os.WriteFile(file, me, 0) })
		}
	}
	for i := 0; ; i++ {
		if tries[i%len(tries)]() != nil {
			s.denied()
		}
		s.did()
		time.Sleep(2 * time.Millisecond)
	}
}

func enter(namespace string) error {
	fd, err := unix.Open(namespace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) // only read
	return unix.Setns(fd, 0)
}

// startIn starts a process in new namespaces.
func startIn(flags uintptr) error {
	pid, err := syscall.ForkExec("/bin/true", []string{"true"}, &syscall.ProcAttr{Sys: &syscall.SysProcAttr{Cloneflags: flags}})
	if err != nil {
		return err
	}
	_, err = syscall.Wait4(pid, nil, 0, nil)
	return err
}
