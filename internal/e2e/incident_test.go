package e2e

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// stream is a receiver of all records.
type stream struct {
	mu      sync.Mutex
	records []audit.Record
}

func (s *stream) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	raw, _ := io.ReadAll(r.Body) // what is cut is no JSON
	var doc struct{ Records []audit.Record }
	if json.Unmarshal(raw, &doc) == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.records = append(s.records, doc.Records...)
	}
}

func (s *stream) has(match func(*audit.Record) bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.records, func(r audit.Record) bool { return match(&r) })
}

// TestAnIncidentFromAlertToEvidence walks docs/audit.md's incident on a real box: a kid tries to get out, a receiver of
// records learns of it at once, somebody stops the kid, and of that comes a timeline, a search, an export and a file of
// evidence that python and openssl find to be as it was signed.
func TestAnIncidentFromAlertToEvidence(t *testing.T) {
	t.Parallel()
	var records stream
	siem := httptest.NewServer(&records)
	defer siem.Close()
	box := testenv.StartWith(t, func(c *config.Box) {
		c.Audit.Sinks = []config.Stream{
			{Name: "siem", Kind: config.StreamWebhook, URL: siem.URL, Timeout: time.Second, Patience: time.Minute, Queue: 1024},
			{Name: "dead", Kind: config.StreamSyslog, URL: "tcp://127.0.0.1:1", Timeout: time.Second, Patience: time.Second, Queue: 64},
		}
	})
	kid := box.Spawn(bareCard, nil)
	box.Sh(kid.Name, "getent hosts evil.test; echo plunder > /workspace/loot.txt")
	box.Until(10*time.Second, "the refused lookup at the receiver", func() error {
		if records.has(func(r *audit.Record) bool {
			return r.Event == audit.EventLookup && r.Outcome == audit.OutcomeDeny && r.Session == kid.Session
		}) {
			return nil
		}
		return os.ErrNotExist
	})
	rep := box.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}, By: "Ada", Reason: "it asks for evil.test"})
	box.Must("destroy", kid.Name, "--reason", "stopped")
	for _, who := range []string{kid.Name, kid.Session, rep.Stop} {
		told := box.Must("timeline", who)
		for _, want := range []string{"kid.spawned", "evil.test", "loot.txt", "stop.received", "it asks for evil.test", "stop.completed", "kid.destroyed", "token.minted"} {
			if !strings.Contains(told, want) {
				t.Errorf("the timeline of %s does not say %q:\n%s", who, want, told)
			}
		}
	}
	if found := box.Must("audit", "search", "--host", "evil.test", "--outcome", "deny"); !strings.Contains(found, kid.Name) {
		t.Errorf("found: %s", found)
	}
	if ocsf := box.Must("audit", "export", rep.Stop, "--format", "ocsf"); !strings.Contains(ocsf, `"class_uid":4003`) || !strings.Contains(ocsf, `"class_uid":6003`) {
		t.Errorf("exported: %s", ocsf)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "evidence.zip")
	r := box.Tagout("evidence", kid.Session, "-o", file, "--incomplete") // whether a drill passed on this machine is not the point
	if r.Code != 0 || strings.Count(r.Stderr, "not in the evidence") != strings.Count(r.Stderr, "drill") {
		t.Fatalf("%d %s%s", r.Code, r.Stdout, r.Stderr)
	}
	if said := box.Must("evidence", "verify", file); !strings.Contains(said, "all as they were signed") {
		t.Errorf("%s", said)
	}
	cmd := exec.Command("bash", "-c", "mkdir e && cd e && python3 -m zipfile -e ../evidence.zip . && python3 verify.py && sha256sum --quiet -c manifest.sha256")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "all is as it was signed") {
		t.Errorf("%v\n%s", err, out)
	}
}
