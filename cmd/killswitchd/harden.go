package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// memoryLimit is where the garbage collector runs whatever goes on, in bytes; a soft limit, see
	// debug.SetMemoryLimit.
	memoryLimit = 64 << 20
	// runs is how many goroutines may run at once. A write to cgroup.kill or to netlink is a system call that
	// takes milliseconds; while it lasts, its processor is lost to the other layers until the runtime notices.
	runs = 4
	// idleGrowth is how many bytes of garbage are worth a collection while nothing else is to be done.
	idleGrowth = 2 << 20
	idleLook   = time.Second
)

// harden keeps the process small, in memory, out of the OOM killer's way and out of reach of tracers. What a
// machine does not allow is logged and gone without, except that a dump must never be possible.
func harden(log *slog.Logger) error {
	debug.SetGCPercent(-1) // see collectWhenIdle
	debug.SetMemoryLimit(memoryLimit)
	runtime.GOMAXPROCS(max(runs, runtime.GOMAXPROCS(0)))
	lockMemory(log)
	// Before the prctl, which makes our files in /proc root's.
	// -900: killed after everything else but kernel threads and init's own protected ones. Lowering it needs
	// CAP_SYS_RESOURCE; whoever starts us may have done it already.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0); err != nil {
		log.Warn("the OOM killer may pick killswitchd: give it CAP_SYS_RESOURCE or OOMScoreAdjust=-900", "error", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("forbidding core dumps: %w", err)
	}
	return nil
}

// collectWhenIdle collects garbage while no stop is under way, until ctx ends. On a machine that a kid keeps busy
// the collector has held killswitchd up for 70 ms, in the middle of the stop that made the garbage.
func collectWhenIdle(ctx context.Context, idle func() bool) {
	tick := time.NewTicker(idleLook)
	defer tick.Stop()
	heap := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	read := func() uint64 { // stops nothing, other than runtime.ReadMemStats
		metrics.Read(heap)
		return heap[0].Value.Uint64()
	}
	for least := read(); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if read() > least+idleGrowth && idle() {
			runtime.GC()
			least = read()
		}
	}
}

// lockMemory keeps every page in memory that was touched once. Without CAP_IPC_LOCK it must not even try:
// MCL_FUTURE would make later allocations fail at RLIMIT_MEMLOCK, and the process with them.
func lockMemory(log *slog.Logger) {
	if !hasCap(unix.CAP_IPC_LOCK) {
		log.Warn("memory is not locked: killswitchd lacks CAP_IPC_LOCK")
		return
	}
	if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE | unix.MCL_ONFAULT); err != nil {
		log.Warn("memory is not locked", "error", err)
	}
}

// hasCap says whether the process has a capability in its effective set (capget(2)).
func hasCap(n int) bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return false
	}
	return data[n/32].Effective&(1<<(n%32)) != 0
}
