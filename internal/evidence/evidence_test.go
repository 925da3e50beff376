package evidence

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/authority"
	"tagout/internal/drillhistory"
)

// drilled is a machine with one drill, whose report is signed, and no logs.
func drilled(t *testing.T) (cfg Config, id, report string) {
	t.Helper()
	private, _, err := authority.NewKey("box")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	report = filepath.Join(dir, "report")
	cfg = Config{AuditDir: filepath.Join(dir, "audit"), CardDir: filepath.Join(dir, "cards"), DrillDir: filepath.Join(dir, "drills"), Signer: private, Version: "v1"}
	if err := os.Mkdir(report, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"drill.json", "drill.html", "drill.note"} {
		if err := os.WriteFile(filepath.Join(report, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	sum := sha256.Sum256([]byte("drill.json"))
	if err := drillhistory.Add(cfg.DrillDir, drillhistory.Entry{Started: time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC), By: "Ada", Verdict: "PASS", Whole: true, Runs: 3, Report: report, SHA256: hex.EncodeToString(sum[:]), Key: "drill@box+key",
		Slowest: map[string]time.Duration{"session": 51 * time.Millisecond}}); err != nil {
		t.Fatal(err)
	}
	all, err := drillhistory.List(cfg.DrillDir)
	if err != nil || len(all) != 1 {
		t.Fatal(all, err)
	}
	return cfg, all[0].ID, report
}

func TestEvidenceOfADrill(t *testing.T) {
	cfg, id, report := drilled(t)
	var first, second bytes.Buffer
	for _, out := range []*bytes.Buffer{&first, &second} {
		if missing, err := Write(t.Context(), cfg, id, out); err != nil || len(missing) != 0 {
			t.Fatal(missing, err)
		}
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the same drill gives another file")
	}
	c, err := Verify(bytes.NewReader(first.Bytes()), int64(first.Len()), nil)
	if err != nil || len(c.Problems) != 0 || c.Kind != "drill" || c.Who != id {
		t.Errorf("%+v %v", c, err)
	}
	public, err := authority.Public(cfg.Signer)
	if err != nil {
		t.Fatal(err)
	}
	if c, err := Verify(bytes.NewReader(first.Bytes()), int64(first.Len()), map[string]string{"manifest": public}); err != nil || len(c.Problems) != 0 {
		t.Errorf("with the right key: %+v %v", c, err)
	}
	_, other, err := authority.NewKey("box")
	if err != nil {
		t.Fatal(err)
	}
	if c, err := Verify(bytes.NewReader(first.Bytes()), int64(first.Len()), map[string]string{"manifest": other}); err != nil || len(c.Problems) == 0 {
		t.Errorf("with another key of the same name: %+v %v", c, err)
	}
	if err := os.WriteFile(filepath.Join(report, "drill.json"), []byte("better"), 0o644); err != nil {
		t.Fatal(err)
	}
	var lacks Missing
	if _, err := Write(t.Context(), cfg, id, &second); !errors.As(err, &lacks) || !strings.Contains(err.Error(), "was changed") {
		t.Errorf("a report that was changed: %v", err)
	}
	if _, err := Write(t.Context(), cfg, "01NOBODY", &second); !errors.Is(err, ErrUnknown) {
		t.Errorf("what nobody knows: %v", err)
	}
}

func zipped(t *testing.T, files ...[2]string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, f := range files {
		w, err := z.CreateHeader(&zip.FileHeader{Name: f[0], Method: zip.Deflate})
		if err == nil {
			_, err = w.Write([]byte(f[1]))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Whatever a file holds, Verify neither believes it nor falls over it.
func TestHostileFilesAreNotBelieved(t *testing.T) {
	for what, raw := range map[string][]byte{
		"empty":      zipped(t),
		"a manifest": zipped(t, [2]string{ManifestFile, "x\n"}, [2]string{SignatureFile, "y"}, [2]string{"worksheet.json", "{}"}),
		"records":    zipped(t, [2]string{"records/x.jsonl", "{}\n\n{}"}, [2]string{"proofs/x.proofs", "0\n1 a\n99999999999999999999"}, [2]string{"proofs/x.checkpoint", "x\n1\n"}, [2]string{"keys/x.pub", "x+1+A"}),
		"a key":      zipped(t, [2]string{"keys/manifest.pub", "a+b+c"}, [2]string{"keys/manifest.pem", ""}),
	} {
		if c, err := Verify(bytes.NewReader(raw), int64(len(raw)), nil); err == nil && len(c.Problems) == 0 {
			t.Errorf("%s is believed: %+v", what, c)
		}
	}
	for what, raw := range map[string][]byte{
		"no zip":       []byte("PK\x03\x04"),
		"a way up":     zipped(t, [2]string{"../x", ""}),
		"a root":       zipped(t, [2]string{"/x", ""}),
		"a file twice": zipped(t, [2]string{"x", "1"}, [2]string{"x", "2"}),
		"a backslash":  zipped(t, [2]string{`a\b`, ""}),
	} {
		if c, err := Verify(bytes.NewReader(raw), int64(len(raw)), nil); err == nil {
			t.Errorf("%s is read: %+v", what, c)
		}
	}
}

func FuzzVerify(f *testing.F) {
	f.Add("0 AAAA", `{"v":1}`, "x\n1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n\n— x AAAA\n", "x+00000000+AQ==", "deadbeef  worksheet.json\n")
	f.Fuzz(func(t *testing.T, proofs, records, checkpoint, key, manifest string) {
		raw := zipped(t, [2]string{"records/x.jsonl", records}, [2]string{"proofs/x.proofs", proofs}, [2]string{"proofs/x.checkpoint", checkpoint}, [2]string{"keys/x.pub", key}, [2]string{"keys/manifest.pub", key}, [2]string{ManifestFile, manifest})
		if c, err := Verify(bytes.NewReader(raw), int64(len(raw)), nil); err == nil && len(c.Problems) == 0 {
			t.Errorf("it is believed: %+v", c)
		}
	})
}
