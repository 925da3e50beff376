package supervise

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
)

// TestADaemonGetsItsKeyOpen, anew at each start, though it could not open the file itself; nothing of the key is in its
// arguments or environment, no other daemon gets it, and one whose file is gone starts without.
func TestADaemonGetsItsKeyOpen(t *testing.T) {
	b := newBox(t, "tsupk", 9, nil)
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("hunter2hunter2"), 0o400); err != nil { // root's
		t.Fatal(err)
	}
	b.cfg.Specs[1].Unlock = key
	b.up()
	got := func() string {
		raw, _ := os.ReadFile(filepath.Join(filepath.Dir(b.cfg.Specs[1].Socket), "key"+strconv.Itoa(b.pid("b"))))
		return string(raw)
	}
	if got() != "hunter2hunter2" {
		t.Errorf("the daemon got %q", got())
	}
	for _, s := range b.cfg.Specs {
		for _, file := range []string{"cmdline", "environ"} {
			raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(b.pid(s.Name)), file))
			if err != nil || strings.Contains(string(raw), "hunter2") || s.Name != "b" && strings.Contains(string(raw), instance.UnlockEnv) {
				t.Errorf("%s's %s: %q, %v", s.Name, file, raw, err)
			}
		}
	}
	again := func(what string, cond func() bool) {
		t.Helper()
		old := b.pid("b")
		if err := unix.Kill(old, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, what, func() bool { return b.pid("b") != old && b.pid("b") != 0 && cond() })
	}
	again("it gets the key again", func() bool { return got() == "hunter2hunter2" })
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	again("it starts without", func() bool {
		raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(b.pid("b")), "environ"))
		return err == nil && len(raw) > 0 && !strings.Contains(string(raw), instance.UnlockEnv)
	})
	if err := unix.Mkfifo(key, 0o600); err != nil {
		t.Fatal(err)
	}
	again("a pipe holds nothing up", func() bool { return true })
	if !strings.Contains(b.log.String(), "opening what opens the vault") {
		t.Errorf("nothing in the log:\n%s", b.log.String())
	}
}
