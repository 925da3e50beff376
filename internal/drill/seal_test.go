package drill

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/authority"
	"tagout/internal/wire"
)

// aReport is a drill of one technique in which everything went as it should.
func aReport() *Report {
	rep := &Report{
		Format: 1, Instance: "drill", By: "Ada <script>alert(1)</script>", Started: time.Date(2026, 5, 1, 9, 0, 0, 0, time.UTC), Runs: 2,
		SLA: DefaultSLA(), Environment: Environment{Host: "box"}, Techniques: []Technique{allAtOnce()},
	}
	for run := 1; run <= 2; run++ {
		r := Result{Kind: KindStop, Technique: everything, Case: Together().Name, Run: run}
		r.judge(wire.AllLayers(), rep.SLA, verdicts{wire.LayerSession: time.Duration(run) * 20 * time.Millisecond, wire.LayerNetwork: 0, wire.LayerCredential: time.Millisecond})
		r.Story = []Event{{-time.Millisecond, "the agent is at work"}, {0, "order written"}}
		rep.Results = append(rep.Results, r)
	}
	for _, b := range controls() {
		r := Result{Kind: KindControl, Technique: everything, Case: b.name, Run: 1}
		r.judge(b.judged, rep.SLA, verdicts{})
		rep.Results = append(rep.Results, r)
	}
	rep.close(true)
	return rep
}

func keys(t *testing.T, name string) (private, public string) {
	t.Helper()
	private, public, err := authority.NewKey(name)
	if err != nil {
		t.Fatal(err)
	}
	return private, public
}

func TestVerifySaysWhatIsWrong(t *testing.T) {
	private, public := keys(t, "ada")
	_, other := keys(t, "eve")
	_, namesake := keys(t, "ada")
	edit := func(name string, change func([]byte) []byte) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			raw, err := os.ReadFile(filepath.Join(dir, name))
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, name), change(raw), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	remove := func(name string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	flip := func(raw []byte) []byte { return bytes.Replace(raw, []byte("PASS"), []byte("FAIL"), 1) }
	cut := func(raw []byte) []byte { return raw[:len(raw)-20] }
	for name, tc := range map[string]struct {
		change func(*testing.T, string)
		key    string
		file   string
		want   string // in the error; empty: it verifies
	}{
		"nothing":           {nil, public, FileJSON, ""},
		"by the page":       {nil, public, FileHTML, ""},
		"by the note":       {nil, public, FileNote, ""},
		"page left out":     {remove(FileHTML), public, FileJSON, ""},
		"a byte":            {edit(FileJSON, flip), public, FileJSON, "drill.json is not what was signed: it has the same length"},
		"a byte, page":      {edit(FileHTML, flip), public, FileJSON, "drill.html is not what was signed"},
		"the end":           {edit(FileJSON, cut), public, FileJSON, "20 bytes are missing"},
		"more":              {edit(FileJSON, func(raw []byte) []byte { return append(raw, '\n') }), public, FileJSON, "1 bytes were added"},
		"the note's text":   {edit(FileNote, flip), public, FileJSON, "drill.note was changed after it was signed"},
		"the note's end":    {edit(FileNote, cut), public, FileJSON, "drill.note is not whole"},
		"no note":           {remove(FileNote), public, FileJSON, "the signature is missing"},
		"no file":           {remove(FileJSON), public, FileJSON, "drill.json is not there"},
		"another's key":     {nil, other, FileJSON, "signed with another key: ada+"},
		"a namesake's key":  {nil, namesake, FileJSON, "signed with another key: ada+"},
		"the private key":   {nil, private, FileJSON, "no public key"},
		"something unnamed": {nil, public, "other.json", "not a file that was signed"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if _, err := aReport().Seal(dir, private); err != nil {
				t.Fatal(err)
			}
			if tc.change != nil {
				tc.change(t, dir)
			}
			s, err := Verify(filepath.Join(dir, tc.file), tc.key)
			if tc.want == "" {
				if err != nil || s.Verdict != Pass || len(s.Checked)+len(s.Absent) != 2 {
					t.Errorf("%+v %v", s, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%+v %v, want %q", s, err, tc.want)
			}
		})
	}
}

// TestASignatureOnSomethingElseIsNone: a key that signs orders signs no drill by it.
func TestASignatureOnSomethingElseIsNone(t *testing.T) {
	private, public := keys(t, "ada")
	order := authority.New(authority.Order{Action: authority.ActionStop, Box: "b", Scope: wire.Scope{All: true}, By: "ada", Reason: "r"}, time.Now(), authority.Life)
	raw, err := authority.Sign(order, private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, FileNote), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Verify(filepath.Join(dir, FileNote), public); err == nil || !strings.Contains(err.Error(), "no drill's") {
		t.Errorf("an order verifies as a drill: %v", err)
	}
}

func TestThePageNeedsNothingElseAndEscapes(t *testing.T) {
	raw, err := aReport().HTML("ada")
	if err != nil {
		t.Fatal(err)
	}
	text := string(raw)
	for _, bad := range []string{"<script", "http://", "https://", "src=", "@import", "url("} {
		if strings.Contains(text, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	for _, part := range []string{"PASS", "session layer, milliseconds", "FAIL, as it must", "40.0 ms", "order written", "<svg"} {
		if !strings.Contains(text, part) {
			t.Errorf("the page lacks %q", part)
		}
	}
}

func TestBoxKeyStays(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "keys")
	first, public, err := BoxKey(dir, "box")
	if err != nil {
		t.Fatal(err)
	}
	again, _, err := BoxKey(dir, "another name")
	if err != nil || again != first {
		t.Errorf("the key changed: %v", err)
	}
	info, err := os.Stat(filepath.Join(dir, "key"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the private key: %v %v", info, err)
	}
	if raw, err := os.ReadFile(filepath.Join(dir, "key.pub")); err != nil || strings.TrimSpace(string(raw)) != public {
		t.Errorf("the public key: %q %v", raw, err)
	}
}
