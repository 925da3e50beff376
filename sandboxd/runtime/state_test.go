package runtime

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

// TestDeleteTakesAwayWhatAKilledRuncHadMounted: it keeps a copy of its program mounted beside its state while it makes a
// container.
func TestDeleteTakesAwayWhatAKilledRuncHadMounted(t *testing.T) {
	testroot.Require(t)
	r, err := NewRunc(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(r.root, "k1")
	file := filepath.Join(dir, "runc.left")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(file, nil, 0o600), unix.Mount("/proc/self/exe", file, "", unix.MS_BIND, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(file, unix.MNT_DETACH) }) // gone already, unless the test fails
	if err := os.RemoveAll(dir); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("removing it without unmounting: %v, want %v: the test shows nothing", err, unix.EBUSY)
	}
	if err := r.Delete(t.Context(), "k1"); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its state is still there: %v", err)
	}
}
