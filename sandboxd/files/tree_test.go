package files

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tree is a workspace with a file, a directory and everything that a hostile kid could put into it. outside holds a
// secret that only root can read, and one that everybody can.
func tree(t *testing.T) (tr *Tree, ws, outside string) {
	t.Helper()
	ws = workspace(t, 8<<20)
	outside = t.TempDir()
	err := errors.Join(
		os.Chmod(outside, 0o755), os.WriteFile(filepath.Join(outside, "secret"), []byte("secret"), 0o644),
		os.WriteFile(filepath.Join(ws, "file"), []byte("hello"), 0o644), os.MkdirAll(filepath.Join(ws, "dir/sub"), 0o755),
		os.WriteFile(filepath.Join(ws, "dir/sub/f"), []byte("deep"), 0o600),
		os.Symlink(filepath.Join(outside, "secret"), filepath.Join(ws, "link")), os.Symlink(outside, filepath.Join(ws, "linkdir")),
		os.Symlink(filepath.Join(outside, "new"), filepath.Join(ws, "dangling")), os.Symlink("/proc/self/root", filepath.Join(ws, "magic")),
		os.Symlink("file", filepath.Join(ws, "inner")), unix.Mkfifo(filepath.Join(ws, "fifo"), 0o644),
		unix.Mknod(filepath.Join(ws, "device"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))),
		os.WriteFile(filepath.Join(ws, "sparse"), nil, 0o644), os.Truncate(filepath.Join(ws, "sparse"), 5<<30),
	)
	if err != nil {
		t.Fatal(err)
	}
	if err := filepath.WalkDir(ws, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, testOwner.UID, testOwner.GID))
	}); err != nil {
		t.Fatal(err)
	}
	if tr, err = OpenHost(ws, testOwner); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.Close)
	return tr, ws, outside
}

func get(tr *Tree, rel string) (string, error) {
	f, info, err := tr.Get(rel)
	if err != nil {
		return "", err
	}
	defer f.Close() // only read
	raw, err := io.ReadAll(io.LimitReader(f, info.Size))
	return string(raw), err
}

// TestGetNeverLeavesThePlace (K06, K07).
func TestGetNeverLeavesThePlace(t *testing.T) {
	tr, ws, _ := tree(t)
	for rel, want := range map[string]string{"file": "hello", "dir/sub/f": "deep"} {
		if got, err := get(tr, rel); got != want || err != nil {
			t.Errorf("%s: %q %v", rel, got, err)
		}
	}
	for rel, want := range map[string]error{
		"link": ErrPath, "linkdir/secret": ErrPath, "dangling": ErrPath, "magic/etc/passwd": ErrPath, "inner": ErrPath, "../x": ErrPath,
		"fifo": ErrKind, "dir": ErrKind, "sparse": ErrLarge, "missing": fs.ErrNotExist,
	} {
		began := time.Now()
		if got, err := get(tr, rel); !errors.Is(err, want) || got != "" {
			t.Errorf("%s: %q %v, want %v", rel, got, err, want)
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("%s took %v", rel, took)
		}
	}
	if _, err := get(tr, "device"); err == nil {
		t.Error("a device was read")
	}
	// Control: without the kernel's help the links lead out.
	if raw, err := os.ReadFile(filepath.Join(ws, "linkdir/secret")); string(raw) != "secret" {
		t.Errorf("the control did not get outside (%v): the checks above prove nothing", err)
	}
}

// TestTheKidsRightsAreUsed: a way out would be of no use, because what root may read is not read.
func TestTheKidsRightsAreUsed(t *testing.T) {
	tr, ws, _ := tree(t)
	if err := os.WriteFile(filepath.Join(ws, "roots"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := get(tr, "roots"); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("root's own file: %v", err)
	}
	if _, err := os.ReadFile(filepath.Join(ws, "roots")); err != nil {
		t.Errorf("control: this process lost root's rights: %v", err)
	}
	if _, err := tr.Put("mine", 0o640, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(ws, "mine"), &st); err != nil || int(st.Uid) != testOwner.UID || int(st.Gid) != testOwner.GID || st.Mode&0o777 != 0o640 {
		t.Errorf("a new file belongs to %d:%d, mode %o, %v", st.Uid, st.Gid, st.Mode, err)
	}
}

func TestPutNeverLeavesThePlace(t *testing.T) {
	tr, ws, outside := tree(t)
	for _, rel := range []string{"file", "new", "dir/sub/f"} {
		if n, err := tr.Put(rel, 0o644, strings.NewReader("put")); n != 3 || err != nil {
			t.Errorf("%s: %d %v", rel, n, err)
		}
		if got, err := get(tr, rel); got != "put" || err != nil {
			t.Errorf("%s holds %q, %v", rel, got, err)
		}
	}
	for rel, want := range map[string]error{
		"link": ErrPath, "linkdir/x": ErrPath, "dangling": ErrPath, "magic/tmp/x": ErrPath, "inner": ErrPath, "../x": ErrPath,
		"fifo": ErrKind, "dir": ErrKind, "device": ErrKind, "no/such": fs.ErrNotExist,
	} {
		if _, err := tr.Put(rel, 0o644, strings.NewReader("put")); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", rel, err, want)
		}
	}
	if _, err := tr.Put("big", 0o644, io.LimitReader(zeros{}, 64<<20)); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("more than the place holds: %v", err)
	}
	if left, _ := os.ReadDir(outside); len(left) != 1 {
		t.Errorf("something was written outside: %v", left)
	}
	if raw, _ := os.ReadFile(filepath.Join(outside, "secret")); string(raw) != "secret" {
		t.Errorf("the secret is %q now", raw)
	}
	left, _ := filepath.Glob(filepath.Join(ws, newPrefix+"*"))
	deep, _ := filepath.Glob(filepath.Join(ws, "dir/sub", newPrefix+"*"))
	if len(left)+len(deep) != 0 {
		t.Errorf("half-written files are left: %v %v", left, deep)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestADirectoryThatBecomesALink (K06): a kid swaps a directory for a link, over and over, while files are carried.
func TestADirectoryThatBecomesALink(t *testing.T) {
	tr, ws, outside := tree(t)
	if err := os.WriteFile(filepath.Join(outside, "f"), []byte("from outside"), 0o644); err != nil {
		t.Fatal(err)
	}
	target, link := filepath.Join(ws, "dir/sub"), filepath.Join(ws, "dir/l")
	if err := os.Symlink(outside, link); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default: // both names exist at every moment, one of them as the link
				unix.Renameat2(unix.AT_FDCWD, target, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE)
			}
		}
	})
	defer wg.Wait()
	defer close(stop)
	seen := map[string]int{}
	escaped := false // of the control
	for deadline := time.Now().Add(20 * time.Second); (seen["ok"] < 200 || seen["refused"] < 200 || !escaped) && time.Now().Before(deadline); {
		got, err := get(tr, "dir/sub/f")
		switch {
		case err == nil && got == "deep":
			seen["ok"]++
		case errors.Is(err, ErrPath):
			seen["refused"]++
		default:
			t.Fatalf("read %q, %v", got, err)
		}
		if _, err := tr.Put("dir/sub/planted", 0o644, strings.NewReader("x")); err != nil && !errors.Is(err, ErrPath) {
			t.Fatalf("put: %v", err)
		}
		var out bytes.Buffer
		tr.Archive("dir", true, &out) // refused or not
		if bytes.Contains(out.Bytes(), []byte("from outside")) {
			t.Fatal("an archive holds what is outside")
		}
		raw, _ := os.ReadFile(filepath.Join(target, "f")) // control: what a plain open would do
		escaped = escaped || string(raw) == "from outside"
	}
	if seen["ok"] < 200 || seen["refused"] < 200 || !escaped {
		t.Errorf("too little was tried: %v, control escaped: %v", seen, escaped)
	}
	if left, _ := os.ReadDir(outside); len(left) != 2 {
		t.Errorf("something was written outside: %v", left)
	}
}

// TestArchivesComeBackWhole, without what is neither file nor directory.
func TestArchivesComeBackWhole(t *testing.T) {
	tr, _, _ := tree(t)
	var out bytes.Buffer
	if _, err := tr.Archive(".", true, &out); !errors.Is(err, ErrLarge) {
		t.Errorf("with the sparse file: %v", err)
	}
	if s, err := tr.Survey("dir"); err != nil || s != (Survey{Entries: 2, Bytes: 4}) {
		t.Errorf("survey: %+v %v", s, err)
	}
	out.Reset()
	if _, err := tr.Archive("dir", false, &out); err != nil {
		t.Fatal(err)
	}
	if s, err := tr.Unpack("copy/of", bytes.NewReader(out.Bytes()), nil); err != nil || s.Bytes != 4 {
		t.Fatalf("unpacking: %+v %v", s, err)
	}
	if got, err := get(tr, "copy/of/sub/f"); got != "deep" || err != nil {
		t.Errorf("copy: %q %v", got, err)
	}
	if err := os.Symlink("f", tr.root.Name()+"/dir/sub/l"); err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Archive("dir", false, io.Discard); !errors.Is(err, ErrKind) {
		t.Errorf("a link in it: %v", err)
	}
	if s, err := tr.Archive("dir", true, io.Discard); err != nil || s.Special != 1 {
		t.Errorf("left out: %+v %v", s, err)
	}
}

// TestHostileArchivesAreRefused: names and kinds that lead out.
func TestHostileArchivesAreRefused(t *testing.T) {
	tr, ws, outside := tree(t)
	for name, h := range map[string]tar.Header{
		"up":       {Typeflag: tar.TypeReg, Name: "../../x"},
		"absolute": {Typeflag: tar.TypeReg, Name: "/etc/x"},
		"through":  {Typeflag: tar.TypeReg, Name: "linkdir/x"},
		"onto":     {Typeflag: tar.TypeReg, Name: "dangling"},
		"link":     {Typeflag: tar.TypeSymlink, Name: "l", Linkname: outside},
		"hard":     {Typeflag: tar.TypeLink, Name: "l", Linkname: "file"},
		"fifo":     {Typeflag: tar.TypeFifo, Name: "p"},
		"device":   {Typeflag: tar.TypeChar, Name: "d"},
		"dir":      {Typeflag: tar.TypeDir, Name: "linkdir/x"},
		"deep":     {Typeflag: tar.TypeDir, Name: strings.Repeat("d/", MaxDepth+1)},
	} {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		if err := errors.Join(w.WriteHeader(&h), w.Close()); err != nil {
			t.Fatal(err)
		}
		if _, err := tr.Unpack(".", &buf, nil); !errors.Is(err, ErrPath) && !errors.Is(err, ErrKind) && !errors.Is(err, ErrLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if left, _ := os.ReadDir(outside); len(left) != 1 {
		t.Errorf("something was written outside: %v", left)
	}
	if left, _ := os.ReadDir(filepath.Dir(ws)); len(left) != 1 {
		t.Errorf("something was written beside the workspace: %v", left)
	}
}

// TestListingsComeInParts (K07): thousands of files, a page at a time.
func TestListingsComeInParts(t *testing.T) {
	tr, ws, _ := tree(t)
	many := filepath.Join(ws, "many")
	if err := os.Mkdir(many, 0o755); err != nil {
		t.Fatal(err)
	}
	const files = 1500
	for i := range files {
		if err := os.WriteFile(filepath.Join(many, fmt.Sprintf("%05d", i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	after, got := "", 0
	for more := true; more; {
		page, next, err := tr.List("many", after, 700)
		if err != nil || len(page) == 0 || len(page) > 700 {
			t.Fatalf("after %q: %d entries, %v", after, len(page), err)
		}
		for _, info := range page {
			if info.Name != fmt.Sprintf("%05d", got) {
				t.Fatalf("entry %d is %s", got, info.Name)
			}
			got++
		}
		after, more = page[len(page)-1].Name, next
	}
	if got != files {
		t.Errorf("%d files", got)
	}
	if _, _, err := tr.List("linkdir", "", 10); !errors.Is(err, ErrPath) {
		t.Errorf("through a link: %v", err)
	}
	top, _, err := tr.List(".", "", 100)
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]fs.FileMode{"link": fs.ModeSymlink, "fifo": fs.ModeNamedPipe, "device": fs.ModeDevice, "dir": fs.ModeDir}
	for _, info := range top {
		if want, ok := kinds[info.Name]; ok && info.Mode.Type() != want {
			t.Errorf("%s is %v", info.Name, info.Mode)
		}
		delete(kinds, info.Name)
	}
	if len(kinds) != 0 {
		t.Errorf("not listed: %v", kinds)
	}
}
