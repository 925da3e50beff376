package e2e

import (
	"encoding/json"
	"net/http"
	"os"
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

// TestLessonsOutliveKids: what is learned from a kid is found again, redacted, with what the kid was refused, after a
// restart of sandboxd too; and nothing of it lies where the purpose would have it.
func TestLessonsOutliveKids(t *testing.T) {
	box := testenv.Start(t)
	kid := box.Spawn(bareCard, nil)
	box.Sh(kid.Name, "getent hosts evil.test")
	box.WaitRecord("the refused lookup", func(r *audit.Record) bool {
		return r.Event == audit.EventLookup && r.Kid == kid.Name && r.Outcome == audit.OutcomeDeny
	})
	const secret = "hunter2hunter2"
	out := box.Must("destroy", kid.Name, "--reason", "done", "--lesson", "# Found\n\nIt wants evil.test, password="+secret)
	_, name, ok := strings.Cut(strings.TrimSpace(out), "tagout lessons show ")
	if !ok || !strings.HasPrefix(name, time.Now().UTC().Format(time.DateOnly)+"-testlessonsoutlivekids") {
		t.Fatalf("destroy says %q", out)
	}
	raw, err := os.ReadFile(filepath.Join(box.Inst.StateDir(), "learned/kids", name))
	if err != nil || strings.Contains(string(raw), secret) || !strings.Contains(string(raw), "password="+audit.Redacted) {
		t.Errorf("the note: %v\n%s", err, raw)
	}
	box.Kill9(instance.Sandboxd)
	box.WaitHealthy(instance.Sandboxd)
	if list := box.Must("lessons", "EVIL.test", "found"); !strings.Contains(list, name) || !strings.Contains(list, "# Found") {
		t.Errorf("found: %s", list)
	}
	if list := box.Must("lessons", "evil.test", "elsewhere"); strings.Contains(list, name) {
		t.Errorf("found by a word that is not in it: %s", list)
	}
	if show := box.Must("lessons", "show", name); !strings.Contains(show, "evil.test") || !strings.Contains(show, "refused evil.test: name-not-allowed") || strings.Contains(show, secret) {
		t.Errorf("shown: %s", show)
	}
	var list []wire.Lesson
	if err := json.Unmarshal([]byte(box.Must("lessons", "--json")), &list); err != nil || len(list) != 1 || list[0].Kid != kid.Name || list[0].Session != kid.Session {
		t.Errorf("as JSON: %+v, %v", list, err)
	}
	for _, bad := range []string{"nothing.md", "../../box.yaml", "%2e%2e%2fbox.yaml"} {
		if r := box.Tagout("lessons", "show", bad); r.Code == 0 {
			t.Errorf("shows %s: %s", bad, r.Stdout)
		}
	}
	gone := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodPost, "/v1/kids/"+kid.Name+"/destroy", wire.DestroyRequest{Reason: "r", Lesson: "l"}, nil)
	if control.Status(gone) != http.StatusNotFound {
		t.Errorf("a lesson from a kid that is gone: %v", gone)
	}
	if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodPost, "/v1/kids/"+kid.Name+"/destroy", wire.DestroyRequest{Reason: "r"}, nil); err != nil {
		t.Errorf("destroyed twice: %v", err)
	}
}
