package kids

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
)

// run runs the manager until the test ends.
func (b *box) run() {
	b.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(b.t.Context()))
	done := make(chan struct{})
	m := b.Manager
	go func() { m.Run(ctx); close(done) }()
	b.t.Cleanup(func() { cancel(); <-done })
}

// why returns the reason with which the kid's destroy was recorded, "" where it was not.
func (b *box) why(kid string) string {
	b.audit.mu.Lock()
	defer b.audit.mu.Unlock()
	for _, r := range b.audit.all {
		if r.Event == audit.EventKidDestroyed && r.Kid == kid {
			return r.Detail
		}
	}
	return ""
}

func (b *box) waitGone(kid, why string) {
	b.t.Helper()
	eventually(b.t, kid+" to be gone", func() bool { return b.kid(kid) == nil })
	if got := b.why(kid); !strings.HasPrefix(got, why) {
		b.t.Errorf("%s was destroyed because %q, want %q", kid, got, why)
	}
}

// TestForgottenKidsGo: what nothing runs in, and what is too old, is destroyed; what is in use is not.
func TestForgottenKidsGo(t *testing.T) {
	b := newBox(t, "tsbidle")
	b.run()
	idle, old, none := plan(), plan(), plan()
	idle.Idle, old.Lifetime = time.Second, 3*time.Second
	b.spawn("never", none)
	b.spawn("used", idle)
	b.sh("used", "sleep 3600 >/dev/null 2>&1 &")
	b.spawn("idle", idle)
	b.spawn("paused", idle)
	b.sh("paused", "sleep 3600 >/dev/null 2>&1 &")
	if err := b.Pause(t.Context(), "paused", "test", ""); err != nil {
		t.Fatal(err)
	}
	k := b.spawn("old", old)
	if k.Ends.Sub(k.Created) != 3*time.Second || k.Idle != 0 {
		t.Errorf("shown: %+v", k)
	}
	b.sh("old", "sleep 3600 >/dev/null 2>&1 &")
	b.waitGone("idle", "idle: ")
	b.waitGone("paused", "idle: ")
	b.waitGone("old", "lifetime: ")
	if got := b.states(); got["used"] != wire.KidRunning || got["never"] != wire.KidRunning {
		t.Errorf("of those that are in use, or have no limit: %v", got)
	}
	b.sh("used", "kill $(pidof sleep)")
	b.waitGone("used", "idle: ")
}

// TestAStoppedKidIsNotIdle: it is somebody's case, until its lifetime is over.
func TestAStoppedKidIsNotIdle(t *testing.T) {
	b := newBox(t, "tsbcase")
	p := plan()
	p.Idle, p.Lifetime = time.Second, 4*time.Second
	k := b.spawn("k1", p)
	b.guards.tag(wire.Tag{Marks: []uint32{k.Mark}})
	b.List(t.Context()) // sees the stop
	b.run()
	b.waitGone("k1", "lifetime: ")
}

// TestLimitsSurviveARestart: the clocks go on, whoever looks at them.
func TestLimitsSurviveARestart(t *testing.T) {
	b := newBox(t, "tsbclock")
	p := plan()
	p.Idle, p.Lifetime = time.Hour, 2*time.Second
	k := b.spawn("k1", p)
	p.Lifetime = time.Hour
	b.spawn("k2", p)
	b.Manager = makeManager(t, b.inst, b.layout, initPath, b.guards, b.audit)
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := b.Get(t.Context(), "k1"); err != nil || !got.Ends.Equal(k.Ends) || got.Idle != time.Hour {
		t.Errorf("after the restart: %+v, %v, want it to end at %v", got, err, k.Ends)
	}
	b.run()
	b.waitGone("k1", "lifetime: ")
	if got := b.states(); got["k2"] != wire.KidRunning {
		t.Errorf("the other kid: %v", got)
	}
}

// TestForgottenAndNotRemovable: the reason is recorded once, and the rest is finished later.
func TestForgottenAndNotRemovable(t *testing.T) {
	b := newBox(t, "tsbstuck")
	b.guards.set("forget", errors.New("hung"))
	p := plan()
	p.Lifetime = time.Second
	b.spawn("k1", p)
	b.run()
	eventually(t, "the failed destroy", func() bool { return b.audit.count(audit.EventKidDestroyed, audit.OutcomeFail) == 1 })
	b.guards.set("forget", nil)
	eventually(t, "the kid to be gone", func() bool { return b.kid("k1") == nil })
	if n := b.audit.count(audit.EventKidDestroyed, audit.OutcomeOK); n != 1 {
		t.Errorf("%d records say that it is gone", n)
	}
	b.wantNothingLeft()
}

// hold holds the kid in the background and returns how to let it go, and what Hold returned then.
func (b *box) hold(kid string, ending <-chan struct{}) (letGo func() error) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(b.t.Context()))
	held, done := make(chan struct{}), make(chan error, 1)
	m := b.Manager
	go func() { done <- m.Hold(ctx, kid, "test", ending, func() error { close(held); return nil }) }()
	select {
	case <-held:
	case err := <-done:
		b.t.Fatal(err)
	}
	return func() error { cancel(); return <-done }
}

func (b *box) spawnHeld(name string) {
	b.t.Helper()
	if _, err := b.Spawn(b.t.Context(), Request{Name: name, Purpose: "test", Held: true, Plan: plan()}); err != nil {
		b.t.Fatal(err)
	}
}

func TestAHeldKidGoesWithItsHolder(t *testing.T) {
	b := newBox(t, "tsbheld")
	b.run()
	b.spawnHeld("k1")
	first, second := b.hold("k1", nil), b.hold("k1", nil)
	if err := first(); err != nil || b.kid("k1") == nil {
		t.Fatalf("one of two let go: %v", err)
	}
	if err := second(); err != nil || b.kid("k1") != nil {
		t.Errorf("both let go: %v, and the kid is there: %v", err, b.kid("k1") != nil)
	}
	b.waitGone("k1", "holder gone")
	b.spawn("detached", plan())
	if err := b.Hold(t.Context(), "detached", "test", nil, nil); KindOf(err) != Conflict {
		t.Errorf("holding a kid that is not held: %v", err)
	}
	b.spawnHeld("k2")
	letGo := b.hold("k2", nil)
	if err := b.Destroy(t.Context(), "k2", "test", "done"); err != nil {
		t.Fatal(err)
	}
	if err := letGo(); err != nil {
		t.Errorf("its holder hears %v", err)
	}
}

// TestNobodyHoldsIt: whoever spawned it was killed before it could hold it. The lease is shortened as if time had gone by.
func TestNobodyHoldsIt(t *testing.T) {
	b := newBox(t, "tsblease")
	b.spawnHeld("k1")
	b.spawnHeld("k2")
	b.hold("k2", nil)
	b.mu.Lock()
	b.kids["k1"].time.lease, b.kids["k2"].time.lease = 1, 1
	b.mu.Unlock()
	b.run()
	b.waitGone("k1", "holder gone")
	if b.kid("k2") == nil {
		t.Error("the kid that is held went too")
	}
}

// TestHoldersComeBack: a sandboxd that ends destroys nothing, and its successor gives holders time.
func TestHoldersComeBack(t *testing.T) {
	b := newBox(t, "tsbback")
	b.spawnHeld("k1")
	ending := make(chan struct{})
	letGo := b.hold("k1", ending)
	close(ending)
	if err := letGo(); err != nil || b.kid("k1") == nil {
		t.Fatalf("sandboxd ended: %v", err)
	}
	b.Manager = makeManager(t, b.inst, b.layout, initPath, b.guards, b.audit)
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.run()
	again := b.hold("k1", nil)
	if err := again(); err != nil {
		t.Error(err)
	}
	b.waitGone("k1", "holder gone")
}
