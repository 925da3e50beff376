package credential

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"time"

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

// burst is how many sessions, begun without a pause, leave garbage worth collecting at once.
const burst = 1000

// trim gives back, once a burst of new sessions is over, the memory that its requests took; until ctx ends. Left alone
// it would stay resident for long: garbage is collected seldom here.
func (s *Service) trim(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var seen, trimmed uint64
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		begun := s.begun.Load()
		if begun == seen && begun-trimmed >= burst {
			debug.FreeOSMemory()
			trimmed = begun
		}
		seen = begun
	}
}

// giveBack gives the kernel back what a passphrase took, a quarter of a gigabyte: garbage is collected seldom here, and what
// it leaves free is given back slowly, all the while locked.
func giveBack() { debug.FreeOSMemory() }
