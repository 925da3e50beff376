package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// feedWatchdog tells whoever started killswitchd that enforcement goes round, and falls silent when it does not: then
// killswitchd is killed and started again. It has a goroutine of its own, because the word goes through a socket whose
// reader may hang, and returns where nobody waits for it (sd_watchdog_enabled(3)) or when ctx ends.
func feedWatchdog(ctx context.Context, log *slog.Logger, ticks func() uint64) {
	term, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("the watchdog is not fed", "error", err)
	}
	if term <= 0 {
		return
	}
	tick := time.NewTicker(term / 4)
	defer tick.Stop()
	for last := uint64(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := ticks()
		if now == last {
			continue
		}
		last = now
		if _, err := daemon.SdNotify(false, daemon.SdNotifyWatchdog); err != nil {
			log.Warn("feeding the watchdog", "error", err)
		}
	}
}
