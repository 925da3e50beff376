package sandboxd

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/testroot"
)

// TestAConfigurationThatHasChangedIsRecorded, once, with what has changed.
func TestAConfigurationThatHasChangedIsRecorded(t *testing.T) {
	testroot.Require(t)
	inst, err := instance.New("tconfseen", 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(inst.StateDir()) }) // the test's own
	if err := os.MkdirAll(filepath.Join(inst.StateDir(), instance.Sandboxd), 0o700); err != nil {
		t.Fatal(err)
	}
	d := &desk{}
	note := func(config string) []audit.Record {
		t.Helper()
		d.recs = nil
		if err := os.WriteFile(inst.BoxConfig(), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := noteConfig(Config{Inst: inst, Audit: d, Log: slog.New(slog.DiscardHandler)}); err != nil {
			t.Fatal(err)
		}
		return d.recs
	}
	if got := note("a: 1\nb: 2\n"); len(got) != 1 || got[0].Fields["before_sha256"] != "" || !strings.Contains(got[0].Fields["diff"], "+b: 2") {
		t.Errorf("at first: %+v", got)
	}
	if got := note("a: 1\nb: 2\n"); len(got) != 0 {
		t.Errorf("the same: %+v", got)
	}
	got := note("a: 1\nb: 3\n")
	if len(got) != 1 || got[0].Event != audit.EventConfigChanged || !strings.Contains(got[0].Fields["diff"], "-b: 2\n+b: 3\n") ||
		got[0].Fields["before_sha256"] != hexSum([]byte("a: 1\nb: 2\n")) || got[0].Fields["after_sha256"] != hexSum([]byte("a: 1\nb: 3\n")) {
		t.Errorf("changed: %+v", got)
	}
}
