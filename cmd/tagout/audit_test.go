package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
	"tagout/internal/audit"
	"tagout/internal/audit/seal"
	"tagout/internal/auditindex"
	"tagout/internal/auditview"
	"tagout/internal/instance"
	"tagout/internal/testroot"
)

// keepLogs writes records into the logs of an instance that was never set up, as its daemons would have.
func keepLogs(t *testing.T, name string, byDaemon map[string][]audit.Record) instance.Instance {
	t.Helper()
	testroot.Require(t)
	inst, err := instance.New(name, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(inst.StateDir()); err != nil {
			t.Error(err)
		}
	})
	for daemon, records := range byDaemon {
		file := inst.AuditFile(daemon)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		log, err := audit.Open(file, name, daemon)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range records {
			log.Log(r)
		}
		if err := log.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return inst
}

func stopRecord(event, kid string) audit.Record {
	return audit.Record{Event: event, Kid: kid, Actor: "Ada", Outcome: audit.OutcomeOK, Fields: map[string]string{"stop": "01STOP"}}
}

func incident(t *testing.T, name string) instance.Instance {
	return keepLogs(t, name, map[string][]audit.Record{
		instance.Sandboxd: {
			{Event: audit.EventKidSpawned, Kid: "k", Session: "01SESSION", Card: "c", Outcome: audit.OutcomeOK},
			{Event: audit.EventToolCalled, Kid: "k", Session: "01SESSION", Actor: "claude", Fields: map[string]string{"tool": "exec", "arguments": "curl \x1b[31mevil"}},
			{Event: audit.EventConnectDenied, Kid: "k", Session: "01SESSION", Outcome: audit.OutcomeDeny, Dst: &audit.Dst{Name: "evil.test", Port: 443}},
			{Event: audit.EventKidSpawned, Kid: "other", Session: "01OTHER"},
		},
		instance.Killswitchd: {stopRecord(audit.EventStopReceived, ""), stopRecord(audit.EventStopProgress, "k"), stopRecord(audit.EventStopCompleted, "")},
	})
}

func TestTimelineOfAKidASessionAndAStop(t *testing.T) {
	incident(t, "tclitl")
	var first string
	for _, who := range []string{"k", "01SESSION", "01STOP"} {
		code, out, errOut := tagout("--instance", "tclitl", "timeline", who)
		if code != 0 || errOut != "" || strings.Count(out, "\n") != 7 || strings.ContainsAny(out, "\x1b") || strings.Contains(out, "01OTHER") {
			t.Errorf("%s: %d\n%s%s", who, code, out, errOut)
		}
		if first == "" {
			first = out
		}
		if out != first {
			t.Errorf("%s is told differently:\n%s\n%s", who, out, first)
		}
	}
	code, out, _ := tagout("--instance", "tclitl", "timeline", "k", "--only", "network,tools", "--json")
	if lines := strings.Split(strings.TrimSpace(out), "\n"); code != 0 || len(lines) != 2 {
		t.Fatalf("%d %s", code, out)
	}
	var r audit.Record
	if err := json.Unmarshal([]byte(out[:strings.IndexByte(out, '\n')]), &r); err != nil || r.Event != audit.EventToolCalled {
		t.Errorf("%v %+v", err, r)
	}
	for _, bad := range [][]string{{"nobody"}, {"k", "--only", "pizza"}, {"k", "--since", "yesterday"}, {"k", "-f", "--html", "x"}} {
		if code, out, errOut := tagout(append([]string{"--instance", "tclitl", "timeline"}, bad...)...); code != 2 || out != "" || strings.Count(errOut, "\n") != 1 {
			t.Errorf("%q: %d %s%s", bad, code, out, errOut)
		}
	}
	if code, out, _ := tagout("--instance", "tclitl", "timeline", "k", "--since", "2999-01-01"); code != 0 || out != "" {
		t.Errorf("%d %s", code, out)
	}
	file := filepath.Join(t.TempDir(), "page.html")
	if code, _, errOut := tagout("--instance", "tclitl", "timeline", "k", "--html", file); code != 0 || errOut != "6 records in "+file+"\n" {
		t.Errorf("%d %s", code, errOut)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info, err)
	}
}

// While it is followed, a stop of the kid becomes part of its story, and it ends with the kid.
func TestTimelineFollowsUntilTheKidIsGone(t *testing.T) {
	inst := keepLogs(t, "tclifl", map[string][]audit.Record{instance.Sandboxd: {{Event: audit.EventKidSpawned, Kid: "k", Session: "S"}}})
	pr, pw, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pr.Close()
	ended := make(chan int, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	go func() {
		ended <- run(ctx, []string{"--instance", "tclifl", "timeline", "S", "-f"}, strings.NewReader(""), pw, os.Stderr)
		pw.Close()
	}()
	lines := make(chan string, 16)
	go func() {
		defer close(lines)
		buf := make([]byte, 4096)
		for {
			n, err := pr.Read(buf)
			if err != nil {
				return
			}
			lines <- string(buf[:n])
		}
	}()
	seen := <-lines // the day and the spawn
	add := func(daemon string, records ...audit.Record) {
		if err := os.MkdirAll(filepath.Dir(inst.AuditFile(daemon)), 0o755); err != nil {
			t.Fatal(err)
		}
		log, err := audit.Open(inst.AuditFile(daemon), "tclifl", daemon)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range records {
			log.Log(r)
		}
		if err := log.Close(); err != nil {
			t.Fatal(err)
		}
	}
	add(instance.Killswitchd, stopRecord(audit.EventStopReceived, ""), stopRecord(audit.EventStopProgress, "k"), stopRecord(audit.EventStopCompleted, ""))
	for !strings.Contains(seen, "stop.completed") {
		more, ok := <-lines
		if !ok {
			t.Fatalf("it ended: %s", seen)
		}
		seen += more
	}
	add(instance.Sandboxd, audit.Record{Event: audit.EventKidDestroyed, Kid: "k", Session: "S", Outcome: audit.OutcomeOK})
	if code := <-ended; code != 0 {
		t.Errorf("it ended with %d", code)
	}
	for more := range lines {
		seen += more
	}
	if strings.Count(seen, "\n") != 6 || !strings.Contains(seen, "kid.destroyed") {
		t.Errorf("%s", seen)
	}
}

func TestSearchShowsTheNewestAndSaysWhatItLeftOut(t *testing.T) {
	incident(t, "tclise")
	code, out, errOut := tagout("--instance", "tclise", "audit", "search", "--event", "kid.*")
	if code != 0 || errOut != "" || strings.Count(out, "kid.spawned") != 2 {
		t.Errorf("%d %s%s", code, out, errOut)
	}
	code, out, errOut = tagout("--instance", "tclise", "audit", "search", "--limit", "1", "--json", "EVIL")
	if code != 0 || strings.Count(out, "\n") != 1 || !strings.Contains(out, audit.EventConnectDenied) || !strings.Contains(errOut, "1 more record not shown") {
		t.Errorf("%d %s%s", code, out, errOut)
	}
	if code, out, _ := tagout("--instance", "tclise", "audit", "search", "--host", "nowhere.test"); code != 0 || out != "" {
		t.Errorf("%d %s", code, out)
	}
	if code, _, _ := tagout("--instance", "tclise", "audit", "search", "--limit", "-1"); code != 2 {
		t.Errorf("a negative limit: %d", code)
	}
}

func TestColoursAreForTerminals(t *testing.T) {
	a := &app{out: os.Stdout}
	if f, err := os.Open(os.DevNull); err != nil {
		t.Fatal(err)
	} else {
		defer f.Close()
		a.out = f
	}
	if a.lineWriter(false).Colour {
		t.Error("a file gets colours")
	}
	l, _ := auditview.Decode([]byte(`{"event":"a.b","outcome":"deny"}`)) // a record
	if text := (&auditview.Writer{Colour: true}).Line(&l); !strings.Contains(text, "\x1b[") {
		t.Errorf("a terminal gets no colours: %q", text)
	}
}

// The index changes nothing about what is found, and a damaged one is done without.
func TestTheIndexIsAHelper(t *testing.T) {
	inst := incident(t, "tcliix")
	_, want, _ := tagout("--instance", "tcliix", "timeline", "k")
	if code, out, errOut := tagout("--instance", "tcliix", "audit", "index"); code != 0 || !strings.HasPrefix(out, "7 records added in ") {
		t.Fatalf("%d %s%s", code, out, errOut)
	}
	if code, out, errOut := tagout("--instance", "tcliix", "timeline", "k"); code != 0 || out != want || errOut != "" {
		t.Errorf("%d %s%s", code, out, errOut)
	}
	if err := os.Chmod(inst.AuditIndexDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(auditindex.File(inst.AuditIndexDir())); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(auditindex.File(inst.AuditIndexDir()), 0o700); err != nil {
		t.Fatal(err)
	}
	if code, out, errOut := tagout("--instance", "tcliix", "timeline", "k"); code != 0 || out != want || !strings.Contains(errOut, "reading the logs through") {
		t.Errorf("%d %s%s", code, out, errOut)
	}
	if code, _, errOut := tagout("--instance", "tcliix", "audit", "index", "--rebuild"); code != 0 {
		t.Errorf("%d %s", code, errOut)
	}
	if code, _, _ := tagout("--instance", "tclnever", "audit", "index"); code != 4 {
		t.Errorf("an instance that is not there: %d", code)
	}
}

func TestExportWritesEveryForm(t *testing.T) {
	incident(t, "tclixp")
	for format, want := range map[string]int{"jsonl": 7, "ocsf": 7, "csv": 8, "cef": 7} {
		code, out, errOut := tagout("--instance", "tclixp", "audit", "export", "--format", format)
		if code != 0 || errOut != "" || strings.Count(out, "\n") != want {
			t.Errorf("%s: %d\n%s%s", format, code, out, errOut)
		}
	}
	file := filepath.Join(t.TempDir(), "x.jsonl")
	if code, out, errOut := tagout("--instance", "tclixp", "audit", "export", "01STOP", "-o", file); code != 0 || out+errOut != "" {
		t.Errorf("%d %s%s", code, out, errOut)
	}
	raw, err := os.ReadFile(file)
	if _, all, _ := tagout("--instance", "tclixp", "timeline", "01STOP", "--json"); err != nil || string(raw) != all {
		t.Errorf("%v\n%s\n%s", err, raw, all)
	}
	if code, out, _ := tagout("--instance", "tclixp", "audit", "export", "--event", "tool.*"); code != 0 || strings.Count(out, "\n") != 1 {
		t.Errorf("%d %s", code, out)
	}
	for _, bad := range [][]string{{"--format", "xml"}, {"nobody"}, {"--since", "soon"}} {
		if code, _, _ := tagout(append([]string{"--instance", "tclixp", "audit", "export"}, bad...)...); code != 2 {
			t.Errorf("%v: %d", bad, code)
		}
	}
}

func TestMomentsAreRead(t *testing.T) {
	now := time.Date(2026, 5, 10, 12, 0, 0, 0, time.UTC)
	for text, want := range map[string]string{
		"": "0001-01-01T00:00:00Z", "15m": "2026-05-10T11:45:00Z", "7d": "2026-05-03T12:00:00Z", "2026-05-01": "2026-05-01T00:00:00Z", "2026-05-01T02:00:00+02:00": "2026-05-01T00:00:00Z", "2026-05-01 10:30": "2026-05-01T10:30:00Z",
	} {
		if got, err := parseMoment(text, now); err != nil || got.UTC().Format(time.RFC3339) != want {
			t.Errorf("%q is %v, want %s: %v", text, got, want, err)
		}
	}
	for _, text := range []string{"yesterday", "-5m", "-1d", "d", "1e9d", "2026-13-01"} {
		if got, err := parseMoment(text, now); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
}

// What lies in an encrypted piece is told with its identity, and that it is left out without.
func TestEncryptedPiecesAreReadWithTheirIdentity(t *testing.T) {
	inst := incident(t, "tclien")
	_, want, _ := tagout("--instance", "tclien", "timeline", "k")
	live := inst.AuditFile(instance.Killswitchd)
	raw, err := os.ReadFile(live)
	if err != nil {
		t.Fatal(err)
	}
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	var sealed bytes.Buffer
	if err := seal.Encrypt(&sealed, bytes.NewReader(raw), id.Recipient()); err != nil {
		t.Fatal(err)
	}
	closed := filepath.Join(filepath.Dir(live), "shards", "000000000000-20260504T120000Z.jsonl.age")
	file := filepath.Join(t.TempDir(), "identity")
	for path, content := range map[string][]byte{closed: sealed.Bytes(), file: []byte(id.String() + "\n"), live: nil} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // without an index and with one
		if code, out, errOut := tagout("--instance", "tclien", "timeline", "k"); code != 0 || strings.Contains(out, "stop.received") || !strings.Contains(errOut, "1 encrypted piece of the logs left out") {
			t.Errorf("%d %s%s", code, out, errOut)
		}
		if code, out, errOut := tagout("--instance", "tclien", "timeline", "k", "--identity", file); code != 0 || out != want || errOut != "" {
			t.Errorf("%d\n%s\n%s%s", code, want, out, errOut)
		}
		if code, _, errOut := tagout("--instance", "tclien", "audit", "index"); code != 0 {
			t.Errorf("%d %s", code, errOut)
		}
	}
	other, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(other.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, errOut := tagout("--instance", "tclien", "timeline", "k", "--identity", file); code == 0 || out != "" || !strings.Contains(errOut, "did not match") {
		t.Errorf("another's identity: %d %s%s", code, out, errOut)
	}
}
