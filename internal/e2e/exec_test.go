package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"tagout/internal/wire"
)

// TestDetachedExec is the life of a command that nobody waits for, over the command line.
func TestDetachedExec(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(bareCard, nil).Name
	id := strings.TrimSpace(box.Must("exec", "-d", kid, "--", "/bin/sh", "-c", "echo out; echo err >&2; exec sleep 300"))
	listed := func() []wire.Exec {
		var execs []wire.Exec
		if err := json.Unmarshal([]byte(box.Must("execs", kid, "--json")), &execs); err != nil {
			t.Fatal(err)
		}
		return execs
	}
	if l := listed(); len(l) != 1 || l[0].ID != id || !l[0].Detached || l[0].Exit != nil {
		t.Errorf("while it runs: %+v", l)
	}
	box.Until(soon, "its output", func() error {
		if r := box.Tagout("logs", kid, "--exec", id); r.Stdout != "out\n" || !strings.Contains(r.Stderr, "err\n") {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	box.Must("end", kid, id, "--reason", "enough")
	r := box.Tagout("attach", kid, id)
	if r.Code != 137 || r.Stdout != "out\n" || !strings.Contains(r.Stderr, "err\n") || !strings.Contains(r.Stderr, "enough") {
		t.Errorf("attached after its end: %+v", r)
	}
	box.Must("end", kid, id)
	if l := listed(); len(l) != 0 {
		t.Errorf("forgotten: %+v", l)
	}
	if r := box.Tagout("attach", kid, id); r.Code == 0 {
		t.Errorf("attached to nothing: %+v", r)
	}
	r = box.Tagout("exec", kid, "--", "/bin/sh", "-c", "sleep 300 & echo x; exit 4")
	if r.Code != 4 || r.Stdout != "x\n" || !strings.Contains(r.Stderr, "still holds its output") {
		t.Errorf("with something left running: %+v", r)
	}
}
