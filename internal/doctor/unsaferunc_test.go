package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/testroot"
)

// TestAnUnsafeRuncIsNamed: the runc that is first on PATH is the one that counts, and sandboxd does not start with a bad one.
func TestAnUnsafeRuncIsNamed(t *testing.T) {
	testroot.Require(t)
	dir := t.TempDir()
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	for version, safe := range map[string]bool{"1.0.0-rc6": false, "1.1.11": false, "1.1.12": true, "1.3.3": true} {
		script := "#!/bin/sh\necho 'runc version " + version + "'\necho 'commit: v" + version + "'\n"
		if err := os.WriteFile(filepath.Join(dir, "runc"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		r := run(t, Probes{BPF: goodBPF})
		why := ""
		if err := r.Refusal(); err != nil {
			why = err.Error()
		}
		if r.OK != safe || !safe && (!strings.Contains(why, version) || !strings.Contains(why, "CVE-2024-21626")) {
			t.Errorf("runc %s: ok %v: %s", version, r.OK, why)
		}
		if !safe && (!strings.Contains(r.String(), version) || !strings.Contains(r.String(), "1.1.12 or newer")) {
			t.Errorf("runc %s: what people read:\n%s", version, r)
		}
	}
}
