package kids

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/instance"
)

// small is a directory of the box's on a file system of its own that can be made as small as wanted.
type small struct {
	*box
	dir  string
	mode int
}

func newSmall(t *testing.T, dir func(instance.Instance) string) *small {
	t.Helper()
	b := newBox(t, "tsbsmall")
	s := &small{box: b, dir: dir(b.inst)}
	info, err := os.Stat(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	s.mode = int(info.Mode().Perm())
	if err := unix.Mount("none", s.dir, "tmpfs", 0, fmt.Sprintf("mode=%o,%s", s.mode, sizes(enough, enough))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.empty()
		s.resize(enough, enough)
		if !strings.HasPrefix(s.dir, b.inst.RunDir()+"/") { // what is below goes with the box
			unix.Unmount(s.dir, unix.MNT_DETACH)
		}
	})
	return s
}

// enough pages and files for anything.
const enough = 4096

func sizes(pages, files int) string {
	return fmt.Sprintf("size=%d,nr_inodes=%d", pages*os.Getpagesize(), files)
}

// resize gives the file system so many pages and files, which are not fewer than it has.
func (s *small) resize(pages, files int) {
	s.t.Helper()
	if err := unix.Mount("none", s.dir, "tmpfs", unix.MS_REMOUNT, sizes(pages, files)); err != nil {
		s.t.Fatal(err)
	}
}

// wantUnused wants nothing but the small file system to be there.
func (s *small) wantUnused() {
	s.t.Helper()
	left := slices.DeleteFunc(s.leftovers(), func(l string) bool { return l == "mount "+s.dir })
	if len(left) > 0 {
		s.t.Fatalf("left behind:\n%s", strings.Join(left, "\n"))
	}
}

// TestDiskFullAtASpawn (K09): every place that a spawn writes to has room for one page and one file more each time, until it
// succeeds. Before that, whatever could not be written, there is no kid, nothing of it is left and the answer says why.
func TestDiskFullAtASpawn(t *testing.T) {
	for name, dir := range map[string]func(instance.Instance) string{
		"kids":     func(i instance.Instance) string { return filepath.Dir(i.KidDir("x")) },
		"sessions": instance.Instance.SessionDir,
		"runc":     instance.Instance.RuncRoot,
		"netns":    instance.Instance.NetNSDir,
	} {
		for _, what := range []string{"pages", "files"} {
			t.Run(name+" "+what, func(t *testing.T) {
				s := newSmall(t, dir)
				n := 1
				for ; ; n++ {
					if what == "pages" {
						s.resize(n, enough)
					} else {
						s.resize(enough, n)
					}
					_, err := s.Spawn(t.Context(), Request{Name: "k1", Purpose: "test", Plan: plan()})
					if err == nil {
						break
					}
					if KindOf(err) != Capacity || !errors.Is(err, unix.ENOSPC) {
						t.Errorf("%d %s: %v", n, what, err)
					}
					s.wantUnused()
					if n > 100 {
						t.Fatal("no room seems to be enough")
					}
				}
				t.Logf("%d %s are enough", n, what)
				if refused := s.audit.count(audit.EventKidRefused, audit.OutcomeFail); refused != n-1 {
					t.Errorf("%d refusals are recorded, want %d", refused, n-1)
				}
				s.resize(enough, enough)
				if r := s.sh("k1", "echo well"); r.stdout.String() != "well\n" {
					t.Errorf("the kid that had just room enough: %q %q", r.stdout.String(), r.stderr.String())
				}
				s.fill()
				if err := s.Destroy(t.Context(), "k1", "test", "the disk is full"); err != nil { // which writes nothing that it needs
					t.Error(err)
				}
				s.empty()
				s.wantUnused()
			})
		}
	}
}

// fill leaves no room at all, neither in bytes nor in files.
func (s *small) fill() {
	s.t.Helper()
	if err := os.WriteFile(s.full(), make([]byte, (enough+1)*os.Getpagesize()), 0o600); !errors.Is(err, unix.ENOSPC) {
		s.t.Fatalf("filling %s: %v", s.dir, err)
	}
	for n := 0; ; n++ {
		if err := os.Link(s.full(), s.full()+strconv.Itoa(n)); err != nil {
			if !errors.Is(err, unix.ENOSPC) {
				s.t.Fatalf("filling %s: %v", s.dir, err)
			}
			return
		}
	}
}

func (s *small) empty() {
	files, _ := filepath.Glob(s.full() + "*") // the pattern is well-formed
	for _, f := range files {
		os.Remove(f) // it may be gone
	}
}

func (s *small) full() string { return filepath.Join(s.dir, ".Full") }

// TestDiskFullForTheCounter: no mark is given out that a crash could give out again.
func TestDiskFullForTheCounter(t *testing.T) {
	s := newSmall(t, func(i instance.Instance) string {
		dir := filepath.Join(i.StateDir(), instance.Sandboxd)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		return dir
	})
	s.fill()
	_, err := s.Spawn(t.Context(), Request{Name: "k1", Purpose: "test", Plan: plan()})
	if KindOf(err) != Capacity || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a mark that cannot be noted: %v", err)
	}
	s.wantNothingLeft()
	s.empty()
	s.spawn("k1", plan())
}
