package e2e

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"tagout/bpf"
	"tagout/internal/authority"
	"tagout/internal/drill"
	"tagout/internal/testenv"
)

// shortDrill drills a box of the test's own: a few techniques that are unlike each other, all layers together.
func shortDrill(t *testing.T, box *testenv.Box, names ...string) drill.Config {
	t.Helper()
	const file = "../../deploy/cards/drill.yaml"
	card, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	agent := filepath.Join(box.Bin, drill.AgentFile)
	inputs := t.TempDir()
	for name, content := range hostile(t, box) {
		if err := os.WriteFile(filepath.Join(inputs, name), content, 0o755); err != nil { // a program
			t.Fatal(err)
		}
	}
	all, err := drill.Techniques(t.Context(), agent)
	if err != nil {
		t.Fatal(err)
	}
	techniques, err := drill.Choose(all, names)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := drill.Equip(t.Context(), box.Inst, box.Net, file, card); err != nil {
		t.Fatal(err)
	}
	maps, err := bpf.Open(box.Inst.PinDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { maps.Close() }) // only read
	return drill.Config{
		Inst: box.Inst, Internet: box.Net, Card: card, CardFile: file, InputDir: inputs, Techniques: techniques,
		Cases: []drill.Case{drill.Together()}, Controls: true, ReadyWithin: time.Minute, By: "test", Out: testWriter{t},
		Passed: func(mark uint32) (time.Duration, error) { c, err := maps.Counters(mark); return c.LastPass, err },
	}
}

// testWriter is a test's log.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(string(p))
	return len(p), nil
}

// TestShortDrill (S02, S06, S08, S09, S11, S12): what a drill shows in full, in short, with the control runs that must
// fail. The SLA is not judged here: a busy machine is late, and a drill is for a machine that is not.
func TestShortDrill(t *testing.T) {
	t.Parallel()
	box := start(t)
	cfg := shortDrill(t, box, "orphans", "queued", "connect", "http2", "dnshammer", "inheritedfd", "replay", "frozen", "diskwait")
	cfg.Knockouts = []string{"all-stopped", "killswitchd-killed-midstop", "two-stops"}
	rep, err := drill.Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if want := 9 + 3 + 3; len(rep.Results) != want {
		t.Fatalf("%d runs, want %d", len(rep.Results), want)
	}
	for _, r := range rep.Results {
		if r.Void != "" || r.Skipped != "" {
			t.Errorf("%s, %s proves nothing: %s%s", r.Technique, r.Case, r.Void, r.Skipped)
		}
		for _, l := range r.Layers {
			if l.Stopped == (r.Kind == drill.KindControl) || l.Why != "" {
				t.Errorf("%s, %s, %s layer: %+v", r.Technique, r.Case, l.Layer, l)
			}
		}
		if r.After.AttackerBytes != 0 {
			t.Errorf("%s: %d bytes reached the attacker", r.Technique, r.After.AttackerBytes)
		}
	}
	private, public, err := authority.NewKey("test")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := rep.Seal(dir, private); err != nil {
		t.Fatal(err)
	}
	if s, err := drill.Verify(filepath.Join(dir, drill.FileJSON), public); err != nil || s.Verdict != rep.Verdict {
		t.Errorf("%+v %v, want the verdict %s", s, err, rep.Verdict)
	}
}
