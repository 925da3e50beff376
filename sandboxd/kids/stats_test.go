package kids

import (
	"testing"
	"time"

	"tagout/internal/wire"
)

// TestStats: what a kid's commands use is counted, and nobody else's; control: the kid beside it that does nothing.
func TestStats(t *testing.T) {
	b := newBox(t, "tsbstats")
	b.spawn("busy", plan())
	b.spawn("quiet", plan())
	stats := func(kid string) wire.KidStats {
		t.Helper()
		s, err := b.Stats(t.Context(), kid)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	before := stats("busy")
	b.sh("busy", "head -c 16777216 /dev/urandom > /workspace/f; i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sleep 3600 >/dev/null 2>&1 & sleep 3600 >/dev/null 2>&1 &")
	busy, quiet := stats("busy"), stats("quiet")
	used := func(s wire.KidStats) time.Duration { return s.CPU.User + s.CPU.System }
	if used(busy)-used(before) < 50*time.Millisecond || used(busy) <= 2*used(quiet) {
		t.Errorf("processor time: %v, before %v, the quiet one %v", used(busy), used(before), used(quiet))
	}
	if busy.Memory.Current < 16<<20 || busy.Memory.Limit != 256<<20 || busy.Memory.Peak == nil || *busy.Memory.Peak < busy.Memory.Current || quiet.Memory.Current > 16<<20 {
		t.Errorf("memory: %+v, the quiet one %+v", busy.Memory, quiet.Memory)
	}
	if busy.PIDs.Current < quiet.PIDs.Current+2 || busy.PIDs.Limit != 64 || busy.CPU.Limit != 1 || busy.State != wire.KidRunning {
		t.Errorf("processes: %+v, the quiet one %+v; limit %v", busy.PIDs, quiet.PIDs, busy.CPU.Limit)
	}
	if err := b.Pause(t.Context(), "busy", "test", ""); err != nil {
		t.Fatal(err)
	}
	if s := stats("busy"); s.State != wire.KidPaused || s.PIDs.Current < busy.PIDs.Current {
		t.Errorf("paused: %+v", s)
	}
	if _, err := b.Stats(t.Context(), "nobody"); KindOf(err) != NotFound {
		t.Errorf("of nobody: %v", err)
	}
}
