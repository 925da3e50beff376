package main

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/instance"
)

// session writes the logs of a session that used its secret, was refused, and was stopped, with its card.
func evidenceSession(t *testing.T, name string) instance.Instance {
	t.Helper()
	text, err := os.ReadFile("../../deploy/cards/practice.yaml")
	if err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256(text)
	sum := hex.EncodeToString(digest[:])
	of := func(r audit.Record) audit.Record {
		r.Kid, r.Session, r.Card, r.CardSHA256 = "k", "01SESSION", "practice", sum
		return r
	}
	inst := keepLogs(t, name, map[string][]audit.Record{
		instance.Sandboxd: {
			of(audit.Record{Event: audit.EventKidSpawned, Outcome: audit.OutcomeOK, Detail: "Look after the vendor's API", Actor: "Ada"}),
			of(audit.Record{Event: audit.EventFileCreated, Fields: map[string]string{"path": "/workspace/x"}}),
			of(audit.Record{Event: audit.EventConnectDenied, Outcome: audit.OutcomeDeny, Dst: &audit.Dst{Name: "<b>evil.test</b>", Port: 443}, Count: 7}),
			{Event: audit.EventKidSpawned, Kid: "other", Session: "01OTHER"},
			of(audit.Record{Event: audit.EventKidDestroyed, Outcome: audit.OutcomeOK}),
		},
		instance.Credd:       {of(audit.Record{Event: audit.EventTokenMinted, Fields: map[string]string{"secret": "vendor_api"}}), of(audit.Record{Event: audit.EventTokenUsed, Fields: map[string]string{"secret": "vendor_api"}})},
		instance.Killswitchd: {stopRecord(audit.EventStopReceived, ""), stopRecord(audit.EventStopProgress, "k"), stopRecord(audit.EventStopCompleted, "")},
	})
	box, err := os.ReadFile("../../deploy/box.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(inst.CardDir(), 0o750); err != nil {
		t.Fatal(err)
	}
	for file, raw := range map[string][]byte{filepath.Join(inst.CardDir(), sum+".yaml"): text, inst.BoxConfig(): box} {
		if err := os.WriteFile(file, raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return inst
}

// unzip unpacks evidence into a directory of its own.
func unzip(t *testing.T, file string) string {
	t.Helper()
	dir := t.TempDir()
	z, err := zip.OpenReader(file)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	for _, f := range z.File {
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, f.Name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// commands returns the README's commands, those that stand indented in it.
func commands(t *testing.T, dir string) []string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, "README.txt"))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(raw)) {
		for _, tool := range []string{"python3 ", "sha256sum ", "openssl ", "sed "} {
			if strings.HasPrefix(line, "    "+tool) {
				out = append(out, strings.TrimSpace(line))
			}
		}
	}
	if len(out) != 6 {
		t.Fatalf("%d commands: %q", len(out), out)
	}
	return out
}

// try runs the commands as an auditor would, in an empty directory for what they write.
func try(t *testing.T, dir string, cmds []string) (string, error) {
	t.Helper()
	script := strings.ReplaceAll("set -e\n"+strings.Join(cmds, "\n"), "/tmp/", t.TempDir()+"/")
	cmd := exec.Command("bash", "-c", script)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestEvidenceIsCheckedWithPublicTools(t *testing.T) {
	evidenceSession(t, "tcliev")
	file := filepath.Join(t.TempDir(), "e.zip")
	code, out, errOut := tagout("--instance", "tcliev", "evidence", "01SESSION", "-o", file, "--incomplete")
	if code != 0 || !strings.Contains(out, "evidence of 01SESSION in ") {
		t.Fatalf("%d %s%s", code, out, errOut)
	}
	for _, why := range strings.Split(strings.TrimSpace(errOut), "\n") {
		if why != "" && !strings.Contains(why, "drill") {
			t.Errorf("something but the drill is missing: %s", why)
		}
	}
	again := filepath.Join(t.TempDir(), "again.zip")
	if code, _, errOut := tagout("--instance", "tcliev", "evidence", "01SESSION", "-o", again, "--incomplete"); code != 0 {
		t.Fatalf("%d %s", code, errOut)
	}
	first, err1 := os.ReadFile(file)
	second, err2 := os.ReadFile(again)
	if err1 != nil || err2 != nil || !bytes.Equal(first, second) {
		t.Errorf("the same logs give another file: %v %v", err1, err2)
	}
	if code, out, errOut := tagout("evidence", "verify", file); code != 0 || !strings.Contains(out, "9 records, all as they were signed") {
		t.Errorf("%d %s%s", code, out, errOut)
	}
	dir := unzip(t, file)
	cmds := commands(t, dir)
	if out, err := try(t, dir, cmds); err != nil || !strings.Contains(out, "all is as it was signed") || strings.Contains(out, "WRONG") {
		t.Errorf("%v\n%s", err, out)
	}
	sheet, err := os.ReadFile(filepath.Join(dir, "worksheet.html"))
	for _, want := range []string{"api.vendor.test", "Ada Operator", "&lt;b&gt;evil.test", "siem: syslog at tcp://192.0.2.60:601", "secret vendor_api, as a token in VENDOR_API_KEY", "/workspace: 64 MiB", "Look after the vendor&#39;s API"} {
		if err != nil || !strings.Contains(string(sheet), want) {
			t.Errorf("the worksheet does not say %q: %v", want, err)
		}
	}
	if strings.Contains(string(sheet), "hooks/tagout") {
		t.Error("the worksheet has a webhook's path, which is often a secret")
	}
	for what, change := range tampering() {
		dir := unzip(t, file)
		if err := change(dir); err != nil {
			t.Fatal(err)
		}
		if out, err := try(t, dir, cmds[:1]); err == nil || !strings.Contains(out, "WRONG") {
			t.Errorf("%s: python finds nothing: %v\n%s", what, err, out)
		}
		packed := pack(t, dir)
		if code, out, _ := tagout("evidence", "verify", packed); code != 1 || !strings.Contains(out, "WRONG") {
			t.Errorf("%s: verify ends with %d\n%s", what, code, out)
		}
	}
}

// remanifest makes the manifest fit the files, as somebody would who has no key.
func remanifest(dir string) error {
	out, err := exec.Command("bash", "-c", "cd "+dir+` && find . -type f ! -name 'manifest.sha256*' -printf '%P\n' | LC_ALL=C sort | xargs sha256sum > manifest.sha256`).CombinedOutput()
	if err != nil {
		return &os.PathError{Op: string(out), Path: dir, Err: err}
	}
	return nil
}

// tampering is what somebody may do to the file.
func tampering() map[string]func(dir string) error {
	edit := func(name, from, to string) func(string) error {
		return func(dir string) error {
			path := filepath.Join(dir, name)
			raw, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if !bytes.Contains(raw, []byte(from)) {
				return &os.PathError{Op: "nothing to change", Path: name, Err: os.ErrInvalid}
			}
			return os.WriteFile(path, bytes.Replace(raw, []byte(from), []byte(to), 1), 0o644)
		}
	}
	return map[string]func(dir string) error{
		"a word of the worksheet": edit("worksheet.html", "Ada Operator", "Eve Operator"),
		"a record":                edit("records/sandboxd.jsonl", `"count":7`, `"count":1`),
		"a record, everywhere": func(dir string) error {
			for _, f := range []string{"records/sandboxd.jsonl", "timeline.jsonl"} {
				if err := edit(f, `"count":7`, `"count":1`)(dir); err != nil {
					return err
				}
			}
			return remanifest(dir)
		},
		"a record left out of the timeline": func(dir string) error {
			path := filepath.Join(dir, "timeline.jsonl")
			raw, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if err := os.WriteFile(path, raw[bytes.IndexByte(raw, '\n')+1:], 0o644); err != nil {
				return err
			}
			return remanifest(dir)
		},
		"a file more": func(dir string) error { return os.WriteFile(filepath.Join(dir, "more.txt"), nil, 0o644) },
		"a file less": func(dir string) error { return os.Remove(filepath.Join(dir, "worksheet.json")) },
		"no proof":    func(dir string) error { return os.WriteFile(filepath.Join(dir, "proofs/credd.proofs"), nil, 0o644) },
		"another's proofs": func(dir string) error {
			return os.Rename(filepath.Join(dir, "proofs/credd.proofs"), filepath.Join(dir, "proofs/sandboxd.proofs"))
		},
		"the checkpoint's root": edit("proofs/credd.checkpoint", "\n2\n", "\n3\n"),
	}
}

// pack makes a zip of a directory.
func pack(t *testing.T, dir string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "changed.zip")
	f, err := os.Create(out)
	if err != nil {
		t.Fatal(err)
	}
	z := zip.NewWriter(f)
	if err := z.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestEvidenceThatLacksSomethingIsRefused(t *testing.T) {
	inst := evidenceSession(t, "tclila")
	file := filepath.Join(t.TempDir(), "e.zip")
	if err := os.RemoveAll(inst.CardDir()); err != nil {
		t.Fatal(err)
	}
	code, out, errOut := tagout("--instance", "tclila", "evidence", "01SESSION", "-o", file)
	if _, err := os.Stat(file); code != 5 || err == nil || !strings.Contains(errOut, "the text of card practice") {
		t.Errorf("%d %s%s %v", code, out, errOut, err)
	}
	if code, _, _ := tagout("--instance", "tclila", "evidence", "nobody", "-o", file); code != 2 {
		t.Errorf("somebody whom nobody knows: %d", code)
	}
	if code, _, _ := tagout("--instance", "tclila", "evidence", "01SESSION"); code != 2 {
		t.Errorf("no file: %d", code)
	}
	log := inst.AuditFile(instance.Sandboxd)
	raw, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(log, bytes.Replace(raw, []byte(`"count":7`), []byte(`"count":1`), 1), 0o640); err != nil {
		t.Fatal(err)
	}
	code, _, errOut = tagout("--instance", "tclila", "evidence", "01SESSION", "-o", file)
	if code != 5 || !strings.Contains(errOut, "is not the one that was signed") {
		t.Errorf("a log that was changed: %d %s", code, errOut)
	}
	if code, out, _ := tagout("evidence", "verify", log); code != 1 || out != "" {
		t.Errorf("what is no zip: %d %s", code, out)
	}
}

func TestEvidenceOfAStop(t *testing.T) {
	evidenceSession(t, "tclist")
	file := filepath.Join(t.TempDir(), "e.zip")
	if code, _, errOut := tagout("--instance", "tclist", "evidence", "01STOP", "-o", file, "--incomplete"); code != 0 {
		t.Fatalf("%d %s", code, errOut)
	}
	raw, err := os.ReadFile(filepath.Join(unzip(t, file), "worksheet.json"))
	var sheet struct {
		Kind, Who string
		Records   int
		Stops     []struct{ Stop, By string }
	}
	if err == nil {
		err = json.Unmarshal(raw, &sheet)
	}
	if err != nil || sheet.Kind != "stop" || sheet.Records != 9 || len(sheet.Stops) != 1 || sheet.Stops[0].By != "Ada" {
		t.Errorf("%v %+v", err, sheet)
	}
}
