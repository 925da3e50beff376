package contain

import "golang.org/x/sys/unix"

// kernel is about code and commands for the kernel. The calls get nonsense: whoever may make them is told so.
func kernel() []attempt {
	const class = "kernel modules"
	name := []byte("tagout_none\x00")
	return []attempt{
		{class, "load a module", func(Target) error {
			return call(unix.SYS_FINIT_MODULE, [4]uintptr{none, address(name), 0, 0}, unix.EBADF)
		}},
		{class, "remove a module", func(Target) error {
			return call(unix.SYS_DELETE_MODULE, [4]uintptr{address(name), 0, 0, 0}, unix.ENOENT)
		}},
		{class, "load a BPF program", func(Target) error {
			const progLoad = 5 // BPF_PROG_LOAD, bpf(2)
			return call(unix.SYS_BPF, [4]uintptr{progLoad, 0, 0, 0}, unix.EINVAL, unix.EFAULT, unix.E2BIG)
		}},
		{class, "watch the kernel's events", func(Target) error {
			return call(unix.SYS_PERF_EVENT_OPEN, [4]uintptr{0, none, none, none}, unix.EFAULT, unix.EINVAL, unix.ESRCH, unix.EBADF)
		}},
		{class, "set up a ring of system calls", func(Target) error {
			return call(unix.SYS_IO_URING_SETUP, [4]uintptr{1, 0, 0, 0}, unix.EFAULT)
		}},
		{class, "read the kernel's log", func(Target) error {
			_, err := unix.Klogctl(unix.SYSLOG_ACTION_READ_ALL, make([]byte, 16))
			return err
		}},
	}
}
