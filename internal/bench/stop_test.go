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

// TestStopFiguresAreProduced runs the benchmark of stops with tiny counts, beside docker and podman where they happen
// to be installed. It looks at no figure's size, and that nothing is left.
func TestStopFiguresAreProduced(t *testing.T) {
	testroot.Require(t)
	t.Parallel()
	dir := t.TempDir()
	bin := os.Getenv("TAGOUT_BIN")
	if bin == "" {
		bin = filepath.Join(dir, "bin")
		build(t, bin, "tagout/cmd/...")
	}
	name := fmt.Sprintf("stt%d", os.Getpid()) // several people may test on one machine
	tagout := func(args ...string) (string, error) {
		said, err := exec.CommandContext(t.Context(), filepath.Join(bin, "tagout"), append([]string{"--instance", name}, args...)...).CombinedOutput()
		return string(said), err
	}
	t.Cleanup(func() { // nothing is there to remove unless the benchmark was cut off
		exec.Command(filepath.Join(bin, "tagout"), "--instance", name, "cleanup", "--purge").Run()
	})
	said, err := tagout("bench", "stop", "--short", "--bin-dir", bin, "--out", dir)
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "stop.json"))
	if err != nil {
		t.Fatal(err)
	}
	var metrics []Metric
	if err := json.Unmarshal(raw, &metrics); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"session: 50 sleepers", "session: fork bomb", "network: order to last packet passed", "network: order to last byte",
		"credential: order to last use accepted", "all layers, hostile agent", "all layers: started to last sign of life", "resident memory of killswitchd",
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
	if said, err := tagout("cleanup", "--check"); err != nil {
		t.Errorf("something is left: %v\n%s", err, said)
	}
}
