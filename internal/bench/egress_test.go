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

// TestEgressFiguresAreProduced runs the egress benchmark with tiny counts, beside the peers that are built
// from this repository and those that happen to be installed. It looks at no figure's size.
func TestEgressFiguresAreProduced(t *testing.T) {
	testroot.Require(t)
	t.Parallel()
	dir := t.TempDir()
	peers, out := filepath.Join(dir, "peers"), filepath.Join(dir, "out")
	build(t, peers, "tagout/internal/bench/peers/...")
	bin := os.Getenv("TAGOUT_BIN")
	if bin == "" {
		bin = filepath.Join(dir, "bin")
		build(t, bin, "tagout/cmd/...")
	}
	name := fmt.Sprintf("egt%d", os.Getpid()) // several people may test on one machine
	tagout := func(args ...string) string {
		said, err := exec.CommandContext(t.Context(), filepath.Join(bin, "tagout"), append([]string{"--instance", name}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("tagout %s: %v\n%s", strings.Join(args, " "), err, said)
		}
		return string(said)
	}
	t.Cleanup(func() { // nothing is there to remove unless the benchmark was cut off
		exec.Command(filepath.Join(bin, "tagout"), "--instance", name, "cleanup", "--purge").Run()
	})
	said := tagout("bench", "egress", "--short", "--bin-dir", bin, "--peers", peers, "--out", out)
	raw, err := os.ReadFile(filepath.Join(out, "egress.json"))
	if err != nil {
		t.Fatal(err)
	}
	var metrics []Metric
	if err := json.Unmarshal(raw, &metrics); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"one un-inspected tunnel, at least 1 × splice relay", "new tunnels", "added to a byte and its echo in an open tunnel, p50",
		"added to a new tunnel until its first byte, p99", "inspected HTTPS requests", "DNS answers", "connect hook",
		"memory of the proxy with 10000 idle tunnels",
	} {
		found := false
		for _, m := range metrics {
			found = found || strings.HasPrefix(m.Metric, want) && m.Value > 0
		}
		if !found {
			t.Errorf("there is no figure for %q:\n%s", want, said)
		}
	}
	tagout("cleanup", "--check")
}

func build(t *testing.T, dir, packages string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", dir+"/", packages)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building %s: %v\n%s", packages, err, out)
	}
}
