package killswitch

import (
	"context"
	"time"
)

// Leases are the sessions' leases in the kernel, which drops the packets of a session whose lease has run out.
type Leases interface {
	// RenewLeases moves the end of every lease that there is to a time on CLOCK_BOOTTIME and returns how many it
	// moved. It makes none, and a session that is stopped stays stopped.
	RenewLeases(until time.Duration) (int, error)
}

// keepLeases renews the leases in the kernel until ctx ends. It has a goroutine of its own, so that no disk, audit
// log or other daemon can be in its way, but it looks at the enforcement loop: a killswitchd that enforces nothing
// any more must not keep the network open. Whatever ends the renewals, the kernel closes by itself.
func (s *Switch) keepLeases(ctx context.Context) {
	tick := time.NewTicker(s.t.Renew)
	defer tick.Stop()
	last := ""
	for {
		problem := s.renewLeases()
		if problem != last { // tell of each change once
			last = problem
			if problem != "" {
				s.cfg.Log.Error("the kernel leases are not renewed: no kid has a network once they run out", "why", problem)
			} else {
				s.cfg.Log.Info("the kernel leases are renewed again")
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// renewLeases renews once, or says why not. The end of the lease counts from before the look at the enforcement
// loop: a process that is stopped in between writes, when it goes on, a lease that is over.
func (s *Switch) renewLeases() (problem string) {
	now := s.boot()
	if still := now - s.ticked(); still > s.t.KernelLease/2 {
		return "enforcement stands still"
	}
	n, err := s.cfg.Leases.RenewLeases(now + s.t.KernelLease)
	s.cfg.Metrics.LeasesRenewed(n, err == nil)
	if err != nil {
		return err.Error()
	}
	return ""
}

// Ticks returns how often the enforcement loop has come round. A number that stands still is a loop that does.
func (s *Switch) Ticks() uint64 { return s.progress.rounds.Load() }

// ticked returns when the enforcement loop last came round, on CLOCK_BOOTTIME; 0: never.
func (s *Switch) ticked() time.Duration { return time.Duration(s.progress.at.Load()) }

// cameRound notes that the enforcement loop did.
func (s *Switch) cameRound() {
	s.progress.at.Store(int64(s.boot()))
	s.progress.rounds.Add(1)
}
