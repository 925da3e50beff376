package idmap

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

func TestOwnersAreShiftedAndNothingIsWritable(t *testing.T) {
	testroot.Require(t)
	dir, to := t.TempDir(), t.TempDir()
	file := filepath.Join(dir, "f")
	if err := errors.Join(os.WriteFile(file, []byte("x"), 0o600), os.Chown(file, 7, 8)); err != nil {
		t.Fatal(err)
	}
	err := inUserNS(t.Context(), func(userns string) error {
		for _, ns := range []string{userns, ""} { // the second is the control
			if err := Mount(dir, to, ns); err != nil {
				return err
			}
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(to, "f"), &st); err != nil {
				return err
			}
			want := uint32(7)
			if ns != "" {
				want += tryUID
			}
			if st.Uid != want || st.Gid != want+1 {
				t.Errorf("with namespace %q: owner %d:%d, want %d", ns, st.Uid, st.Gid, want)
			}
			if err := os.WriteFile(filepath.Join(to, "f"), nil, 0o600); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing: %v, want %v", err, unix.EROFS)
			}
			if err := os.RemoveAll(to); !errors.Is(err, unix.EROFS) && !errors.Is(err, unix.EBUSY) {
				t.Errorf("removing all of it: %v", err)
			}
			if err := unix.Unmount(to, 0); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil || st.Uid != 7 {
		t.Errorf("on disk: uid %d, %v", st.Uid, err)
	}
}

// left lists what there is in dir, and what is mounted there.
func left(t *testing.T, dir string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.HasPrefix(strings.Fields(line)[4], dir+"/") {
			out = append(out, "a mount")
		}
	}
	return out
}

// TestTryLeavesNothing of its own, nor of a predecessor that was killed before it cleaned up.
func TestTryLeavesNothing(t *testing.T) {
	testroot.Require(t)
	dir := t.TempDir()
	if err := Try(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if l := left(t, dir); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
	// Control: without its clean-up a try leaves a directory and a mount.
	if err := try(t.Context(), filepath.Join(dir, ".idmap-try")); err != nil {
		t.Fatal(err)
	}
	if l := left(t, dir); !slices.Equal(l, []string{".idmap-try", "a mount"}) {
		t.Errorf("a try without its clean-up left %v: the test shows nothing", l)
	}
	if err := Try(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if l := left(t, dir); len(l) > 0 {
		t.Errorf("left of a killed predecessor: %v", l)
	}
}

func TestTryWhereItCannotWork(t *testing.T) {
	testroot.Require(t)
	if err := Try(t.Context(), "/proc"); err == nil {
		t.Error("no error below /proc")
	}
	if err := inUserNS(t.Context(), func(userns string) error { return Mount("/proc/self", t.TempDir(), userns) }); !errors.Is(err, unix.EINVAL) {
		t.Errorf("proc, which has no idmapped mounts: %v, want %v", err, unix.EINVAL)
	}
}
