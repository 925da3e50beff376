package store

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/sandboxd/image/unpack"
)

// archive is a source with one layer.
type archive struct {
	files   map[string]string
	begun   chan struct{} // closed when it began, where not nil
	proceed chan struct{} // waited for, where not nil
	err     error
}

func (a archive) Unpack(ctx context.Context, u *unpack.Unpacker, scratch string, m *Manifest) error {
	if err := os.WriteFile(filepath.Join(scratch, "x"), []byte("scratch"), 0o600); err != nil {
		return err
	}
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	for name, content := range a.files {
		hdr := &tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg}
		if strings.HasPrefix(content, "->") {
			hdr.Typeflag, hdr.Linkname, hdr.Size, content = tar.TypeSymlink, content[2:], 0, ""
		}
		if err := tw.WriteHeader(hdr); err != nil {
			return err
		}
		if _, err := tw.Write([]byte(content)); err != nil {
			return err
		}
	}
	if err := errors.Join(tw.Close(), u.Layer(ctx, &out)); err != nil {
		return err
	}
	m.Kind, m.Source, m.Digest = KindRootfs, "test", "sha256:00"
	if a.begun != nil {
		close(a.begun)
	}
	if a.proceed != nil {
		<-a.proceed
	}
	return a.err
}

type world struct {
	*Store
	t    *testing.T
	dir  string
	kids string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, dir: filepath.Join(t.TempDir(), "images"), kids: t.TempDir()}
	var err error
	if w.Store, err = Open(w.dir, w.kids); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) add(name, content string) Manifest {
	w.t.Helper()
	m, _, err := w.Add(w.t.Context(), name, archive{files: map[string]string{"hello": content}}, unpack.DefaultLimits())
	if err != nil {
		w.t.Fatal(err)
	}
	return m
}

func (w *world) kid(name string) string {
	w.t.Helper()
	dir := filepath.Join(w.kids, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		w.t.Fatal(err)
	}
	return dir
}

// names lists "NAME", "NAME(replaced)" and what lies in tmp.
func (w *world) names() string {
	w.t.Helper()
	images, err := w.List()
	if err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, i := range images {
		name := i.Name
		if !i.Current {
			name += "(replaced)"
		}
		out = append(out, name)
	}
	left, err := os.ReadDir(filepath.Join(w.dir, "tmp"))
	if err != nil {
		w.t.Fatal(err)
	}
	for range left {
		out = append(out, "+leftover")
	}
	return strings.Join(out, " ")
}

func (w *world) want(names string) {
	w.t.Helper()
	if got := w.names(); got != names {
		w.t.Fatalf("images %q, want %q", got, names)
	}
}

func TestAddUseRemove(t *testing.T) {
	w := newWorld(t)
	first := w.add("tools", "1")
	w.add("other", "1")
	root, m, err := w.Use("tools", w.kid("k1"))
	if err != nil || m.ID != first.ID {
		t.Fatalf("%+v, %v", m, err)
	}
	if raw, err := os.ReadFile(filepath.Join(root, "hello")); err != nil || string(raw) != "1" {
		t.Errorf("hello = %q, %v", raw, err)
	}
	if _, err := w.Remove("tools"); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "k1") {
		t.Errorf("removing an image in use: %v", err)
	}
	second := w.add("tools", "2") // the kid keeps the first
	w.want("other tools tools(replaced)")
	if m, err := w.Used(filepath.Join(w.kids, "k1")); err != nil || m.ID != first.ID {
		t.Errorf("the kid uses %+v, %v", m, err)
	}
	if m, err := w.Get("tools"); err != nil || m.ID != second.ID {
		t.Errorf("current: %+v, %v", m, err)
	}
	if _, err := w.Remove("tools"); !errors.Is(err, ErrInUse) {
		t.Errorf("removing a name whose old image is in use: %v", err)
	}
	if err := os.RemoveAll(filepath.Join(w.kids, "k1")); err != nil {
		t.Fatal(err)
	}
	swept, err := w.Sweep()
	if err != nil || len(swept.Images) != 1 || swept.Images[0].ID != first.ID {
		t.Errorf("swept %+v, %v", swept, err)
	}
	w.want("other tools")
	if _, err := w.Remove("tools"); err != nil {
		t.Fatal(err)
	}
	w.want("other")
	if _, err := w.Remove("tools"); !errors.Is(err, ErrUnknown) {
		t.Errorf("removing it again: %v", err)
	}
	if _, _, err := w.Use("tools", w.kid("k2")); !errors.Is(err, ErrUnknown) {
		t.Errorf("using it: %v", err)
	}
}

func TestBadNames(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"", "host", "../x", "a/b", "A", "-a", ".", strings.Repeat("a", 64)} {
		if _, _, err := w.Add(t.Context(), name, archive{files: map[string]string{"a": ""}}, unpack.DefaultLimits()); err == nil {
			t.Errorf("adding %q: no error", name)
		}
		if _, err := w.Get(name); !errors.Is(err, ErrUnknown) {
			t.Errorf("getting %q: %v", name, err)
		}
		if _, err := w.Remove(name); !errors.Is(err, ErrUnknown) {
			t.Errorf("removing %q: %v", name, err)
		}
	}
	w.want("")
}

func TestFailedAddLeavesNothing(t *testing.T) {
	w := newWorld(t)
	w.add("tools", "1")
	boom := errors.New("boom")
	for name, src := range map[string]archive{"breaks": {files: map[string]string{"a": "x"}, err: boom}, "is empty": {}} {
		if _, _, err := w.Add(t.Context(), "tools", src, unpack.DefaultLimits()); err == nil || src.err != nil && !errors.Is(err, boom) {
			t.Errorf("a source that %s: %v", name, err)
		}
	}
	limits := unpack.DefaultLimits()
	limits.Bytes = 3
	if _, _, err := w.Add(t.Context(), "tools", archive{files: map[string]string{"a": "long"}}, limits); !errors.Is(err, unpack.ErrLimit) {
		t.Errorf("beyond the limit: %v", err)
	}
	w.want("tools")
}

// TestAddThatIsKilled runs an add in another process and kills it in the middle.
func TestAddThatIsKilled(t *testing.T) {
	w := newWorld(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run", "^TestMain$")
	cmd.Env = append(os.Environ(), "TAGOUT_TEST_STORE="+w.dir, "TAGOUT_TEST_KIDS="+w.kids)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 6)
	if _, err := out.Read(line); err != nil || string(line) != "begun\n" {
		t.Fatalf("the other process said %q, %v", line, err)
	}
	w.want("+leftover")
	if swept, err := w.Sweep(); err != nil || swept.Leftovers != 0 {
		t.Fatalf("what another process works at was swept: %+v, %v", swept, err)
	}
	w.want("+leftover")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait() // killed
	if swept, err := w.Sweep(); err != nil || swept.Leftovers != 1 {
		t.Errorf("after the kill: %+v, %v", swept, err)
	}
	w.want("")
}

// TestMain is the other process of TestAddThatIsKilled where it is told so.
func TestMain(m *testing.M) {
	dir := os.Getenv("TAGOUT_TEST_STORE")
	if dir == "" {
		os.Exit(m.Run())
	}
	s, err := Open(dir, os.Getenv("TAGOUT_TEST_KIDS"))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	begun := make(chan struct{})
	go func() {
		<-begun
		fmt.Println("begun")
	}()
	never := make(chan struct{})
	time.AfterFunc(time.Minute, func() { os.Exit(1) })
	s.Add(context.Background(), "tools", archive{files: map[string]string{"a": "x"}, begun: begun, proceed: never}, unpack.DefaultLimits())
}

func TestConcurrentAdds(t *testing.T) {
	w := newWorld(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if _, _, err := w.Add(t.Context(), fmt.Sprint("i", i%2), archive{files: map[string]string{"a": "x"}}, unpack.DefaultLimits()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	w.want("i0 i1")
}

func TestUnreadableManifestIsShown(t *testing.T) {
	w := newWorld(t)
	m := w.add("tools", "1")
	if err := os.WriteFile(filepath.Join(w.dir, "content", m.ID, manifestName), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	images, err := w.List()
	if err != nil || len(images) != 1 || !strings.Contains(images[0].Broken, manifestName) {
		t.Errorf("%+v, %v", images, err)
	}
	if _, err := w.Get("tools"); err == nil {
		t.Error("it can be used")
	}
}

// TestFittedForKids: every place that a kid needs is there, whatever the image put in its way, and nothing outside changed.
func TestFittedForKids(t *testing.T) {
	w := newWorld(t)
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("untouched"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, err := w.Add(t.Context(), "odd", archive{files: map[string]string{
		"proc": "->/", "tmp": "->" + filepath.Dir(victim), "dev": "a file", ".tagout": "->../../../..", "workspace": "->" + victim,
		"etc/resolv.conf": "->" + victim, "etc/hosts": "->../../../../.." + victim, "etc/passwd": "->" + victim,
		"etc/group": "root:x:0:\nkid:x:77:\nwheel:x:900:\n", "etc/ssl/certs": "->../../pki", "pki/x": "x",
	}}, unpack.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	root, _, err := w.Use("odd", w.kid("k1"))
	if err != nil {
		t.Fatal(err)
	}
	for path, kind := range map[string]uint32{"proc": unix.S_IFDIR, "dev": unix.S_IFDIR, "tmp": unix.S_IFDIR, "workspace": unix.S_IFDIR, ".tagout": unix.S_IFDIR,
		".tagout/kid-init": unix.S_IFREG, "etc/resolv.conf": unix.S_IFREG, "etc/hosts": unix.S_IFREG, "etc/hostname": unix.S_IFREG,
		"etc/passwd": unix.S_IFREG, "pki/ca-certificates.crt": unix.S_IFREG} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(root, path), &st); err != nil || st.Mode&unix.S_IFMT != kind {
			t.Errorf("%s: mode %o, %v, want type %o", path, st.Mode, err, kind)
		}
	}
	if raw, err := os.ReadFile(filepath.Join(root, "etc/passwd")); err != nil || !strings.Contains(string(raw), "\nkid:x:1000:1000:") || strings.Contains(string(raw), "untouched") {
		t.Errorf("passwd %q, %v", raw, err)
	}
	if raw, err := os.ReadFile(filepath.Join(root, "etc/group")); err != nil || string(raw) != "root:x:0:\nkid:x:77:\nwheel:x:900:\nnogroup:x:65534:\n" {
		t.Errorf("group %q, %v", raw, err)
	}
	if raw, err := os.ReadFile(victim); err != nil || string(raw) != "untouched" {
		t.Errorf("the file outside is %q, %v", raw, err)
	}
}
