package killswitch

import (
	"errors"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/wire"
)

// leased is a switch whose enforcement has gone round once, with a clock that the test moves. Kids are born now.
func leased(t *testing.T, g *rig) (*Switch, *fakeClock) {
	s := g.sw()
	clock := newClock(s)
	s.kids.renewed = clock.now() // New read the real clock
	for _, d := range g.docs {
		d.Boot = clock.now()
	}
	s.tick()
	return s, clock
}

// pass lets time pass as a working killswitchd sees it: enforcement and the look at the kids go round.
func pass(s *Switch, clock *fakeClock, d time.Duration) {
	for left := d; left > 0; left -= time.Second {
		clock.forward(min(left, time.Second))
		s.tick()
		s.lookAtKids(clock.now())
	}
}

func leaseTags(s *Switch) (out []wire.Tag) {
	for _, t := range s.Tags() {
		if t.Cause == CauseLease {
			out = append(out, t)
		}
	}
	return out
}

// TestAKidLeaseThatRunsOut fires what each card chose, once, and says what was not well.
func TestAKidLeaseThatRunsOut(t *testing.T) {
	g := newRig(t, "a1", "b1")
	g.docs["b1"].Stop.Lease.Fires = []wire.Layer{wire.LayerNetwork}
	s, clock := leased(t, g)
	for range 4 { // renewed for longer than a lease
		pass(s, clock, 10*time.Second)
		if left, err := s.RenewKids(wire.LeaseRequest{}); err != nil || left != s.t.KidLease {
			t.Fatalf("left %v, %v", left, err)
		}
	}
	if n := len(s.Tags()); n != 0 {
		t.Fatalf("%d tags while everything is well", n)
	}
	pass(s, clock, 25*time.Second)
	left, err := s.RenewKids(wire.LeaseRequest{Unwell: []string{"proxy: nobody serves it"}})
	if err != nil || left != 5*time.Second {
		t.Errorf("a word that renews nothing leaves %v, %v", left, err)
	}
	pass(s, clock, 5*time.Second)
	if n := len(s.Tags()); n != 0 {
		t.Fatalf("%d tags before the lease has run out", n)
	}
	pass(s, clock, 30*time.Second) // for long: it fires once
	tags := leaseTags(s)
	if len(tags) != 2 {
		t.Fatalf("tags %+v", tags)
	}
	for _, tag := range tags {
		want := map[string][]wire.Layer{"a1": wire.AllLayers(), "b1": {wire.LayerNetwork}}[tag.Scope.Kid]
		if !slices.Equal(tag.Layers, want) || tag.By != Killswitchd || !strings.Contains(tag.Reason, "proxy: nobody serves it") {
			t.Errorf("tag %+v, want layers %v", tag, want)
		}
	}
	waitFor(t, "the stops' ends", s.Idle)
	if g.alive[kidsDir+"/a1"] != 0 || g.alive[kidsDir+"/b1"] == 0 || !g.state[g.docs["b1"].Mark] {
		t.Errorf("alive %v, stopped %v", g.alive, g.state)
	}
	s.audit.flush(t.Context())
	if recs := g.recorded(audit.EventLeaseExpired); len(recs) != 1 || recs[0].Count != 2 || !strings.Contains(recs[0].Detail, "proxy") {
		t.Errorf("recorded %+v", recs)
	}
	if recs := g.recorded(audit.EventLeaseWithheld); len(recs) != 1 {
		t.Errorf("recorded %+v", recs)
	}
}

// TestASilentSandboxd: nobody says anything. The tag says that, and what can be seen of sandboxd.
func TestASilentSandboxd(t *testing.T) {
	g := newRig(t, "a1")
	s, clock := leased(t, g)
	s.cfg.Around.Daemons = map[string]string{"sandboxd": "/cg/sandboxd", "proxy": "/cg/proxy"}
	g.alive["/cg/sandboxd"], g.alive["/cg/proxy"] = 0, 1
	s.RenewKids(wire.LeaseRequest{})
	pass(s, clock, s.t.KidLease+time.Second)
	tags := leaseTags(s)
	if len(tags) != 1 || !strings.Contains(tags[0].Reason, "sandboxd has said nothing for 31s") ||
		!strings.Contains(tags[0].Reason, "sandboxd is not running") || strings.Contains(tags[0].Reason, "proxy") {
		t.Errorf("tags %+v", tags)
	}
}

// TestWhoeverIsNewHasAWholeLease: a killswitchd that starts, and a kid.
func TestWhoeverIsNewHasAWholeLease(t *testing.T) {
	g := newRig(t, "a1", "b1")
	s, clock := leased(t, g) // nobody has renewed anything yet
	pass(s, clock, s.t.KidLease-10*time.Second)
	g.docs["b1"].Boot = clock.now()
	pass(s, clock, 11*time.Second)
	if tags := leaseTags(s); len(tags) != 1 || tags[0].Scope.Kid != "a1" {
		t.Fatalf("after a lease without a renewal: %+v", tags)
	}
	pass(s, clock, s.t.KidLease)
	if tags := leaseTags(s); len(tags) != 2 {
		t.Errorf("a lease after its birth: %+v", tags)
	}
	g.add("c1", "card-c", 0x54100009)
	g.docs["c1"].Boot = clock.now() + time.Hour // a document that would live for ever
	pass(s, clock, time.Second)
	if tags := leaseTags(s); len(tags) != 3 {
		t.Errorf("a kid from the future: %+v", tags)
	}
}

// lookMetrics counts the looks at the kids' lease.
type lookMetrics struct {
	noMetrics
	n atomic.Int64
}

func (m *lookMetrics) KidLease(_, _ time.Duration) { m.n.Add(1) }

// TestASuspendedMachine (S14): the boot clock goes on for ten minutes, in which nothing ran. Nobody is stopped for
// that, and what was unwell before still stops the kids, a lease later.
func TestASuspendedMachine(t *testing.T) {
	g := newRig(t, "a1")
	s, clock := leased(t, g)
	looks := &lookMetrics{}
	s.cfg.Metrics = looks
	running(t, s)
	s.RenewKids(wire.LeaseRequest{})
	rounds := func() { // both loops come round on the new time
		t.Helper()
		n, looked := s.Ticks(), looks.n.Load()
		waitFor(t, "both loops", func() bool { return s.Ticks() > n+1 && looks.n.Load() > looked+1 })
	}
	rounds()
	clock.forward(10 * time.Minute)
	waitFor(t, "a note of it", func() bool { return len(g.recorded(audit.EventLeaseRenewed)) == 1 })
	rounds()
	if n := len(s.Tags()); n != 0 {
		t.Fatalf("%d tags after a suspension", n)
	}
	until := clock.now() + s.t.KidLease
	for clock.now() < until+time.Second {
		clock.forward(time.Second)
		rounds()
	}
	waitFor(t, "the lease runs out all the same", func() bool { return len(leaseTags(s)) == 1 })
}

// TestALeaseNeedsNoTimeToPassOnAnyOtherClock (S14): the boot clock alone decides.
func TestALeaseNeedsNoTimeToPassOnAnyOtherClock(t *testing.T) {
	g := newRig(t, "a1")
	s, clock := leased(t, g)
	pass(s, clock, s.t.KidLease)
	if len(s.Tags()) != 0 {
		t.Error("stopped before the boot clock said so")
	}
	pass(s, clock, time.Second)
	if len(leaseTags(s)) != 1 {
		t.Error("not stopped although the boot clock said so")
	}
}

// TestLostDocuments: of such a kid all layers fire, and of an empty cgroup without a document none.
func TestLostDocuments(t *testing.T) {
	g := newRig(t, "a1", "a2")
	s, clock := leased(t, g)
	g.bad["a1"] = errors.New("unexpected end of JSON input")
	g.bad["a2"], g.alive[kidsDir+"/a2"] = fs.ErrNotExist, 0
	pass(s, clock, s.t.KidLease+time.Second)
	tags := leaseTags(s)
	if len(tags) != 1 || tags[0].Scope.Kid != "a1" || len(tags[0].Layers) != 3 {
		t.Fatalf("tags %+v", tags)
	}
}

// TestAStopOfAKidWhoseDocumentIsLost (S04): the kernel knows its mark and address.
func TestAStopOfAKidWhoseDocumentIsLost(t *testing.T) {
	g := newRig(t, "a1", "a2")
	s := g.sw()
	g.bad["a1"] = errors.New("unexpected end of JSON input")
	rep := order(t, s, wire.Scope{Kid: "a1"})
	if mark := g.docs["a1"].Mark; rep.State != wire.StateObserved || !slices.Equal(rep.Tag.Marks, []uint32{mark}) || !g.state[mark] {
		t.Errorf("report %+v, stopped %v", rep, g.state)
	}
	g.bad["a2"] = fs.ErrNotExist // the same with no document at all
	if rep := order(t, s, wire.Scope{Kid: "a2"}); rep.State != wire.StateObserved || !g.state[g.docs["a2"].Mark] {
		t.Errorf("report %+v, stopped %v", rep, g.state)
	}
}

func TestARenewalOverTheSocket(t *testing.T) {
	g := newRig(t, "a1")
	s, clock := leased(t, g)
	_, c := serve(t, s)
	var reply wire.LeaseReply
	ask := func() error {
		return c.Call(t.Context(), http.MethodPost, "/v1/lease", wire.LeaseRequest{}, &reply)
	}
	if os.Getuid() != 0 {
		if err := ask(); control.Status(err) != http.StatusForbidden {
			t.Errorf("somebody else renewed the lease: %v", err)
		}
		return
	}
	if err := ask(); err != nil || reply.Left != s.t.KidLease {
		t.Errorf("%+v, %v", reply, err)
	}
	clock.forward(s.t.KernelLease + 1) // enforcement stands still
	if err := ask(); control.Status(err) != http.StatusServiceUnavailable {
		t.Errorf("a switch that enforces nothing renewed: %v", err)
	}
}

func TestLongWordsAreCut(t *testing.T) {
	g := newRig(t, "a1")
	s, clock := leased(t, g)
	pass(s, clock, s.t.KidLease-time.Second)
	s.RenewKids(wire.LeaseRequest{Unwell: slices.Repeat([]string{strings.Repeat("x", 5000)}, 100)})
	pass(s, clock, 2*time.Second)
	if tags := leaseTags(s); len(tags) != 1 || len(tags[0].Reason) > 2000 {
		t.Errorf("%d tags, the first with %d bytes", len(tags), len(tags[0].Reason))
	}
}
