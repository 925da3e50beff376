package kids

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/leaks"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
)

// A key that opens nothing, put together so that no scanner finds it in this file, or in the program that the tests give
// to kids.
var aLongLivedKey = strings.Join([]string{"ghp", "abcdEFGHijklMNOPqrstUVWX012345678901"}, "_")

// keyDetector is one for all tests. It is not in every test's manager: the program that these give to kids is the tests'
// own, which holds gitleaks' rules, and they look like keys.
var keyDetector = sync.OnceValues(leaks.New)

func newKeyBox(t *testing.T, name string) *box {
	t.Helper()
	b := newBox(t, name)
	keys, err := keyDetector()
	if err != nil {
		t.Fatal(err)
	}
	b.cfg.Keys = keys
	return b
}

// archive is a tar stream with one file.
func archive(t *testing.T, name, content string) *bytes.Buffer {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(content)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &out
}

// TestNoLongLivedKeyGoesIntoAKid: by each way in what looks like one is refused, by the rule and the place, and never
// quoted; the same without a key passes, and with the search off the key does.
func TestNoLongLivedKeyGoesIntoAKid(t *testing.T) {
	b := newKeyBox(t, "tsbkeys")
	b.spawn("k", plan())
	tryExec := func(r wire.ExecRequest) error {
		_, err := runExec(t.Context(), b.Manager, "k", r)
		return err
	}
	ways := map[string]struct {
		bring func(text string) error
		place string // that the refusal names
	}{
		"variable of the card": {func(text string) error {
			p := plan()
			p.Env = map[string]string{"TOKEN": text}
			_, err := b.Spawn(t.Context(), Request{Name: "other", Purpose: "test", Actor: "test", Plan: p})
			if err == nil {
				err = b.Destroy(t.Context(), "other", "test", "a test")
			}
			return err
		}, "variable TOKEN"},
		"input": {func(text string) error {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "in"), []byte("first\nsecond="+text+"\n"), 0o600); err != nil {
				return err
			}
			p := plan()
			p.Inputs = []files.Input{{Dir: dir, From: "in", To: "job/in"}}
			_, err := b.Spawn(t.Context(), Request{Name: "other", Purpose: "test", Actor: "test", Plan: p})
			if err == nil {
				err = b.Destroy(t.Context(), "other", "test", "a test")
			}
			return err
		}, "line 2 of /workspace/job/in"},
		"file": {func(text string) error {
			_, err := b.PutFile(t.Context(), "k", "test", "/workspace/f", 0o644, strings.NewReader("k: "+text))
			return err
		}, "line 1 of /workspace/f"},
		"name of a file": {func(text string) error {
			_, err := b.PutFile(t.Context(), "k", "test", "/workspace/"+strings.ReplaceAll(text, " ", "-"), 0o644, strings.NewReader("x"))
			return err
		}, "the name of a file"},
		"archive": {func(text string) error {
			_, err := b.PutArchive(t.Context(), "k", "test", "/tmp/a", archive(t, "d/f", "\n\nk: "+text))
			return err
		}, "line 3 of /tmp/a/d/f"},
		"variable of a command": {func(text string) error {
			return tryExec(wire.ExecRequest{Argv: []string{"true"}, Env: map[string]string{"TOKEN": text}})
		}, "variable TOKEN"},
		"argument": {func(text string) error {
			return tryExec(wire.ExecRequest{Argv: []string{"true", "-H", "Authorization: Bearer " + text}})
		}, "argument 2"},
		"shell": {func(text string) error { return tryExec(wire.ExecRequest{Shell: "true\nK=" + text + " true"}) }, "argument 2 has in line 2"},
		"input of a command": {func(text string) error {
			return tryExec(wire.ExecRequest{Argv: []string{"true"}, Stdin: []byte(text)})
		}, "standard input"},
	}
	for name, way := range ways {
		err := way.bring(aLongLivedKey)
		if ReasonOf(err) != reason.LooksLikeKey || KindOf(err) != Invalid || !strings.Contains(err.Error(), way.place) ||
			!strings.Contains(err.Error(), "github-pat") || strings.Contains(err.Error(), aLongLivedKey[:12]) {
			t.Errorf("%s: %v", name, err)
		}
		if err := way.bring("nothing of the kind"); err != nil {
			t.Errorf("%s, control: %v", name, err)
		}
	}
	if out := b.sh("k", "ls -a /workspace /tmp/a/d"); strings.Contains(out.stdout.String(), "tagout-new") {
		t.Errorf("something was left behind: %q", out.stdout.String())
	}
	if r := b.sh("k", "cat /workspace/f /tmp/a/d/f"); strings.Contains(r.stdout.String(), aLongLivedKey) {
		t.Error("the key is in the kid")
	}
	b.audit.mu.Lock()
	if all := fmt.Sprintf("%+v", b.audit.all); strings.Contains(all, aLongLivedKey) {
		t.Error("a record has the key")
	}
	b.audit.mu.Unlock()
	b.cfg.Keys = nil
	for name, way := range ways {
		if err := way.bring(aLongLivedKey); err != nil {
			t.Errorf("%s, with the search off: %v", name, err)
		}
	}
}

// TestWhatTheCardSaysIsNoKey passes in that file or variable alone, by that rule alone, and is recorded with the reason.
func TestWhatTheCardSaysIsNoKey(t *testing.T) {
	b := newKeyBox(t, "tsbnokey")
	p := plan()
	p.NotKeys = []session.NotKey{
		{File: "/workspace/testdata/*.txt", Rule: "github-pat", Reason: "a fixture that opens nothing"},
		{File: "/workspace/other.txt", Rule: "private-key", Reason: "another rule"},
		{Env: "FIXTURE", Rule: "github-pat", Reason: "a variable that opens nothing"},
	}
	p.Env = map[string]string{"FIXTURE": aLongLivedKey}
	b.spawn("k", p)
	b.sh("k", "mkdir testdata")
	tryExec := func(r wire.ExecRequest) error {
		_, err := runExec(t.Context(), b.Manager, "k", r)
		return err
	}
	for path, ok := range map[string]bool{
		"/workspace/testdata/a.txt": true, "/workspace/testdata/a.bin": false, "/workspace/other.txt": false, "/tmp/a.txt": false,
	} {
		_, err := b.PutFile(t.Context(), "k", "ada", path, 0o644, strings.NewReader("\n"+aLongLivedKey))
		if ok != (err == nil) || err != nil && ReasonOf(err) != reason.LooksLikeKey {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := tryExec(wire.ExecRequest{Argv: []string{"true"}, Env: map[string]string{"OTHER": aLongLivedKey}}); ReasonOf(err) != reason.LooksLikeKey {
		t.Errorf("another variable: %v", err)
	}
	var got []string
	b.audit.mu.Lock()
	for _, rec := range b.audit.all {
		if rec.Event == audit.EventKeyAllowed {
			got = append(got, rec.Kid+" "+rec.Fields["file"]+rec.Fields["variable"]+" "+rec.Fields["rule"]+" "+rec.Fields["line"]+" "+rec.Detail)
		}
	}
	b.audit.mu.Unlock()
	want := "k FIXTURE github-pat 1 a variable that opens nothing; k /workspace/testdata/a.txt github-pat 2 a fixture that opens nothing"
	if strings.Join(got, "; ") != want {
		t.Errorf("recorded %q, want %q", strings.Join(got, "; "), want)
	}
}
