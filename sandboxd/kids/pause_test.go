package kids

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/wire"
)

// ticks starts a command that counts in a file of the kid's workspace, and returns how to read the count.
func (b *box) ticks(kid string) func() int {
	b.t.Helper()
	b.sh(kid, "(i=0; while :; do i=$((i+1)); echo $i > tick.new; mv tick.new tick; sleep .005; done) >/dev/null 2>&1 &")
	read := func() int {
		raw, err := os.ReadFile(filepath.Join(b.inst.KidDir(kid), "workspace", "tick"))
		if err != nil {
			return 0
		}
		n, _ := strconv.Atoi(strings.TrimSpace(string(raw))) // 0 where it is not there yet
		return n
	}
	eventually(b.t, "the kid to count", func() bool { return read() > 2 })
	return read
}

func TestPauseHoldsEverything(t *testing.T) {
	b := newBox(t, "tsbpause")
	b.spawn("k1", plan())
	count := b.ticks("k1")
	for range 2 { // the second finds it so
		if err := b.Pause(t.Context(), "k1", "test", "lunch"); err != nil {
			t.Fatal(err)
		}
	}
	if k, err := b.Get(t.Context(), "k1"); err != nil || k.State != wire.KidPaused {
		t.Fatalf("%+v, %v", k, err)
	}
	before := count()
	if _, err := runExec(t.Context(), b.Manager, "k1", wire.ExecRequest{Argv: []string{"true"}}); KindOf(err) != Conflict || !strings.Contains(err.Error(), "paused") {
		t.Errorf("exec in a paused kid: %v", err)
	}
	b.spawn("k2", plan()) // takes far longer than a tick
	if after := count(); after != before {
		t.Errorf("it counted on from %d to %d", before, after)
	}
	if err := b.Resume(t.Context(), "k1", "test", "back"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the kid to count on", func() bool { return count() > before })
	if p, r := b.audit.count(audit.EventKidPaused, audit.OutcomeOK), b.audit.count(audit.EventKidResumed, audit.OutcomeOK); p != 1 || r != 1 {
		t.Errorf("%d pauses and %d resumes recorded, want one each", p, r)
	}
}

// TestResumeAsksForTags: nothing goes on under a tag, or where nobody can say whether one hangs.
func TestResumeAsksForTags(t *testing.T) {
	b := newBox(t, "tsbresume")
	b.spawn("k1", plan())
	if err := b.Pause(t.Context(), "k1", "test", ""); err != nil {
		t.Fatal(err)
	}
	b.guards.set("clear", context.DeadlineExceeded)
	if err := b.Resume(t.Context(), "k1", "test", ""); KindOf(err) != Unavailable {
		t.Errorf("resume without an answer: %v", err)
	}
	b.guards.set("clear", nil)
	b.guards.tag(wire.Tag{Scope: wire.Scope{Kid: "k1"}, By: "ada"})
	if err := b.Resume(t.Context(), "k1", "test", ""); KindOf(err) != Tagged || !strings.Contains(err.Error(), "ada") {
		t.Errorf("resume under a tag: %v", err)
	}
	if frozen, err := cgroup.Frozen(b.layout.V2(b.cgroupRel("k1"))); err != nil || !frozen {
		t.Errorf("frozen %v, %v", frozen, err)
	}
	b.List(t.Context()) // sees the stop
	b.guards.mu.Lock()
	b.guards.tags = nil
	b.guards.mu.Unlock()
	if err := b.Resume(t.Context(), "k1", "test", ""); KindOf(err) != Conflict {
		t.Errorf("resume after the release: %v", err)
	}
	if k, err := b.Get(t.Context(), "k1"); err != nil || k.State != wire.KidStopped {
		t.Errorf("%+v, %v", k, err)
	}
}

// TestAPausedKidDiesAtOnce: a stop is one write to cgroup.kill, and nothing has to be thawed first.
func TestAPausedKidDiesAtOnce(t *testing.T) {
	b := newBox(t, "tsbpkill")
	b.spawn("k1", plan())
	b.ticks("k1")
	if err := b.Pause(t.Context(), "k1", "test", ""); err != nil {
		t.Fatal(err)
	}
	dir := b.layout.V2(b.cgroupRel("k1"))
	if err := cgroup.Kill(dir); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := cgroup.WaitEmpty(ctx, dir); err != nil {
		t.Error(err)
	}
	eventually(t, "the kid to be seen dead", func() bool {
		k, err := b.Get(t.Context(), "k1")
		return err == nil && k.State == wire.KidExited
	})
}

// TestDestroyInEveryState is K13: it works, and the second time too.
func TestDestroyInEveryState(t *testing.T) {
	b := newBox(t, "tsbevery")
	reach := map[wire.KidState]func(){
		wire.KidRunning: func() { b.spawn("k1", plan()) },
		wire.KidPaused: func() {
			b.spawn("k1", plan())
			b.ticks("k1")
			if err := b.Pause(t.Context(), "k1", "test", ""); err != nil {
				t.Fatal(err)
			}
		},
		wire.KidExited: func() {
			b.spawn("k1", plan())
			if err := cgroup.Kill(b.layout.V2(b.cgroupRel("k1"))); err != nil {
				t.Fatal(err)
			}
		},
		wire.KidOOM: func() {
			b.spawn("k1", hungry())
			b.sh("k1", hog)
		},
		wire.KidStopped: func() {
			k := b.spawn("k1", plan())
			b.guards.tag(wire.Tag{Marks: []uint32{k.Mark}, By: "ada"})
		},
		wire.KidDestroying: func() {
			b.spawn("k1", plan())
			b.guards.set("forget", context.DeadlineExceeded)
			if err := b.Destroy(t.Context(), "k1", "test", "early"); KindOf(err) != Unavailable {
				t.Fatal(err)
			}
			b.guards.set("forget", nil)
		},
	}
	for state, to := range reach {
		to()
		eventually(t, "the kid to be "+string(state), func() bool {
			k, err := b.Get(t.Context(), "k1")
			return err == nil && k.State == state
		})
		if err := b.Destroy(t.Context(), "k1", "test", " "); KindOf(err) != Invalid {
			t.Errorf("%s: destroy without a reason: %v", state, err)
		}
		both := make(chan error, 2)
		for range 2 {
			go func() { both <- b.Destroy(context.WithoutCancel(t.Context()), "k1", "test", "done") }()
		}
		for range 2 {
			if err := <-both; err != nil {
				t.Errorf("%s: %v", state, err)
			}
		}
		if err := b.Destroy(t.Context(), "k1", "test", "again"); err != nil {
			t.Errorf("%s: once more: %v", state, err)
		}
		b.wantNothingLeft()
	}
}

// TestDestroyWhileSpawning is K13 for every step of a spawn: the destroy does not wait for the spawn's end.
func TestDestroyWhileSpawning(t *testing.T) {
	b := newBox(t, "tsbspwn")
	for _, s := range b.steps() {
		reached, spawned := make(chan struct{}), make(chan error, 1)
		gone := context.WithoutCancel(t.Context())
		b.fault = func(step string, done bool) error {
			if step == s.name && done {
				close(reached)
				eventually(t, "the destroy", func() bool { return b.is(b.kid("k1"), wire.KidDestroying) })
			}
			return nil
		}
		go func() {
			_, err := b.Spawn(gone, Request{Name: "k1", Purpose: "test", Plan: plan()})
			spawned <- err
		}()
		<-reached
		for range 2 {
			if err := b.Destroy(gone, "k1", "test", "done"); err != nil {
				t.Errorf("after step %s: %v", s.name, err)
			}
		}
		if err := <-spawned; KindOf(err) != Conflict {
			t.Errorf("after step %s the spawn says: %v", s.name, err)
		}
		b.wantNothingLeft()
	}
}

// kid returns the kid called name.
func (b *box) kid(name string) *kid {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.kids[name]
}

// TestPausedKidIsAdopted: a successor finds it paused, and can let it go on.
func TestPausedKidIsAdopted(t *testing.T) {
	b := newBox(t, "tsbpadopt")
	doom(t, b)
	dir := b.layout.V2(b.cgroupRel("whole"))
	if err := cgroup.Freeze(dir, ""); err != nil {
		t.Fatal(err)
	}
	if err := cgroup.WaitFrozen(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(b.states()); got != "map[whole:paused]" {
		t.Fatalf("after the restart: %s", got)
	}
	if err := b.Resume(t.Context(), "whole", "test", ""); err != nil {
		t.Fatal(err)
	}
	if r := b.sh("whole", "echo on"); r.stdout.String() != "on\n" {
		t.Errorf("%q %q", r.stdout.String(), r.stderr.String())
	}
}

func (b *box) states() map[string]wire.KidState {
	out := map[string]wire.KidState{}
	for _, k := range b.List(b.t.Context()) {
		out[k.Name] = k.State
	}
	return out
}
