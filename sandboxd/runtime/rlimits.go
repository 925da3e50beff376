package runtime

import (
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const (
	maxLocked  = 8 << 20 // bytes that a process may keep from being reclaimed; systemd's default
	maxQueued  = 4096    // signals that wait for the kid's processes
	maxMessage = 819_200 // bytes in POSIX message queues; the kernel's default
	// noCore is one byte and not zero: the kernel gives a core dump to a program of the machine's
	// (kernel.core_pattern with a pipe) whatever the limit is, except where it is 1.
	noCore = 1
)

// rlimits are those of every process. None is more than this process may give: without CAP_SYS_RESOURCE that
// would fail. No one of them lets a kid's process go before others (RLIMIT_NICE, RLIMIT_RTPRIO).
func rlimits(openFiles uint64) []specs.POSIXRlimit {
	out := []specs.POSIXRlimit{
		rlimit("RLIMIT_CORE", unix.RLIMIT_CORE, noCore), // a core dump would carry what the kid was sent
		rlimit("RLIMIT_MEMLOCK", unix.RLIMIT_MEMLOCK, maxLocked),
		rlimit("RLIMIT_SIGPENDING", unix.RLIMIT_SIGPENDING, maxQueued),
		rlimit("RLIMIT_MSGQUEUE", unix.RLIMIT_MSGQUEUE, maxMessage),
		rlimit("RLIMIT_NICE", unix.RLIMIT_NICE, 0),
		rlimit("RLIMIT_RTPRIO", unix.RLIMIT_RTPRIO, 0),
	}
	if openFiles > 0 {
		out = append(out, rlimit("RLIMIT_NOFILE", unix.RLIMIT_NOFILE, openFiles))
	}
	return out
}

func rlimit(name string, resource int, value uint64) specs.POSIXRlimit {
	var own unix.Rlimit
	if err := unix.Getrlimit(resource, &own); err == nil {
		value = min(value, own.Max)
	}
	return specs.POSIXRlimit{Type: name, Hard: value, Soft: value}
}
