package killswitch

import (
	"sync"
	"testing"
	"time"

	"tagout/internal/wire"
)

func TestRestGrowsWithTheKill(t *testing.T) {
	t.Parallel()
	for took, want := range map[time.Duration]time.Duration{
		0:                      rekill,
		10 * time.Millisecond:  rekill,
		20 * time.Millisecond:  80 * time.Millisecond,
		200 * time.Millisecond: 800 * time.Millisecond,
		time.Minute:            maxRest,
	} {
		if got := rest(took); got != want {
			t.Errorf("after a kill of %v: rest %v, want %v", took, got, want)
		}
	}
}

// TestEnforcementLeavesADyingCgroupToItsStop ticks while a stop's own kill is under way, and after it was given up.
func TestEnforcementLeavesADyingCgroupToItsStop(t *testing.T) {
	t.Parallel()
	g := newRig(t, "a1")
	dir := g.docs["a1"].Cgroup
	entered, leave := make(chan struct{}), make(chan struct{})
	var first sync.Once
	g.kill = func(string) error {
		mine := false
		first.Do(func() { mine = true })
		if mine {
			close(entered)
			<-leave
		}
		return nil // and nobody dies
	}
	s := g.sw()
	h, err := s.Stop(Order{StopRequest: wire.StopRequest{Scope: wire.Scope{Kid: "a1"}, Layers: []wire.Layer{wire.LayerSession}, By: "ada", Reason: "test"}})
	if err != nil {
		t.Fatal(err)
	}
	<-entered
	s.tick()
	if n := g.count1("kill " + dir); n != 1 {
		t.Errorf("%d kills while the stop's own is under way, want 1", n)
	}
	close(leave)
	rep, err := h.Report(t.Context())
	if err != nil || rep.State == wire.StateObserved {
		t.Fatalf("report %+v, %v: the kid lives", rep, err)
	}
	before := g.count1("kill " + dir)
	s.tick()
	if n := g.count1("kill " + dir); n != before+1 {
		t.Errorf("%d kills at the tick after the stop gave up, want 1", n-before)
	}
	if s.isDying(dir) {
		t.Error("the stop is over and still counted")
	}
}
