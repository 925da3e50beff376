package contain

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

func processes() []attempt {
	const host, neighbour = "ptrace of the host", "/proc/PID/root of neighbours"
	proc := func(pid int, file string) string { return fmt.Sprintf("/proc/%d/%s", pid, file) }
	return []attempt{
		{host, "trace a process outside", func(t Target) error {
			runtime.LockOSThread() // whoever traces is a thread
			defer runtime.UnlockOSThread()
			if err := unix.PtraceSeize(t.PID); err != nil {
				return err
			}
			unix.PtraceDetach(t.PID) // it runs: the kernel lets go when this thread ends
			return nil
		}},
		{host, "read its memory", func(t Target) error {
			local := []unix.Iovec{{Base: new(byte), Len: 1}}
			_, err := unix.ProcessVMReadv(t.PID, local, []unix.RemoteIovec{{Base: 1, Len: 1}}, 0)
			return unless(err, unix.EFAULT)
		}},
		{host, "open its memory", func(t Target) error { return opens(proc(t.PID, "mem"), unix.O_RDWR) }},
		{host, "signal it", func(t Target) error { return unix.Kill(t.PID, 0) }},
		{host, "take one of its descriptors", func(t Target) error {
			pidfd, err := unix.PidfdOpen(t.PID, 0)
			if err != nil {
				return err
			}
			defer unix.Close(pidfd)
			fd, err := unix.PidfdGetfd(pidfd, 0, 0)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}},
		{neighbour, "read a file through its root", func(t Target) error {
			return opens(proc(t.Neighbour, "root"+t.File), unix.O_RDONLY)
		}},
		{neighbour, "read its environment", func(t Target) error { return tells(proc(t.Neighbour, "environ")) }},
		{neighbour, "open its working directory", func(t Target) error { return opens(proc(t.Neighbour, "cwd"), unix.O_RDONLY) }},
		{neighbour, "find it in /proc", func(t Target) error { return opens(proc(t.Neighbour, ""), unix.O_RDONLY) }},
	}
}
