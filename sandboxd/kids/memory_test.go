package kids

import (
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// hog uses more memory than hungry has.
const hog = "dd if=/dev/zero of=/dev/null bs=200M count=1"

func hungry() Plan {
	p := plan()
	p.Limits.Memory = 64 << 20
	return p
}

// wantOOM is what is to be seen of a kid that ran out of memory.
func (b *box) wantOOM(name string) {
	b.t.Helper()
	eventually(b.t, "the kid to be out of memory, and empty", func() bool {
		k, err := b.Get(b.t.Context(), name)
		some, someErr := cgroup.Populated(b.layout.V2(b.cgroupRel(name)))
		return err == nil && k.State == wire.KidOOM && someErr == nil && !some
	})
	k, err := b.Get(b.t.Context(), name)
	if err != nil || !strings.Contains(k.Cause, "oom_kill 1") && !strings.Contains(k.Cause, "oom_kill 2") || !strings.Contains(k.Cause, "67108864 bytes") {
		b.t.Errorf("cause %q, %v", k.Cause, err)
	}
	err = b.Exec(b.t.Context(), name, "test", wire.ExecRequest{Argv: []string{"true"}}, func(wire.ExecFrame) error { return nil })
	if KindOf(err) != Conflict || ReasonOf(err) != reason.OutOfMemory || !strings.Contains(err.Error(), k.Cause) {
		b.t.Errorf("a command afterwards: %v", err)
	}
}

// TestOutOfMemory is K08: one process asks for too much, and the kid ends whole, for good, and says why.
func TestOutOfMemory(t *testing.T) {
	b := newBox(t, "tsboom")
	b.spawn("k1", hungry())
	other := b.detached("k1", wire.ExecRequest{Argv: []string{"sleep", "300"}})
	b.sh("k1", "sleep 301 >/dev/null 2>&1 &")
	if r := b.sh("k1", hog); r.exit.Result != resultOOM || r.exit.Code != codeKilled || !strings.Contains(r.exit.Detail, "out of memory") {
		t.Errorf("the command that asked for too much: %+v", r.exit)
	}
	b.wantOOM("k1")
	eventually(t, "the other command to end", func() bool {
		e, err := b.ExecStatus(t.Context(), "k1", other)
		return err == nil && e.Exit != nil && e.Exit.Result == resultOOM
	})
	if n := b.audit.count(audit.EventKidOOM, audit.OutcomeOK); n != 1 {
		t.Errorf("%d records, want 1", n)
	}
	if err := b.Resume(t.Context(), "k1", "test", ""); KindOf(err) != Conflict {
		t.Errorf("resume: %v", err)
	}
	b.guards.tag(wire.Tag{Scope: wire.Scope{Kid: "k1"}, By: "ada"})
	b.wantOOM("k1") // a stop does not hide why it ended
	b.succeed()
	b.wantOOM("k1")
	for range 2 {
		if err := b.Destroy(t.Context(), "k1", "test", "seen"); err != nil {
			t.Fatal(err)
		}
	}
	b.wantNothingLeft()
}

// TestOutOfMemoryInTheBackground: nobody waits for the process that asks for too much.
func TestOutOfMemoryInTheBackground(t *testing.T) {
	b := newBox(t, "tsboomb")
	b.spawn("k1", hungry())
	b.sh("k1", "("+hog+") >/dev/null 2>&1 &")
	b.wantOOM("k1")
}

// TestOutOfMemoryAfterARestart: commands have memory cgroups of their own then, where v1 controllers are.
func TestOutOfMemoryAfterARestart(t *testing.T) {
	b := newBox(t, "tsbooma")
	b.unwatched = true // the predecessor is dead
	b.spawn("k1", hungry())
	b.succeed()
	if r := b.sh("k1", hog); r.exit.Result != resultOOM {
		t.Errorf("%+v", r.exit)
	}
	b.wantOOM("k1")
	if n := b.audit.count(audit.EventKidOOM, audit.OutcomeOK); n != 1 {
		t.Errorf("%d records, want 1", n)
	}
}

// TestOutOfMemoryUnwatched: the same with nobody watching, as while sandboxd is down, leaves a kid that does not say what
// happened, on v1 one that half lives; its successor finds that out and ends it.
func TestOutOfMemoryUnwatched(t *testing.T) {
	b := newBox(t, "tsboomu")
	b.unwatched = true
	b.spawn("k1", hungry())
	b.detached("k1", wire.ExecRequest{Argv: []string{"sleep", "300"}})
	if r := b.sh("k1", hog); r.exit.Result == resultOOM {
		t.Errorf("somebody watches: %+v", r.exit)
	}
	k, err := b.Get(t.Context(), "k1")
	if err != nil || k.State == wire.KidOOM {
		t.Errorf("%s, %v", k.State, err)
	}
	some, err := cgroup.Populated(b.layout.V2(b.cgroupRel("k1")))
	if err != nil || some != b.layout.Hybrid() {
		t.Errorf("the rest of it runs: %v, %v", some, err)
	}
	b.succeed()
	b.wantOOM("k1")
	if n := b.audit.count(audit.EventKidOOM, audit.OutcomeOK); n != 1 {
		t.Errorf("%d records, want 1", n)
	}
	if err := b.Destroy(t.Context(), "k1", "test", "seen"); err != nil {
		t.Fatal(err)
	}
	b.wantNothingLeft()
}
