package files

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

var testOwner = Owner{UID: 0x70000000 + 1000, GID: 0x70000000 + 1000}

func workspace(t *testing.T, size int64) string {
	t.Helper()
	testroot.Require(t)
	dir := filepath.Join(t.TempDir(), "ws")
	if err := Mount(dir, size, testOwner); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Unmount(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func source(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o640); err != nil { // the mode is what is tested
		t.Fatal(err)
	}
	return path
}

func input(from, to string, mode os.FileMode) Input {
	return Input{Dir: filepath.Dir(from), From: filepath.Base(from), To: to, Mode: mode}
}

func TestInputsArePlaced(t *testing.T) {
	ws := workspace(t, 1<<20)
	err := Place(ws, []Input{input(source(t, "a", "hello"), "in/deep/a", 0o755), input(source(t, "b", "b"), "b", 0)}, testOwner, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string]os.FileMode{"in/deep/a": 0o755, "b": 0o640} {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(ws, name), &st); err != nil {
			t.Fatal(err)
		}
		if int(st.Uid) != testOwner.UID || os.FileMode(st.Mode&0o777) != mode {
			t.Errorf("%s: uid %d mode %o, want %d %o", name, st.Uid, st.Mode&0o777, testOwner.UID, mode)
		}
	}
}

func TestPlaceNeverLeavesTheWorkspace(t *testing.T) {
	ws := workspace(t, 1<<20)
	outside := t.TempDir()
	if err := os.Symlink(outside, filepath.Join(ws, "link")); err != nil {
		t.Fatal(err)
	}
	from := source(t, "a", "hello")
	for _, to := range []string{"link/a", "link", "../a", "../../etc/a", "x/../../a", ""} {
		if err := Place(ws, []Input{input(from, to, 0)}, testOwner, nil); err == nil {
			t.Errorf("placing at %q: no error", to)
		}
	}
	if left, _ := os.ReadDir(outside); len(left) != 0 {
		t.Errorf("something was written outside: %v", left)
	}
	// Control: without the kernel's help the link is followed, so the check above can fail.
	f, err := os.Create(filepath.Join(ws, "link/a"))
	if err != nil {
		t.Fatal(err)
	}
	f.Close() // empty
	if left, _ := os.ReadDir(outside); len(left) != 1 {
		t.Error("the control did not get outside: the check above proves nothing")
	}
}

func TestInputsStayInTheirDirectory(t *testing.T) {
	ws := workspace(t, 1<<20)
	dir := t.TempDir()
	secret := source(t, "secret", "not yours")
	fifo := filepath.Join(dir, "fifo")
	err := errors.Join(
		os.Symlink(secret, filepath.Join(dir, "out")), os.Symlink("real", filepath.Join(dir, "in")),
		os.WriteFile(filepath.Join(dir, "real"), []byte("x"), 0o600), unix.Mkfifo(fifo, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	for _, from := range []string{"out", "../x", secret, "fifo", ".", "missing"} {
		if err := Place(ws, []Input{{Dir: dir, From: from, To: "t"}}, testOwner, nil); err == nil {
			t.Errorf("input %q: no error", from)
		}
	}
	if err := Place(ws, []Input{{Dir: dir, From: "in", To: "in"}}, testOwner, nil); err != nil {
		t.Errorf("a link that stays inside: %v", err)
	}
}

func TestWorkspaceIsFull(t *testing.T) {
	ws := workspace(t, 64<<10)
	big := source(t, "big", string(make([]byte, 128<<10)))
	if err := Place(ws, []Input{input(big, "big", 0)}, testOwner, nil); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("placing 128k into 64k: %v, want ENOSPC", err)
	}
}

func TestUnmountTwice(t *testing.T) {
	ws := workspace(t, 64<<10)
	for range 2 {
		if err := Unmount(ws); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(ws); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the workspace is still there: %v", err)
	}
}
