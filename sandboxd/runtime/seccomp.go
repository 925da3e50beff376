package runtime

import (
	"fmt"
	"slices"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// forbidden are system calls that no kid gets, whatever the default profile thinks of them. Most are not in
// the default for a process without capabilities; they stand here so that an update of it cannot add them.
var forbidden = []string{
	// kernel surface that escapes were built on
	"io_uring_setup", "io_uring_enter", "io_uring_register",
	"bpf", "perf_event_open", "userfaultfd", "fanotify_init", "lookup_dcookie",
	// keyrings are not namespaced
	"keyctl", "add_key", "request_key",
	// mounts and namespaces
	"mount", "umount", "umount2", "pivot_root", "chroot", "move_mount", "mount_setattr", "open_tree", "open_tree_attr",
	"fsopen", "fsconfig", "fsmount", "fspick", "unshare", "setns",
	// other processes' descriptors and files by handle
	"pidfd_getfd", "open_by_handle_at", "kcmp",
	// the machine
	"init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff",
	"settimeofday", "clock_settime", "iopl", "ioperm", "acct", "quotactl", "quotactl_fd", "syslog", "vhangup",
	// socketcall hides the address family behind a pointer, where the rules below cannot see it
	"socketcall",
	// replaced by socketRules and by a rule that answers ENOSYS
	"socket", "socketpair", "clone3",
	// replaced by flagRules
	"mmap", "memfd_create", "shmget", "setrlimit", "prlimit64",
}

// serving are the calls with which a kid on the machine's network would take one of the machine's ports: listen(2) does so
// on a socket without a name, where no hook of the kernel sees it.
var serving = []string{"listen", "accept", "accept4"}

// seccompProfile returns moby's default profile for a process without capabilities, with everything in
// forbidden taken out and socket(2) limited by socketRules, or by hostRules on the machine's network. Only the machine's own ABI is admitted: a 32-bit
// system call kills the caller, because the 32-bit tables have other ways to the same calls.
func seccompProfile(told Refusals, noExec, onHost bool) (*specs.LinuxSeccomp, error) {
	bare := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}}
	profile, err := seccomp.GetDefaultProfile(bare)
	if err != nil {
		return nil, fmt.Errorf("making the seccomp profile: %w", err)
	}
	if len(profile.Architectures) > 1 {
		profile.Architectures = profile.Architectures[:1]
	}
	out, sockets, refusals := forbidden, socketRules(), refusedRules()
	if onHost {
		out, sockets, refusals = slices.Concat(forbidden, serving), hostRules(), append(refusals, hostRefusals()...)
	}
	kept := profile.Syscalls[:0]
	for _, rule := range profile.Syscalls {
		rule.Names = slices.DeleteFunc(slices.Clone(rule.Names), func(name string) bool { return slices.Contains(out, name) })
		if len(rule.Names) > 0 {
			kept = append(kept, rule)
		}
	}
	profile.Syscalls = slices.Concat(kept, sockets, flagRules(noExec))
	if told.Listener != "" {
		profile.ListenerPath, profile.ListenerMetadata = told.Listener, told.Metadata
		profile.Syscalls = append(profile.Syscalls, refusals...)
	}
	// clone3 takes its flags behind a pointer; ENOSYS makes the C library fall back to clone, whose flags the
	// profile checks.
	nosys := uint(unix.ENOSYS)
	profile.Syscalls = append(profile.Syscalls, specs.LinuxSyscall{Names: []string{"clone3"}, Action: specs.ActErrno, ErrnoRet: &nosys})
	return profile, nil
}
