package killswitch

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"
)

func (g *rig) RenewLeases(until time.Duration) (int, error) {
	g.note("renew")
	if f := hook(g, &g.renew); f != nil {
		return f(until)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.docs), nil
}

// fakeClock is a boot clock that a test moves.
type fakeClock struct{ ns atomic.Int64 }

func (c *fakeClock) now() time.Duration      { return time.Duration(c.ns.Load()) }
func (c *fakeClock) forward(d time.Duration) { c.ns.Add(int64(d)) }

func newClock(s *Switch) *fakeClock {
	c := &fakeClock{}
	c.forward(time.Hour) // since the boot
	s.boot = c.now
	return c
}

func TestLeasesAreRenewedWhileEnforcementGoesRound(t *testing.T) {
	g := newRig(t, "a1")
	s := g.sw()
	clock := newClock(s)
	var until time.Duration
	g.renew = func(u time.Duration) (int, error) { until = u; return 1, nil }
	if problem := s.renewLeases(); problem == "" || g.count1("renew") != 0 {
		t.Errorf("renewed before the tags that hang were enforced once: %q", problem)
	}
	s.tick()
	if problem := s.renewLeases(); problem != "" || until != clock.now()+s.t.KernelLease {
		t.Errorf("%q, until %v, want %v", problem, until, clock.now()+s.t.KernelLease)
	}
	clock.forward(s.t.KernelLease/2 + 1)
	if problem := s.renewLeases(); problem == "" || g.count1("renew") != 1 {
		t.Errorf("renewed although enforcement stands still: %q", problem)
	}
	s.tick()
	g.renew = func(time.Duration) (int, error) { return 0, errors.New("no maps") }
	if problem := s.renewLeases(); problem != "no maps" {
		t.Errorf("problem %q", problem)
	}
}

// TestADeadlockEndsTheLeases: a switch whose lock is never given back looks alive from outside, and must not keep
// the network open.
func TestADeadlockEndsTheLeases(t *testing.T) {
	g := newRig(t, "a1")
	s := g.sw()
	s.t.KernelLease, s.t.Renew = 40*time.Millisecond, 2*time.Millisecond
	running(t, s)
	waitFor(t, "renewals", func() bool { return g.count1("renew") > 3 })
	s.mu.Lock()
	waitFor(t, "enforcement standing still", func() bool { return s.boot()-s.ticked() > s.t.KernelLease })
	n := g.count1("renew")
	until := s.boot() + s.t.KernelLease
	waitFor(t, "the leases to run out", func() bool { return s.boot() > until })
	if more := g.count1("renew") - n; more > 0 {
		t.Errorf("%d renewals of a switch that is deadlocked", more)
	}
	s.mu.Unlock()
	waitFor(t, "renewals after it", func() bool { return g.count1("renew") > n })
}
