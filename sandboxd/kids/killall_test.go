package kids

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/wire"
)

// TestKillAllNeedsNobody (S13): processes, packets and tokens of every kid are gone, the frozen one's too, and it is
// recorded; a second call finds nothing.
func TestKillAllNeedsNobody(t *testing.T) {
	b := newBox(t, "tkidskill")
	for _, name := range []string{"one", "two"} {
		b.spawn(name, plan())
	}
	b.guards.mu.Lock()
	b.guards.fail["clear"], b.guards.fail["tags"] = errors.New("nobody answers"), errors.New("nobody answers")
	b.guards.mu.Unlock()
	frozen := map[string]string{filepath.Join(b.Manager.kids["two"].rec.Session.Cgroup, "cgroup.freeze"): "1"}
	if dir := b.Manager.kids["two"].rec.Session.Freezer; dir != "" {
		frozen = map[string]string{filepath.Join(dir, "freezer.state"): "FROZEN"}
	}
	for file, state := range frozen {
		if err := os.WriteFile(file, []byte(state), 0); err != nil {
			t.Fatal(err)
		}
	}
	n, err := b.KillAll(t.Context(), "killswitchd has not answered for 20s")
	if n != 2 || err != nil {
		t.Fatalf("%d kids, %v", n, err)
	}
	if some, err := cgroup.Populated(b.layout.V2(b.inst.KidsCgroupRel())); some || err != nil {
		t.Errorf("something lives: %v", err)
	}
	b.guards.mu.Lock()
	if len(b.guards.stopped) != 2 || len(b.guards.tokens) != 0 {
		t.Errorf("stopped in the kernel %v, tokens left %v", b.guards.stopped, b.guards.tokens)
	}
	b.guards.mu.Unlock()
	for _, k := range b.List(t.Context()) {
		if k.State != wire.KidStopped {
			t.Errorf("%s is %s", k.Name, k.State)
		}
	}
	if n := b.audit.count(audit.EventKidKilled, audit.OutcomeOK); n != 2 {
		t.Errorf("%d of 2 kids were recorded", n)
	}
	if n, err := b.KillAll(t.Context(), "again"); n != 0 || err != nil {
		t.Errorf("again: %d kids, %v", n, err)
	}
}
