package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// command is the tagout command with an instance of the test's own, which is gone after it.
type command struct {
	t    *testing.T
	name string // of the instance: several people may test on one machine
	bin  string // directory of the binaries
}

func newCommand(t *testing.T, prefix string) *command {
	t.Helper()
	c := &command{t: t, name: fmt.Sprintf("%s%d", prefix, os.Getpid()), bin: os.Getenv("TAGOUT_BIN")}
	if c.bin == "" {
		c.bin = filepath.Join(t.TempDir(), "bin")
		build(t, c.bin, "tagout/cmd/...")
	}
	t.Cleanup(func() { // nothing is there to remove unless the benchmark was cut off
		exec.Command(filepath.Join(c.bin, "tagout"), "--instance", c.name, "cleanup", "--purge").Run()
	})
	return c
}

// run returns what the command says; it must succeed.
func (c *command) run(args ...string) string {
	c.t.Helper()
	said, err := exec.CommandContext(c.t.Context(), filepath.Join(c.bin, "tagout"), append([]string{"--instance", c.name}, args...)...).CombinedOutput()
	if err != nil {
		c.t.Fatalf("tagout %v: %v\n%s", args, err, said)
	}
	return string(said)
}

// figures reads what a benchmark has written.
func figures(t *testing.T, file string) []Metric {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var metrics []Metric
	if err := json.Unmarshal(raw, &metrics); err != nil {
		t.Fatal(err)
	}
	return metrics
}

func build(t *testing.T, dir, packages string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", dir+"/", packages)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building %s: %v\n%s", packages, err, out)
	}
}
