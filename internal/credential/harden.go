package credential

import (
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

const (
	runs = 4 // goroutines at once
	// The less often garbage is collected, the less often a revocation waits for it; memoryLimit bounds what
	// that costs, in bytes (debug.SetMemoryLimit).
	gcPercent   = 150
	memoryLimit = 128 << 20
)

// Harden keeps the process's memory to itself: no core dumps, no ptrace and no /proc/PID/mem by others of
// the same user (PR_SET_DUMPABLE, prctl(2)), and nothing swapped out (mlockall(2)). Locking is refused where
// CAP_IPC_LOCK is missing and RLIMIT_MEMLOCK is low; that is logged, and the swap is then worth encrypting.
// It also gives revocations processors to run on.
func Harden(log *slog.Logger) error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("forbidding core dumps: %w", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbidding core dumps: %w", err)
	}
	// A write to a disk holds its processor until the runtime notices that it takes long; a revocation must not
	// queue behind the ledger and the audit log.
	runtime.GOMAXPROCS(max(runs, runtime.GOMAXPROCS(0)))
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(memoryLimit)
	// ONFAULT: Go reserves far more address space than it uses.
	if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE | unix.MCL_ONFAULT); err != nil {
		log.Warn("memory is not locked, so secrets may reach the swap: give credd CAP_IPC_LOCK or encrypt the swap", "error", err)
	}
	return nil
}
