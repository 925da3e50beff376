package e2e

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestLogsAndStats looks at a kid from outside, with the command.
func TestLogsAndStats(t *testing.T) {
	box := testenv.Start(t)
	kid := box.Spawn(bareCard, nil).Name
	id := strings.TrimSpace(box.Must("exec", "-d", kid, "--", "sh", "-c", "echo out; echo err >&2; exec sleep 3600"))
	var shown testenv.Result
	box.Until(10*time.Second, "the command's output", func() error {
		if shown = box.Tagout("logs", kid); !strings.Contains(shown.Stdout, "out\n") || !strings.Contains(shown.Stderr, "err\n") {
			return errors.New(shown.Stderr)
		}
		return nil
	})
	if shown.Code != 0 || shown.Stdout != "out\n" || !strings.Contains(shown.Stderr, "==> "+id) {
		t.Errorf("logs: %+v", shown)
	}
	if one := box.Tagout("logs", kid, "--exec", id); one.Stdout != "out\n" || one.Stderr != "err\n" {
		t.Errorf("one command: %+v", one)
	}
	if none := box.Tagout("logs", kid, "--exec", "x"); none.Code == 0 || !strings.Contains(none.Stderr, "tagout execs") {
		t.Errorf("no such command: %+v", none)
	}
	if none := box.Tagout("logs", "nobody"); none.Code == 0 || !strings.Contains(none.Stderr, "tagout list") {
		t.Errorf("no such kid: %+v", none)
	}
	var stats []wire.KidStats
	if err := json.Unmarshal([]byte(box.Must("stats", kid, "--json")), &stats); err != nil || len(stats) != 1 || stats[0].Kid != kid || stats[0].Memory.Current == 0 ||
		stats[0].PIDs.Current < 2 || stats[0].CPU.User+stats[0].CPU.System == 0 {
		t.Errorf("stats: %+v, %v", stats, err)
	}
	if table := box.Must("stats"); !strings.Contains(table, kid+"  running") || !strings.Contains(table, " of ") {
		t.Errorf("stats: %s", table)
	}
	if none := box.Tagout("stats", "nobody"); none.Code == 0 {
		t.Errorf("of no kid: %+v", none)
	}
	var frames []wire.LogFrame
	err := box.Client(instance.Sandboxd).Each(t.Context(), http.MethodGet, "/v1/kids/"+kid+"/logs", nil, func(line json.RawMessage) error {
		var f wire.LogFrame
		defer func() { frames = append(frames, f) }()
		return json.Unmarshal(line, &f)
	})
	if err != nil || len(frames) < 3 || frames[0].Exec == nil || frames[0].ID != id {
		t.Errorf("over HTTP: %+v, %v", frames, err)
	}

	// follow starts a command that follows, and waits until it has shown what was there before.
	follow := func(before string, args ...string) (shown func() string, wait func() error) {
		cmd := exec.Command(filepath.Join(box.Bin, "tagout"), append([]string{"--instance", box.Inst.Name(), "logs", kid, "-f"}, args...)...)
		out, err := os.Create(filepath.Join(t.TempDir(), "out"))
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close() // the command has its own
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill() }) // it has ended
		shown = func() string {
			raw, err := os.ReadFile(out.Name())
			if err != nil {
				t.Fatal(err)
			}
			return string(raw)
		}
		box.Until(10*time.Second, "what was there before", func() error {
			if !strings.Contains(shown(), before) {
				return errors.New(shown())
			}
			return nil
		})
		return shown, cmd.Wait
	}
	output, waitOutput := follow("out\n")
	events, waitEvents := follow(audit.EventKidSpawned, "--events")
	later := strings.TrimSpace(box.Must("exec", "-d", kid, "--", "echo", "later"))
	box.Until(10*time.Second, "the later command's output", func() error {
		if !strings.Contains(output(), "\nlater\n") || !strings.Contains(output(), "==> "+later+" exited 0") {
			return errors.New(output())
		}
		return nil
	})
	box.Must("destroy", kid, "--reason", "seen enough")
	if err := waitOutput(); err != nil || !strings.Contains(output(), "==> "+id+" ") {
		t.Errorf("followed output: %v, %s", err, output())
	}
	if err := waitEvents(); err != nil || strings.Count(events(), audit.EventKidSpawned) != 1 || strings.Count(events(), audit.EventKidDestroyed) != 1 {
		t.Errorf("followed events: %v, %s", err, events())
	}
	if past := box.Must("logs", kid, "--events", "--follow"); !strings.Contains(past, "seen enough") { // ends by itself
		t.Errorf("of a kid that is gone: %s", past)
	}
}
