package bench

import (
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/testroot"
)

// TestStopFiguresAreProduced runs the benchmark of stops with tiny counts, beside docker and podman where they happen
// to be installed. It looks at no figure's size, and that nothing is left.
func TestStopFiguresAreProduced(t *testing.T) {
	testroot.Require(t)
	t.Parallel()
	dir := t.TempDir()
	tagout := newCommand(t, "stt")
	said := tagout.run("bench", "stop", "--short", "--bin-dir", tagout.bin, "--out", dir)
	metrics := figures(t, filepath.Join(dir, "stop.json"))
	want := []string{
		"session: 50 sleepers", "session: fork bomb", "network: order received to last packet passed",
		"network: order sent to last packet passed", "network: order sent to last byte",
		"credential: order received to last use accepted",
		"credential: order sent to last use accepted", "all layers, hostile agent", "all layers: started to last sign of life", "resident memory of killswitchd",
	}
	if installed("/usr/sbin/dockerd", "/usr/bin/podman") {
		want = append(want, "hostile agent: command started to last byte")
	}
	for _, w := range want {
		found := false
		for _, m := range metrics {
			found = found || strings.HasPrefix(m.Metric, w)
		}
		if !found {
			t.Errorf("there is no figure for %q:\n%s", w, said)
		}
	}
	tagout.run("cleanup", "--check")
}
