package bench

import (
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/testroot"
)

// TestEgressFiguresAreProduced runs the egress benchmark with tiny counts, beside the peers that are built
// from this repository and those that happen to be installed. It looks at no figure's size.
func TestEgressFiguresAreProduced(t *testing.T) {
	testroot.Require(t)
	t.Parallel()
	dir := t.TempDir()
	peers, out := filepath.Join(dir, "peers"), filepath.Join(dir, "out")
	build(t, peers, "tagout/internal/bench/peers/...")
	tagout := newCommand(t, "egt")
	said := tagout.run("bench", "egress", "--short", "--bin-dir", tagout.bin, "--peers", peers, "--out", out)
	metrics := figures(t, filepath.Join(out, "egress.json"))
	for _, want := range []string{
		"one un-inspected tunnel, at least 1 × splice relay", "new tunnels", "added to a byte and its echo in an open tunnel, p50",
		"added to a new tunnel until its first byte, p99", "inspected HTTPS requests", "DNS answers", "refused DNS answers", "connect hook",
		"memory of the proxy with 10000 idle tunnels",
	} {
		found := false
		for _, m := range metrics {
			// What is added to a peer's time may be less than nothing on a busy machine.
			found = found || strings.HasPrefix(m.Metric, want) && (m.Value > 0 || strings.HasPrefix(want, "added to"))
		}
		if !found {
			t.Errorf("there is no figure for %q:\n%s", want, said)
		}
	}
	tagout.run("cleanup", "--check")
}
