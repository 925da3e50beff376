package killswitch

import (
	"errors"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
)

// completions are the states that a stop was said to be complete with, in order.
func (g *rig) completions(stop string) []string {
	var out []string
	for _, r := range g.recorded(audit.EventStopCompleted) {
		if r.Fields["stop"] == stop {
			out = append(out, r.Fields["state"])
		}
	}
	return out
}

// TestALaterCompletionUpdatesTheStop (S06): what remained dies, and the stop's state follows, on the tag of whoever
// joined it too.
func TestALaterCompletionUpdatesTheStop(t *testing.T) {
	g := newRig(t, "a1")
	g.kill = func(string) error { return nil } // the write is taken and nothing dies
	g.procs = []Process{{PID: 7, Comm: "stuck", State: "D"}}
	s := g.sw()
	running(t, s)
	sc := wire.Scope{Kid: "a1"}
	first, err := s.Stop(Order{StopRequest: wire.StopRequest{Scope: sc, By: "ada"}, Received: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.Stop(Order{StopRequest: wire.StopRequest{Scope: sc, By: "bob"}, Received: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	rep := report(t, first)
	report(t, second)
	if rep.State != wire.StateContained || rep.Tag.State != wire.StateContained || !strings.Contains(rep.Layers[wire.LayerSession].Detail, "7 (stuck) in state D") {
		t.Errorf("report %+v", rep)
	}
	states := func(want wire.State) bool {
		tags := s.Tags()
		return len(tags) == 2 && !slices.ContainsFunc(tags, func(t wire.Tag) bool { return t.State != want })
	}
	waitFor(t, "both tags contained", func() bool { return states(wire.StateContained) })
	if err := g.reallyKill(kidsDir + "/a1"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "both tags observed", func() bool { return states(wire.StateObserved) })
	waitFor(t, "both ends on record", func() bool {
		return slices.Equal(g.completions(rep.Stop), []string{"contained-not-dead", "observed"})
	})
}

// TestADiskThatTakesTheTagLateCompletesTheStop (S12): partial until then.
func TestADiskThatTakesTheTagLateCompletesTheStop(t *testing.T) {
	g := newRig(t, "a1")
	g.put = func(wire.Tag) error { return syscall.ENOSPC }
	s := g.sw()
	running(t, s)
	rep := order(t, s, wire.Scope{Kid: "a1"})
	if rep.State != wire.StatePartial {
		t.Fatalf("report %+v", rep)
	}
	g.mu.Lock()
	g.put = nil
	g.mu.Unlock()
	waitFor(t, "the tag observed", func() bool { return s.Tags()[0].State == wire.StateObserved })
	waitFor(t, "both ends on record", func() bool { return slices.Equal(g.completions(rep.Stop), []string{"partial", "observed"}) })
}

// TestASuccessorTellsTheEnd (S13): what a predecessor stopped and did not see die is told by the next one.
func TestASuccessorTellsTheEnd(t *testing.T) {
	g := newRig(t, "a1")
	g.kill = func(string) error { return nil }
	tag := wire.Tag{Stop: "01OLD", Scope: wire.Scope{Kid: "a1"}, Layers: wire.AllLayers(), By: "ada", Placed: time.Now()}
	g.load = func() Kept { return Kept{Hanging: []wire.Tag{tag}} }
	s := g.sw()
	running(t, s)
	waitFor(t, "it is killed again and lives", func() bool { return g.count1("kill "+kidsDir+"/a1") > 3 })
	if n := len(g.completions("01OLD")); n != 0 || s.Tags()[0].State != "" {
		t.Errorf("told complete %d times while it lives, tag %+v", n, s.Tags()[0])
	}
	if err := g.reallyKill(kidsDir + "/a1"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the end on record", func() bool { return slices.Equal(g.completions("01OLD"), []string{"observed"}) })
	if st := s.Tags()[0].State; st != wire.StateObserved {
		t.Errorf("the tag's state is %q", st)
	}
}

// TestAReportSaysWhatWasBroken (S12), and that the stop did without.
func TestAReportSaysWhatWasBroken(t *testing.T) {
	g := newRig(t, "a1")
	g.alive["/cg/sandboxd"], g.alive["/cg/proxy"], g.alive["/cg/dnsfilter"] = 1, 0, 1
	g.procs = []Process{{PID: 9, Comm: "x", State: "T"}}
	s := g.sw()
	broken := errors.New("writing the audit log: no space left on device")
	s.cfg.Around = Around{
		Daemons: map[string]string{"sandboxd": "/cg/sandboxd", "proxy": "/cg/proxy"},
		Audit:   func() error { return broken }, Maps: func() error { return nil },
	}
	rep := order(t, s, wire.Scope{Kid: "a1"})
	if rep.State != wire.StateObserved {
		t.Errorf("report %+v", rep)
	}
	want := []string{"proxy is not running", "sandboxd stands still: a signal has stopped process 9", broken.Error()}
	if !slices.Equal(rep.Degraded, want) {
		t.Errorf("degraded: %q, want %q", rep.Degraded, want)
	}
	s.cfg.Around = Around{Daemons: map[string]string{"dnsfilter": "/cg/dnsfilter"}, Audit: func() error { return nil }}
	g.procs = []Process{{PID: 9, Comm: "x", State: "S"}}
	if rep := order(t, s, wire.Scope{All: true}); len(rep.Degraded) != 0 {
		t.Errorf("nothing is broken, and the report says %q", rep.Degraded)
	}
}
