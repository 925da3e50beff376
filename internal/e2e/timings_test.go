package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestTimingsAreShown: what a spawn's stages took is shown on request, counted, and never mixed with the output.
func TestTimingsAreShown(t *testing.T) {
	box := testenv.Start(t)
	card := filepath.Join(t.TempDir(), "quiet.yaml")
	if err := os.WriteFile(card, []byte(quietCard("quiet", "")), 0o600); err != nil {
		t.Fatal(err)
	}
	stages := append(wire.SpawnStages(), wire.StageTotal)
	plain := box.Tagout("run", card, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
	if plain.Code != 7 || plain.Stdout != "out\n" || plain.Stderr != "err\n" {
		t.Errorf("not asked for: %+v", plain)
	}
	run := box.Tagout("run", card, "--timings", "--", "sh", "-c", "echo out; exit 7")
	if run.Code != 7 || run.Stdout != "out\n" {
		t.Errorf("run: %+v", run)
	}
	for _, stage := range append(stages, wire.StageFirstCommand) {
		if !strings.Contains(run.Stderr, stage+"  ") {
			t.Errorf("run says nothing of %s: %s", stage, run.Stderr)
		}
	}
	spawn := box.Tagout("spawn", card, "--name", "timed", "--timings")
	if spawn.Code != 0 || spawn.Stdout != "timed\n" || !strings.Contains(spawn.Stderr, wire.StageRuntime) || strings.Contains(spawn.Stderr, wire.StageFirstCommand) {
		t.Errorf("spawn: %+v", spawn)
	}
	var kid wire.Kid
	if err := json.Unmarshal([]byte(box.Must("--json", "spawn", card, "--name", "json")), &kid); err != nil {
		t.Fatal(err)
	}
	metrics := metricsOf(t, box, instance.Sandboxd)
	for _, stage := range stages {
		if _, ok := kid.Timings[stage]; !ok {
			t.Errorf("no %s in %v", stage, kid.Timings)
		}
		if stage != wire.StageTotal && !strings.Contains(metrics, `tagout_sandboxd_spawn_stage_seconds_count{stage="`+stage+`"} `) {
			t.Errorf("no histogram of %s", stage)
		}
	}
	if !strings.Contains(metrics, `tagout_sandboxd_spawn_stage_seconds_count{stage="first-command"} 2`) {
		t.Error("the first commands of two kids were not counted")
	}
}
