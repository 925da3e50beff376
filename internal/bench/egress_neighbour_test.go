package bench

import (
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/testroot"
)

// TestANeighbourIsServed: beside a kid that asks for more than its caps, every request of a quiet kid is served;
// the benchmark fails otherwise. It looks at no figure's size.
func TestANeighbourIsServed(t *testing.T) {
	testroot.Require(t)
	t.Parallel()
	dir := t.TempDir()
	peers, out := filepath.Join(dir, "peers"), filepath.Join(dir, "out")
	build(t, peers, "tagout/internal/bench/peers/load")
	tagout := newCommand(t, "nbt")
	said := tagout.run("bench", "egress", "--only", EgressNeighbour, "--rounds", "1", "--for", "500ms", "--bin-dir", tagout.bin, "--peers", peers, "--out", out)
	metrics := figures(t, filepath.Join(out, "neighbour.json"))
	n := 0
	for _, m := range metrics {
		if m.Target == neighbourTarget && m.Value > 0 && strings.HasPrefix(m.Metric, "p99 of ") {
			n++
		}
	}
	if n != 2 {
		t.Errorf("%d figures, want 2:\n%s", n, said)
	}
}
