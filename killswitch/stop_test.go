package killswitch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
)

func TestStopOfAKidIsObservedInEveryLayer(t *testing.T) {
	g := newRig(t, "a1", "b1")
	s := g.sw()
	rep := order(t, s, wire.Scope{Kid: "a1"})
	if rep.State != wire.StateObserved || !slices.Equal(rep.Kids, []string{"a1"}) {
		t.Fatalf("report %+v", rep)
	}
	for _, l := range wire.AllLayers() {
		if lr := rep.Layers[l]; lr.State != wire.StateObserved || lr.Fired <= 0 || lr.Observed < lr.Fired {
			t.Errorf("layer %s: %+v", l, lr)
		}
	}
	if g.alive[kidsDir+"/a1"] != 0 || g.alive[kidsDir+"/b1"] == 0 || !g.state[g.docs["a1"].Mark] || g.state[g.docs["b1"].Mark] {
		t.Error("the stop hit something else than its scope")
	}
	if rep.Tag == nil || g.stored[rep.Stop].By != "ada" || !slices.Equal(rep.Tag.Marks, []uint32{g.docs["a1"].Mark}) {
		t.Errorf("tag %+v, on disk %+v", rep.Tag, g.stored)
	}
}

func TestEachLayerFiresAlone(t *testing.T) {
	for _, l := range wire.AllLayers() {
		g := newRig(t, "a1")
		rep := order(t, g.sw(), wire.Scope{Kid: "a1"}, l)
		if rep.State != wire.StateObserved || len(rep.Layers) != 1 {
			t.Errorf("%s: %+v", l, rep)
		}
		killed, cut, revoked := g.alive[kidsDir+"/a1"] == 0, g.state[g.docs["a1"].Mark], g.count1("revoke") > 0
		want := [3]bool{l == wire.LayerSession, l == wire.LayerNetwork, l == wire.LayerCredential}
		if got := [3]bool{killed, cut, revoked}; got != want {
			t.Errorf("%s alone fired %v, want %v", l, got, want)
		}
	}
}

// TestNoLayerWaitsForAnother holds up each layer's first action until both others have fired: had one waited
// for another, the stop would never end.
func TestNoLayerWaitsForAnother(t *testing.T) {
	g := newRig(t, "a1", "a2", "a3")
	var all sync.WaitGroup
	all.Add(3 + 1 + 1) // three kids killed, one session cut, one revocation
	once := sync.OnceFunc(all.Done)
	g.kill = func(dir string) error {
		if g.count1("kill "+dir) == 1 {
			all.Done()
		}
		all.Wait()
		return g.reallyKill(dir)
	}
	g.cut = func(mark uint32) error { once(); all.Wait(); return g.reallyCut(mark) }
	g.revoke = func(context.Context, wire.RevokeRequest) (int, error) { all.Done(); all.Wait(); return 1, nil }
	// The disk waits too: the tag must not be needed for firing.
	g.put = func(wire.Tag) error { all.Wait(); return nil }
	rep := order(t, g.sw(), wire.Scope{Card: "card-a"})
	if rep.State != wire.StateObserved || len(rep.Kids) != 3 {
		t.Errorf("report %+v", rep)
	}
}

func TestStopOfEverythingFiresBeforeItKnowsTheKids(t *testing.T) {
	g := newRig(t, "a1", "b1")
	s := g.sw()
	rep := order(t, s, wire.Scope{All: true})
	if rep.State != wire.StateObserved || len(rep.Kids) != 2 || !g.flag {
		t.Fatalf("report %+v, flag %v", rep, g.flag)
	}
	if g.count1("kill "+kidsDir) != 1 {
		t.Errorf("calls %v", g.calls)
	}
	for kid, d := range g.docs {
		if !g.state[d.Mark] {
			t.Errorf("session of %s is held only by the global flag", kid)
		}
	}
}

func TestStopOfNothing(t *testing.T) {
	g := newRig(t)
	s := g.sw()
	for _, sc := range []wire.Scope{{Card: "nobody"}, {All: true}} {
		if rep := order(t, s, sc); rep.State != wire.StateObserved || rep.Kids == nil {
			t.Errorf("%+v: %+v", sc, rep)
		}
	}
	_, err := s.Stop(Order{StopRequest: wire.StopRequest{Scope: wire.Scope{Kid: "ghost"}}})
	if !errors.Is(err, ErrUnknownKid) {
		t.Errorf("stop of an unknown kid: %v", err)
	}
	for _, sc := range []wire.Scope{{}, {Kid: "a", All: true}, {Kid: "../x"}, {Kid: ".."}} {
		if _, err := s.Stop(Order{StopRequest: wire.StopRequest{Scope: sc}}); !errors.Is(err, ErrBadOrder) {
			t.Errorf("%+v: %v", sc, err)
		}
	}
	if _, err := s.Stop(Order{StopRequest: wire.StopRequest{Scope: wire.Scope{All: true}, Layers: []wire.Layer{"x"}}}); !errors.Is(err, ErrBadOrder) {
		t.Errorf("unknown layer: %v", err)
	}
}

// TestKidsWithoutAWholeDocument: a kid being spawned or destroyed, S04.
func TestKidsWithoutAWholeDocument(t *testing.T) {
	g := newRig(t, "a1", "a2")
	s := g.sw()
	delete(g.alive, kidsDir+"/a1") // spawning: a document, no cgroup and no map entry yet
	delete(g.state, g.docs["a1"].Mark)
	if rep := order(t, s, wire.Scope{Kid: "a1"}); rep.State != wire.StateObserved {
		t.Errorf("spawning: %+v", rep)
	}
	g.bad["a2"], g.ownerless = errors.New("unexpected end of JSON input"), true // and the kernel does not know better
	rep := order(t, s, wire.Scope{Kid: "a2"})
	if g.alive[kidsDir+"/a2"] != 0 || rep.Layers[wire.LayerSession].State != wire.StateObserved {
		t.Errorf("half a document: %+v", rep)
	}
	if lr := rep.Layers[wire.LayerNetwork]; lr.State != wire.StateFailed || !strings.Contains(lr.Detail, "stop everything") {
		t.Errorf("half a document, network: %+v", lr)
	}
	rep = order(t, s, wire.Scope{All: true})
	if lr := rep.Layers[wire.LayerNetwork]; lr.State != wire.StatePartial || strings.Contains(lr.Detail, "stop everything to") {
		t.Errorf("half a document, everything stopped: %+v", lr)
	}
	g.alive[kidsDir+"/a3"] = 1 // destroying: a cgroup, no document any more
	if rep := order(t, s, wire.Scope{Kid: "a3"}, wire.LayerSession); rep.State != wire.StateObserved {
		t.Errorf("destroying: %+v", rep)
	}
	g.alive[kidsDir+"/a4"] = 1 // nobody's: it may be the card's, and is stopped with it
	order(t, s, wire.Scope{Card: "card-z"}, wire.LayerSession)
	if g.alive[kidsDir+"/a4"] != 0 {
		t.Error("a kid without a document outlived the stop of a card")
	}
}

// TestReportsWhatItSaw is S01: what the actuators answer does not matter, what is seen does.
func TestReportsWhatItSaw(t *testing.T) {
	lie := errors.New("the actuator says no")
	passing := func(g *rig) func(uint32) (Counters, error) {
		return func(uint32) (Counters, error) {
			g.mu.Lock()
			defer g.mu.Unlock()
			c := g.passed[g.docs["a1"].Mark]
			c.Packets++
			c.LastPass = bootTime()
			g.passed[g.docs["a1"].Mark] = c
			return c, nil
		}
	}
	for _, c := range []struct {
		name   string
		layer  wire.Layer
		set    func(g *rig)
		want   wire.State
		detail string
	}{
		{"kill says done, processes live", wire.LayerSession, func(g *rig) { g.kill = func(string) error { return nil } }, wire.StatePartial, "77 (evil) in state D"},
		{"kill says failed, processes die", wire.LayerSession, func(g *rig) { g.kill = func(d string) error { g.reallyKill(d); return lie } }, wire.StateObserved, ""}, // the lie
		{"kill fails", wire.LayerSession, func(g *rig) { g.kill = func(string) error { return lie } }, wire.StateFailed, "the actuator says no"},
		{"cut says done, session active", wire.LayerNetwork, func(g *rig) { g.cut = func(uint32) error { return nil } }, wire.StateFailed, "not stopped in the kernel"},
		{"cut says failed, session stopped", wire.LayerNetwork, func(g *rig) { g.cut = func(m uint32) error { g.reallyCut(m); return lie } }, wire.StateObserved, ""}, // the lie
		{"cut fails", wire.LayerNetwork, func(g *rig) { g.cut = func(uint32) error { return lie } }, wire.StateFailed, "not stopped in the kernel"},
		{"cut done, packets go on", wire.LayerNetwork, func(g *rig) { g.count = passing(g) }, wire.StatePartial, "packets passed"},
		{"counters cannot be read", wire.LayerNetwork, func(g *rig) { g.count = func(uint32) (Counters, error) { return Counters{}, lie } }, wire.StatePartial, "the actuator says no"},
		{"sockets remain", wire.LayerNetwork, func(g *rig) { g.destroy = func(context.Context) (int, error) { return 1, lie } }, wire.StatePartial, "1 sockets destroyed"},
		{"credd refuses and dies", wire.LayerCredential, func(g *rig) { g.revoke = func(context.Context, wire.RevokeRequest) (int, error) { return 0, lie } }, wire.StateObserved, "credd killed"},
		{"credd hangs and dies", wire.LayerCredential, func(g *rig) { g.revoke = hang }, wire.StateObserved, "credd killed"},
		{"credd hangs and lives", wire.LayerCredential, func(g *rig) { g.revoke = hang; g.kill = func(string) error { return nil } }, wire.StateFailed, "not seen to die"},
		{"no credd runs", wire.LayerCredential, func(g *rig) { g.alive[creddDir] = 0; g.revoke = refused }, wire.StateObserved, "credd is not running"},
		{"the kernel refuses to drop secrets", wire.LayerCredential, func(g *rig) { g.keepOut = func(uint32) error { return lie } }, wire.StatePartial, "may still reach its server: the actuator says no"},
		{"the kernel says done and goes on with secrets", wire.LayerCredential, func(g *rig) { g.keepOut = func(uint32) error { return nil } }, wire.StatePartial, "not revoked in the kernel"},
		{"secrets dropped, packets go on", wire.LayerCredential, func(g *rig) {
			g.secrets = func(uint32) (bool, time.Duration, error) { return true, bootTime(), nil }
		}, wire.StatePartial, "after the cut"},
		{"sockets with secrets remain", wire.LayerCredential, func(g *rig) { g.destroy = func(context.Context) (int, error) { return 1, lie } }, wire.StatePartial, "1 sockets destroyed"},
		{"credd dies and a stranger serves its socket", wire.LayerCredential, func(g *rig) { g.revoke = hang; g.server = stranger }, wire.StateFailed, "process 78 serves credd's socket from outside"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newRig(t, "a1")
			g.procs = []Process{{PID: 77, Comm: "evil", State: "D"}}
			c.set(g)
			rep := order(t, g.sw(), wire.Scope{Kid: "a1"}, c.layer)
			lr := rep.Layers[c.layer]
			if lr.State != c.want || rep.State != c.want || !strings.Contains(lr.Detail, c.detail) {
				t.Errorf("state %s, want %s; detail %q, want %q in it", lr.State, c.want, lr.Detail, c.detail)
			}
			if c.want != wire.StateObserved && lr.Observed != 0 {
				t.Errorf("an observation time for what was not observed: %v", lr.Observed)
			}
		})
	}
}

func refused(context.Context, wire.RevokeRequest) (int, error) { return 0, syscall.ECONNREFUSED }

// stranger is no process of the rig's credd.
func stranger() (int, error) { return 78, nil }

// TestACreddThatIsRestartedAtOnceWasKilled: its supervisor may be quicker than any look at the empty cgroup.
func TestACreddThatIsRestartedAtOnceWasKilled(t *testing.T) {
	g := newRig(t, "a1")
	g.procs = []Process{{PID: 77, Comm: "credd", State: "S"}}
	g.revoke = hang
	g.server = func() (int, error) { return 77, nil } // the new one
	g.reborn = true
	rep := order(t, g.sw(), wire.Scope{Kid: "a1"}, wire.LayerCredential)
	if lr := rep.Layers[wire.LayerCredential]; lr.State != wire.StateObserved {
		t.Errorf("credential layer %+v", lr)
	}
}

// TestAKidWhoseSpawnHasJustBegunIsStopped (S04): its cgroup comes before its document, and the tag ends its spawn.
func TestAKidWhoseSpawnHasJustBegunIsStopped(t *testing.T) {
	for name, sc := range map[string]wire.Scope{"kid": {Kid: "new"}, "card": {Card: "card-n"}, "all": {All: true}} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t)
			g.alive[kidsDir+"/new"] = 0
			s := g.sw()
			rep := order(t, s, sc)
			if rep.State != wire.StateObserved || len(rep.Kids) != 1 {
				t.Errorf("report %+v", rep)
			}
			if _, ok := s.Clear(wire.Scope{Kid: "new", Card: "card-n"}); ok {
				t.Error("its spawn goes on")
			}
		})
	}
}

// hang ignores even its context, as a client may that is stuck in a system call.
func hang(context.Context, wire.RevokeRequest) (int, error) { select {} }

func TestContainedNeedsTheOtherLayers(t *testing.T) {
	g := newRig(t, "a1")
	g.procs = []Process{{PID: 77, Comm: "evil", State: "D"}}
	g.kill = func(string) error { return nil }
	s := g.sw()
	rep := order(t, s, wire.Scope{Kid: "a1"}, wire.LayerSession)
	if lr := rep.Layers[wire.LayerSession]; lr.State != wire.StatePartial || !strings.Contains(lr.Detail, "nothing contains") {
		t.Errorf("alone: %+v", lr)
	}
	rep = order(t, s, wire.Scope{Kid: "a1"})
	if lr := rep.Layers[wire.LayerSession]; lr.State != wire.StateContained || rep.State != wire.StateContained {
		t.Errorf("with the others: %+v, %+v", rep.State, lr)
	}
	// Now another tag holds network and credential: the session layer alone may say contained.
	rep = order(t, s, wire.Scope{Kid: "a1"}, wire.LayerSession)
	if rep.State != wire.StateContained {
		t.Errorf("under another tag: %+v", rep)
	}
	// The cause clears: the late end is recorded.
	g.mu.Lock()
	g.alive[kidsDir+"/a1"] = 0
	g.mu.Unlock()
	waitFor(t, "three late completions", func() bool {
		n := 0
		for _, r := range g.recorded(audit.EventStopCompleted) {
			if strings.Contains(r.Detail, "the last process is gone") {
				n++
			}
		}
		return n == 3
	})
}

// TestLatePacketIsCutAgain: a packet that was past the check when the map was written carries a later time.
func TestLatePacketIsCutAgain(t *testing.T) {
	g := newRig(t, "a1")
	g.cut = func(m uint32) error {
		g.reallyCut(m) // never fails
		if g.count1("cut") == 1 {
			g.mu.Lock()
			g.passed[m] = Counters{Packets: 11, LastPass: bootTime() + time.Millisecond}
			g.mu.Unlock()
		}
		return nil
	}
	rep := order(t, g.sw(), wire.Scope{Kid: "a1"}, wire.LayerNetwork)
	if lr := rep.Layers[wire.LayerNetwork]; lr.State != wire.StateObserved || !strings.Contains(lr.Detail, "further write") {
		t.Errorf("%+v", lr)
	}
}

func TestNothingThatHangsHoldsAStopUp(t *testing.T) {
	g := newRig(t, "a1")
	g.revoke = hang
	g.put = func(wire.Tag) error { select {} }
	g.log = func(audit.Record) { select {} }
	s := g.sw()
	s.t.Persist = 100 * time.Millisecond
	begin := time.Now()
	rep := order(t, s, wire.Scope{All: true})
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("took %v", took)
	}
	for _, l := range wire.AllLayers() {
		if rep.Layers[l].State != wire.StateObserved {
			t.Errorf("%s: %+v", l, rep.Layers[l])
		}
	}
	if rep.State != wire.StatePartial {
		t.Errorf("state %s, want partial: the tag is not on disk", rep.State)
	}
	if _, ok := s.Clear(wire.Scope{Kid: "new"}); ok {
		t.Error("a tag that the disk did not take does not hang")
	}
}

func TestFullDiskKeepsTheTagAndTriesAgain(t *testing.T) {
	g := newRig(t, "a1")
	full := true
	g.put = func(tag wire.Tag) error {
		g.mu.Lock()
		defer g.mu.Unlock()
		if full {
			return errors.New("no space left on device")
		}
		g.stored[tag.Stop] = tag
		return nil
	}
	s := g.sw()
	running(t, s)
	h, err := s.Stop(Order{StopRequest: wire.StopRequest{Scope: wire.Scope{Kid: "a1"}, By: "ada"}})
	if err != nil {
		t.Fatal(err)
	}
	var tagged wire.StopEvent
	final, err := h.Follow(context.Background(), func(e wire.StopEvent) error {
		if e.Point == pointTag {
			tagged = e
		}
		return nil
	})
	if err != nil || final.State != wire.StatePartial || tagged.State != wire.StatePartial || !strings.Contains(tagged.Detail, "no space left") {
		t.Errorf("final %+v, tag %+v, %v", final, tagged, err)
	}
	g.mu.Lock()
	full = false
	g.mu.Unlock()
	waitFor(t, "the tag on disk", func() bool { g.mu.Lock(); defer g.mu.Unlock(); return len(g.stored) == 1 })
}

// TestTwoAtOnce: two orders for the same thing are one stop with two acknowledgements, S04.
func TestTwoAtOnce(t *testing.T) {
	g := newRig(t, "a1")
	hold := make(chan struct{})
	g.revoke = func(context.Context, wire.RevokeRequest) (int, error) { <-hold; return 1, nil }
	s := g.sw()
	stop := func(by string) *Handle {
		h, err := s.Stop(Order{StopRequest: wire.StopRequest{Scope: wire.Scope{Kid: "a1"}, By: by, Reason: "r"}})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	first, same, other := stop("ada"), stop("ada"), stop("bob")
	close(hold)
	a, b, c := report(t, first), report(t, same), report(t, other)
	if a.Stop != b.Stop || a.Stop != c.Stop || a.State != wire.StateObserved || b.State != a.State || c.State != a.State {
		t.Errorf("reports %+v, %+v, %+v", a, b, c)
	}
	if n := g.count1("revoke"); n != 1 {
		t.Errorf("revoked %d times", n)
	}
	// Bob's stop must not end with Ada's release.
	if a.Tag.Stop != b.Tag.Stop || c.Tag.Stop == a.Tag.Stop || c.Tag.By != "bob" {
		t.Errorf("tags %+v and %+v", a.Tag, c.Tag)
	}
	if _, err := signRelease(t, s, a.Tag.Stop, "ada"); err != nil {
		t.Fatal(err)
	}
	if tag, ok := s.Clear(wire.Scope{Kid: "a1"}); ok || tag.By != "bob" {
		t.Errorf("cleared: %+v", tag)
	}
}

func TestEventsComeAsTheyHappen(t *testing.T) {
	g := newRig(t, "a1")
	hold := make(chan struct{})
	g.destroy = func(context.Context) (int, error) { <-hold; return 0, nil }
	h, err := g.sw().Stop(Order{StopRequest: wire.StopRequest{Scope: wire.Scope{Kid: "a1"}}})
	if err != nil {
		t.Fatal(err)
	}
	var seen []string
	final, err := h.Follow(context.Background(), func(e wire.StopEvent) error {
		seen = append(seen, fmt.Sprintf("%s %s %s", e.Layer, e.Point, e.State))
		if e.Point == pointCgroup && e.State == wire.StateObserved {
			close(hold) // the network layer is still at work when this arrives
		}
		return nil
	})
	if err != nil || final.Final == nil || final.Final.Stop != final.Stop {
		t.Fatalf("%+v, %v", final, err)
	}
	for _, want := range []string{"session cgroup fired", "session cgroup observed", "network bpf-session fired",
		"network bpf-session observed", "network sockets observed", "credential credd observed", " tag observed"} {
		if !slices.Contains(seen, want) {
			t.Errorf("no event %q in %q", want, seen)
		}
	}
	again, err := h.Follow(context.Background(), func(wire.StopEvent) error { return nil })
	if err != nil || again.Final == nil {
		t.Errorf("a late follower: %+v, %v", again, err)
	}
}
