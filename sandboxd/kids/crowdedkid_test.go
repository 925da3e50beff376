package kids

import (
	"cmp"
	"testing"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/wire"
)

// TestAKidThatIsFull of processes, so that nothing more can be started in it, answers every command in time, is stopped as any
// other, and fails alone.
func TestAKidThatIsFull(t *testing.T) {
	b := newBox(t, "tsbfork2")
	p := plan()
	p.Limits.PIDs = 40
	b.spawn("k1", p)
	b.spawn("k2", p)
	b.sh("k1", "(while :; do sleep 1000 & done) >/dev/null 2>&1 &")
	eventually(t, "the kid to be full", func() bool {
		n, err := cgroup.Tasks(cmp.Or(b.layout.V1("pids", b.cgroupRel("k1")), b.layout.V2(b.cgroupRel("k1"))), b.layout.V2(b.cgroupRel("k1")))
		return err == nil && n >= 39 // the shell ends when it cannot fork
	})
	failed := 0
	for range 6 {
		began := time.Now()
		r, err := runExec(t.Context(), b.Manager, "k1", wire.ExecRequest{Argv: []string{"sh", "-c", "true | true"}, Timeout: 2 * time.Second})
		if took := time.Since(began); took > 8*time.Second {
			t.Errorf("a command took %v", took)
		}
		if err != nil || r.exit.Result != resultExited || r.exit.Code != 0 {
			failed++
		}
	}
	if failed == 0 {
		t.Error("commands run in it: the test shows nothing")
	}
	if r := b.sh("k2", "true | true && echo well"); r.stdout.String() != "well\n" {
		t.Errorf("its neighbour: %q %q", r.stdout.String(), r.stderr.String())
	}
	for _, kid := range []string{"k1", "k2"} {
		if err := b.Destroy(t.Context(), kid, "test", "full"); err != nil {
			t.Error(err)
		}
	}
	b.wantNothingLeft()
}
