package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// quietCard is a card that allows nothing, with the limits given.
func quietCard(name, limits string) string {
	return fmt.Sprintf("apiVersion: tagout/v1\nkind: Card\nname: %s\ntask: Do nothing.\nimage: host\nlimits: {%s}\n"+
		"stop: {authority: \"Ada Operator\", maxTime: 60s}\n", name, limits)
}

// kidsOf returns the kids that there are, by name.
func kidsOf(t *testing.T, box *testenv.Box) map[string]wire.Kid {
	t.Helper()
	var list []wire.Kid
	if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodGet, "/v1/kids", nil, &list); err != nil {
		t.Fatal(err)
	}
	out := map[string]wire.Kid{}
	for _, k := range list {
		out[k.Name] = k
	}
	return out
}

// startRun starts `tagout run` of a command that sleeps, and returns once it does.
func startRun(t *testing.T, box *testenv.Box, name, card string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(filepath.Join(box.Bin, "tagout"), "--instance", box.Inst.Name(), "run", card, "--name", name, "--", "sh", "-c", "echo up; exec sleep 3600")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill() // may be dead
		cmd.Wait()         // as above
	})
	buf := make([]byte, 3)
	if _, err := out.Read(buf); err != nil || string(buf) != "up\n" {
		t.Fatalf("%q, %v", buf, err)
	}
	return cmd
}

// destroyed waits for the record of the kid's end and returns its reason.
func destroyed(box *testenv.Box, kid string) string {
	return box.WaitRecord(kid+" is destroyed", func(r *audit.Record) bool {
		return r.Event == audit.EventKidDestroyed && r.Kid == kid && r.Outcome == audit.OutcomeOK
	}).Detail
}

// TestKidLives walks what ends a kid that nobody destroys, and what holds it, on one box.
func TestKidLives(t *testing.T) {
	box := testenv.Start(t)
	file := filepath.Join(t.TempDir(), "quiet.yaml")
	if err := os.WriteFile(file, []byte(quietCard("quiet", "")), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Run("killed run", func(t *testing.T) {
		box := box.For(t)
		detached := box.Spawn(quietCard("quiet", ""), nil)
		run := startRun(t, box, "killed", file)
		if k := kidsOf(t, box)["killed"]; !k.Held || k.State != wire.KidRunning {
			t.Errorf("the kid of a run: %+v", k)
		}
		if err := run.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if why := destroyed(box, "killed"); !strings.HasPrefix(why, "holder gone") {
			t.Errorf("destroyed because %q", why)
		}
		if k, ok := kidsOf(t, box)[detached.Name]; !ok || k.Held {
			t.Errorf("the kid that nobody held: %+v", k)
		}
		box.Must("destroy", detached.Name, "--reason", "test")
	})
	t.Run("sandboxd is killed", func(t *testing.T) {
		box := box.For(t)
		old := box.Spawn(quietCard("old", "lifetime: 15s"), nil)
		idle := box.Spawn(quietCard("idle", "idle: 5s"), nil)
		paused := box.Spawn(quietCard("paused", ""), nil)
		box.Must("pause", paused.Name, "--reason", "test")
		running(t, box, old.Name, "/bin/sleep", "3600")
		box.Kill9(instance.Sandboxd)
		box.WaitHealthy(instance.Sandboxd)
		if k := kidsOf(t, box)[paused.Name]; k.State != wire.KidPaused {
			t.Errorf("the paused kid is %q", k.State)
		}
		if why := destroyed(box, idle.Name); !strings.HasPrefix(why, "idle") {
			t.Errorf("destroyed because %q", why)
		}
		if why := destroyed(box, old.Name); !strings.HasPrefix(why, "lifetime") {
			t.Errorf("destroyed because %q", why)
		}
		box.Must("resume", paused.Name)
		if out := box.Sh(paused.Name, "echo on"); out.Stdout != "on\n" {
			t.Errorf("after the resume: %+v", out)
		}
		box.Must("destroy", paused.Name, "--reason", "test")
	})
	t.Run("a destroy needs a reason", func(t *testing.T) {
		box := box.For(t)
		kid := box.Spawn(quietCard("quiet", ""), nil)
		err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodDelete, "/v1/kids/"+kid.Name, nil, nil)
		if control.Status(err) != http.StatusUnprocessableEntity {
			t.Errorf("without one: %v", err)
		}
		box.Must("destroy", kid.Name, "--reason", "test")
	})
	box.Until(30*time.Second, "no kid to be left", func() error {
		if left := kidsOf(t, box); len(left) > 0 {
			return errors.New(fmt.Sprint(left))
		}
		return nil
	})
}
