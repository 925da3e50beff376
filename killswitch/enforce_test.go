package killswitch

import (
	"context"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
)

// TestATagStopsWhatComesBack is what makes a tag more than a note: the check fails with enforcement off.
func TestATagStopsWhatComesBack(t *testing.T) {
	g := newRig(t, "a1", "b1")
	s := g.sw()
	order(t, s, wire.Scope{Kid: "a1"})
	mark := g.docs["a1"].Mark
	comeBack := func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.alive[kidsDir+"/a1"], g.alive[kidsDir+"/b1"] = 2, 2
		g.state[mark] = false
	}
	dead := func() bool {
		some, err := g.Populated(kidsDir + "/a1")
		on, err2 := g.Stopped(mark)
		return !some && on && err == nil && err2 == nil
	}
	comeBack()
	if dead() {
		t.Fatal("dead without enforcement: the test shows nothing")
	}
	running(t, s)
	waitFor(t, "a1 stopped again", dead)
	if some, err := g.Populated(kidsDir + "/b1"); !some || err != nil {
		t.Error("b1 was killed under another kid's tag")
	}
	waitFor(t, "records of it", func() bool {
		layers := map[string]bool{}
		for _, r := range g.recorded(audit.EventStopProgress) {
			if strings.Contains(r.Detail, "again") || strings.Contains(r.Detail, "under the tag") {
				layers[r.Fields["layer"]] = true
			}
		}
		return layers["session"] && layers["network"]
	})
}

// TestRestartFinishesAStop: a tag that a killed predecessor wrote is in force before anything else, S13.
func TestRestartFinishesAStop(t *testing.T) {
	for name, sc := range map[string]wire.Scope{"kid": {Kid: "a1"}, "card": {Card: "card-a"}, "all": {All: true}} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, "a1")
			tag := wire.Tag{Stop: "01A", Scope: sc, Layers: wire.AllLayers(), By: "ada", Placed: time.Now(), Marks: []uint32{g.docs["a1"].Mark}}
			g.load = func() Kept { return Kept{Hanging: []wire.Tag{tag}} }
			s := g.sw()
			if _, ok := s.Clear(wire.Scope{Kid: "a1", Card: "card-a"}); ok {
				t.Error("cleared before enforcement began")
			}
			running(t, s)
			waitFor(t, "the stop finished", func() bool {
				some, err := g.Populated(kidsDir + "/a1")
				on, err2 := g.Stopped(g.docs["a1"].Mark)
				flag, err3 := g.AllStopped()
				return !some && on && flag == sc.All && g.count1("revoke") > 0 && g.count1("destroy") > 0 && errors.Join(err, err2, err3) == nil
			})
			if g.count1("kill "+creddDir) != 0 {
				t.Error("credd was killed, although it revokes what it is asked to")
			}
		})
	}
}

func TestANewCreddIsToldAgain(t *testing.T) {
	g := newRig(t, "a1")
	g.procs = []Process{{PID: 1}}
	s := g.sw()
	order(t, s, wire.Scope{Kid: "a1"}, wire.LayerCredential)
	running(t, s)
	waitFor(t, "the first round", func() bool { return g.count1("revoke") == 2 })
	g.mu.Lock()
	g.procs = []Process{{PID: 2}} // restarted, and not serving yet
	g.revoke = func(context.Context, wire.RevokeRequest) (int, error) { return 0, syscall.ECONNREFUSED }
	g.mu.Unlock()
	waitFor(t, "several attempts", func() bool { return g.count1("revoke") >= 5 })
	if g.count1("kill "+creddDir) != 0 {
		t.Error("credd was killed while it starts")
	}
	g.mu.Lock()
	g.revoke = func(context.Context, wire.RevokeRequest) (int, error) { return 0, errors.New("no") }
	g.mu.Unlock()
	waitFor(t, "a credd that refuses to die", func() bool { return g.count1("kill "+creddDir) > 0 })
}

// TestANewCreddOutlivesATagOnEverything: what credd is told under a tag on the whole box must be an order that it
// understands. One that it refuses would have it killed again and again for as long as the tag hangs.
func TestANewCreddOutlivesATagOnEverything(t *testing.T) {
	g := newRig(t, "a1", "b1")
	g.procs = []Process{{PID: 1}}
	s := g.sw()
	order(t, s, wire.Scope{All: true}, wire.LayerCredential)
	running(t, s)
	for pid := 2; pid < 5; pid++ { // each a credd that was started again
		told := g.count1("revoke")
		g.mu.Lock()
		g.procs = []Process{{PID: pid}}
		g.mu.Unlock()
		waitFor(t, "the new credd is told", func() bool { return g.count1("revoke") > told })
	}
	if n := g.count1("kill " + creddDir); n != 0 {
		t.Errorf("credd was killed %d times", n)
	}
}

// TestACreddThatDiesOverTheQuestionIsNotKilled: its successor knows no token and only has to be asked.
func TestACreddThatDiesOverTheQuestionIsNotKilled(t *testing.T) {
	g := newRig(t, "a1")
	g.procs = []Process{{PID: 1}}
	s := g.sw()
	order(t, s, wire.Scope{Kid: "a1"}, wire.LayerCredential)
	g.mu.Lock()
	g.revoke = func(context.Context, wire.RevokeRequest) (int, error) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.procs = []Process{{PID: g.procs[0].PID + 1}}
		return 0, syscall.ECONNRESET
	}
	g.mu.Unlock()
	running(t, s)
	waitFor(t, "several attempts", func() bool { return g.count1("revoke") >= 5 })
	if g.count1("kill "+creddDir) != 0 {
		t.Error("credd was killed while it starts")
	}
}

// TestAStopIsNotedBeforeItFires (S13): whenever the process is killed, either nothing has fired or a successor
// finishes the stop.
func TestAStopIsNotedBeforeItFires(t *testing.T) {
	for name, sc := range map[string]wire.Scope{"kid": {Kid: "a1"}, "card": {Card: "card-a"}, "all": {All: true}} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, "a1")
			order(t, g.sw(), sc)
			g.mu.Lock()
			defer g.mu.Unlock()
			if len(g.calls) == 0 || g.calls[0] != "note" {
				t.Errorf("calls %v: want the note first", g.calls)
			}
		})
	}
}

// TestAStopDoesNotWaitForItsNote (invariant 4): also where the note hangs or fails.
func TestAStopDoesNotWaitForItsNote(t *testing.T) {
	hung := make(chan struct{})
	defer close(hung)
	for name, jot := range map[string]func(wire.Tag) error{
		"hangs": func(wire.Tag) error { <-hung; return nil },
		"fails": func(wire.Tag) error { return errors.New("no space left on device") },
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, "a1")
			g.jot = jot
			s := g.sw()
			s.t.Persist = 100 * time.Millisecond
			s.t.Note = time.Millisecond
			if rep := order(t, s, wire.Scope{Kid: "a1"}); rep.State != wire.StateObserved && name == "fails" {
				t.Errorf("report %+v", rep)
			}
			if some, err := g.Populated(kidsDir + "/a1"); some || err != nil {
				t.Errorf("a1 lives, %v", err)
			}
		})
	}
}

// TestANotedStopIsFinishedAndKept: what a predecessor noted and did not come to keep is in force, and goes to
// disk.
func TestANotedStopIsFinishedAndKept(t *testing.T) {
	g := newRig(t, "a1")
	tag := wire.Tag{Stop: "01A", Scope: wire.Scope{Kid: "a1"}, Layers: wire.AllLayers(), By: "ada", Placed: time.Now(), Marks: []uint32{g.docs["a1"].Mark}}
	g.load = func() Kept { return Kept{Noted: []wire.Tag{tag}} }
	s := g.sw()
	if _, ok := s.Clear(wire.Scope{Kid: "a1"}); ok {
		t.Error("cleared before enforcement began")
	}
	running(t, s)
	waitFor(t, "the stop finished and kept", func() bool {
		some, err := g.Populated(kidsDir + "/a1")
		g.mu.Lock()
		_, kept := g.stored["01A"]
		g.mu.Unlock()
		return !some && err == nil && kept
	})
}

func TestSentinelFile(t *testing.T) {
	g := newRig(t, "a1")
	s := g.sw()
	running(t, s)
	if err := os.WriteFile(s.cfg.Sentinel, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "everything stopped", func() bool { some, err := g.Populated(kidsDir); return !some && err == nil })
	waitFor(t, "the report", func() bool { return len(g.recorded(audit.EventStopCompleted)) == 1 })
	tags := s.Tags()
	if len(tags) != 1 || !tags[0].Scope.All || tags[0].Cause != CauseSentinel || tags[0].By != "uid:0" && os.Getuid() == 0 {
		t.Fatalf("tags %+v", tags)
	}
	waitFor(t, "the stop ended", func() bool { return !s.busy(tags[0].Stop) })
	if _, err := signRelease(t, s, tags[0].Stop, "ada"); err == nil || !strings.Contains(err.Error(), "remove it first") {
		t.Errorf("release with the file there: %v", err)
	}
	if err := os.Remove(s.cfg.Sentinel); err != nil {
		t.Fatal(err)
	}
	for _, by := range []string{"ada", "bob"} { // nobody placed it, so it takes two
		if _, err := signRelease(t, s, tags[0].Stop, by); err != nil {
			t.Error(err)
		}
	}
	if left := s.Tags(); len(left) != 0 {
		t.Errorf("still hangs: %+v", left)
	}
}

// TestWallClockDoesNotMatter is S14 as far as one process can show it: no deadline uses the wall clock. An
// order whose wall time lies an hour off, with the monotonic reading that every order carries, is timed right.
func TestWallClockDoesNotMatter(t *testing.T) {
	g := newRig(t, "a1")
	before := time.Now()
	rep := order(t, g.sw(), wire.Scope{Kid: "a1"})
	if took := time.Since(before); rep.Layers[wire.LayerSession].Fired > took {
		t.Errorf("fired after %v of %v", rep.Layers[wire.LayerSession].Fired, took)
	}
	if boot := bootTime(); boot <= 0 || boot > bootTime() {
		t.Error("boot time does not grow")
	}
}
