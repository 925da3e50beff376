package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
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
	bin := os.Getenv("TAGOUT_BIN")
	if bin == "" {
		bin = filepath.Join(dir, "bin")
		build(t, bin, "tagout/cmd/...")
	}
	name := fmt.Sprintf("nbt%d", os.Getpid())
	tagout := filepath.Join(bin, "tagout")
	t.Cleanup(func() { // nothing is there to remove unless the benchmark was cut off
		exec.Command(tagout, "--instance", name, "cleanup", "--purge").Run()
	})
	said, err := exec.CommandContext(t.Context(), tagout, "--instance", name, "bench", "egress", "--only", EgressNeighbour,
		"--rounds", "1", "--for", "500ms", "--bin-dir", bin, "--peers", peers, "--out", out).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	raw, err := os.ReadFile(filepath.Join(out, "neighbour.json"))
	if err != nil {
		t.Fatal(err)
	}
	var metrics []Metric
	if err := json.Unmarshal(raw, &metrics); err != nil {
		t.Fatal(err)
	}
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
