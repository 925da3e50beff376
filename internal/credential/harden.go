package credential

import (
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"
)

// Harden keeps the process's memory to itself: no core dumps, no ptrace and no /proc/PID/mem by others of
// the same user (PR_SET_DUMPABLE, prctl(2)), and nothing swapped out (mlockall(2)). Locking is refused where
// CAP_IPC_LOCK is missing and RLIMIT_MEMLOCK is low; that is logged, and the swap is then worth encrypting.
func Harden(log *slog.Logger) error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("forbidding core dumps: %w", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbidding core dumps: %w", err)
	}
	// ONFAULT: Go reserves far more address space than it uses.
	if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE | unix.MCL_ONFAULT); err != nil {
		log.Warn("memory is not locked, so secrets may reach the swap: give credd CAP_IPC_LOCK or encrypt the swap", "error", err)
	}
	return nil
}
