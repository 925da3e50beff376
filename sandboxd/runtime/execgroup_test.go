package runtime

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestKillswitchdCanLookIntoACommandsCgroup: a stop names what it did not see die, and most of that is in the
// cgroups of commands. sandboxd's umask must not hide them.
func TestKillswitchdCanLookIntoACommandsCgroup(t *testing.T) {
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	parent := t.TempDir()
	dir := filepath.Join(parent, "exec-1")
	for range 2 { // also one that is there already
		if err := makeGroup("", parent, dir); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm() != 0o755 {
			t.Fatalf("%v, %v", info, err)
		}
	}
}
