package kids

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/wire"
)

// TestKilledAtEveryStep is K09: sandboxd is killed with -9 after each step of a spawn and of a destroy. Its successor
// leaves nothing of that kid, goes on with the one beside it, and can take the name again at once.
func TestKilledAtEveryStep(t *testing.T) {
	var steps []string
	m := &Manager{}
	for _, part := range m.course() {
		for _, lane := range part {
			for _, s := range lane {
				steps = append(steps, s.name)
			}
		}
	}
	for _, row := range m.undo() {
		for _, s := range row {
			steps = append(steps, s.name)
		}
	}
	if len(steps) < 20 {
		t.Fatalf("only %d steps: %v", len(steps), steps)
	}
	for _, at := range steps {
		t.Run(strings.ReplaceAll(at, " ", "-"), func(t *testing.T) {
			t.Setenv("TAGOUT_TEST_AT", at)
			b := newBox(t, "tsbkstep")
			doom(t, b)
			if err := b.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			if at == "start" { // it is whole, and whoever asked for it may ask again
				if got := fmt.Sprint(b.states()); got != "map[half:running whole:running]" {
					t.Fatalf("kids after the restart: %s", got)
				}
			} else {
				b.wantWholeAlone()
				b.spawn("half", plan())
			}
			for _, name := range []string{"whole", "half"} {
				if err := b.Destroy(t.Context(), name, "test", "end of the test"); err != nil {
					t.Fatal(err)
				}
			}
			b.wantNothingLeft()
		})
	}
}

// wantWholeAlone wants the kid that was whole to be there as it was, and nothing of the other.
func (b *box) wantWholeAlone() {
	b.t.Helper()
	if kids := b.List(b.t.Context()); len(kids) != 1 || kids[0].Name != "whole" || kids[0].State != wire.KidRunning {
		b.t.Fatalf("kids after the restart: %+v, want whole alone, running", kids)
	}
	for _, l := range b.leftovers() {
		if strings.Contains(l, "half") {
			b.t.Errorf("left of the other: %s", l)
		}
	}
	if r := b.sh("whole", "echo well"); r.stdout.String() != "well\n" {
		b.t.Errorf("a command in whole: %q %q", r.stdout.String(), r.stderr.String())
	}
}

// TestAnEndThatHadBegunGoesOn: a kid that cannot end when it is destroyed, and whose sandboxd is killed meanwhile, is not
// adopted as a living one.
func TestAnEndThatHadBegunGoesOn(t *testing.T) {
	b := newBox(t, "tsbbegun")
	b.spawn("k1", plan())
	b.guards.set("withdraw", context.DeadlineExceeded)
	b.fault = func(step string, done bool) error {
		if step == "end processes" {
			return context.DeadlineExceeded // as where one of them hangs in the kernel
		}
		return nil
	}
	if err := b.Destroy(t.Context(), "k1", "test", "it hangs"); KindOf(err) != Unavailable {
		t.Fatal(err)
	}
	if populated, err := cgroup.Populated(b.layout.V2(b.cgroupRel("k1"))); err != nil || !populated {
		t.Fatalf("the kid is not alive, %v: this shows nothing", err)
	}
	b.guards.set("withdraw", nil)
	b.succeed()
	if kids := b.List(t.Context()); len(kids) != 0 {
		t.Errorf("kids after the restart: %+v", kids)
	}
	if n := b.audit.count(audit.EventKidDestroyed, audit.OutcomeOK); n != 1 {
		t.Errorf("its end is recorded %d times", n)
	}
	b.wantNothingLeft()
}

// TestKilledWhileClaiming is K09 before the first step: a name whose directory is there, with less and less in it.
func TestKilledWhileClaiming(t *testing.T) {
	for name, claimed := range map[string]func(dir string) error{
		"nothing noted":    func(string) error { return nil },
		"half noted":       func(dir string) error { return os.WriteFile(filepath.Join(dir, recordName+".new"), []byte("{"), 0o600) },
		"an empty note":    func(dir string) error { return os.WriteFile(filepath.Join(dir, recordName), nil, 0o600) },
		"card half copied": func(dir string) error { return os.WriteFile(filepath.Join(dir, "card.yaml.new"), []byte("a"), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, "tsbclaim")
			dir := b.inst.KidDir("half")
			if err := os.Mkdir(dir, 0o711); err != nil {
				t.Fatal(err)
			}
			if err := claimed(dir); err != nil {
				t.Fatal(err)
			}
			b.succeed()
			b.wantNothingLeft()
			b.spawn("half", plan())
		})
	}
}
