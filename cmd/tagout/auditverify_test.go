package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/audit/verify"
	"tagout/internal/instance"
)

// TestVerifyAndProofs walks the commands over real logs: whole, harmed, and with a witness's copy.
func TestVerifyAndProofs(t *testing.T) {
	inst := keepLogs(t, "tcliverify", map[string][]audit.Record{
		instance.Sandboxd: {{Event: audit.EventKidSpawned, Kid: "k"}, {Event: audit.EventKidDestroyed, Kid: "k"}},
		instance.Proxy:    {{Event: audit.EventConnOpened, Kid: "k"}, {Event: audit.EventConnClosed, Kid: "k"}, {Event: audit.EventConnOpened, Kid: "k"}},
	})
	run := func(want int, args ...string) string {
		t.Helper()
		code, out, errs := tagout(append([]string{"--instance", "tcliverify"}, args...)...)
		if code != want {
			t.Fatalf("tagout %v: exit %d, want %d\n%s%s", args, code, want, out, errs)
		}
		return out + errs
	}
	if out := run(exitOK, "audit", "verify"); !strings.Contains(out, "proxy        ok: 3 records in 1 piece, 3 signed") {
		t.Errorf("%s", out)
	}
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	keys := strings.Split(run(exitOK, "audit", "keys"), "\n")
	key := ""
	for _, k := range keys {
		if strings.Contains(k, "/proxy+") {
			key = write("key", k+"\n")
		}
	}
	log := inst.AuditFile(instance.Proxy)
	raw, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(raw), "\n")
	proof := write("proof", run(exitOK, "audit", "proof", "proxy", "1"))
	if out := run(exitOK, "audit", "check", proof, "--key", key, "--record", write("record", lines[1])); !strings.Contains(out, "record 1 of 3") {
		t.Errorf("%s", out)
	}
	run(exitFailure, "audit", "check", proof, "--key", key, "--record", write("other", lines[2]))
	run(exitUsage, "audit", "proof", "proxy")
	checkpoint, err := os.ReadFile(filepath.Join(filepath.Dir(log), audit.CheckpointFile))
	if err != nil {
		t.Fatal(err)
	}
	run(exitOK, "audit", "check", write("consistency", run(exitOK, "audit", "proof", "proxy", "--since", "3")), "--key", key, "--checkpoint", write("old", string(checkpoint)))
	run(exitOK, "audit", "verify", "--witness", write("witness", string(checkpoint)), "--key", key)

	if err := os.WriteFile(log, bytes.Replace(raw, []byte("conn.closed"), []byte("conn.clused"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := run(exitFailure, "audit", "verify", "--daemon", "proxy"); !strings.Contains(out, "proxy        NOT VERIFIED") || !strings.Contains(out, "record-changed 1 in proxy.jsonl at byte ") {
		t.Errorf("%s", out)
	}
	var rep verify.Report
	if err := json.Unmarshal([]byte(run(exitFailure, "audit", "verify", "--json")), &rep); err != nil || rep.OK || len(rep.Logs) != 2 {
		t.Errorf("%+v %v", rep, err)
	}
}
