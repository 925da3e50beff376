package unpack

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

// entry is one entry of a test's layer; kind 0 is a regular file.
type entry struct {
	name, link, content string
	kind                byte
	mode                int64
	uid                 int
}

func layer(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	for _, e := range entries {
		hdr := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: e.mode, Uid: e.uid, Size: int64(len(e.content))}
		if e.kind == 0 {
			hdr.Typeflag = tar.TypeReg
		}
		if hdr.Mode == 0 {
			hdr.Mode = 0o755
		}
		if err := tw.WriteHeader(hdr); err != nil {
			t.Fatalf("%.99s: %v", e.name, err)
		}
		if _, err := tw.Write([]byte(e.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// outside is a directory with the image's directory in it, beside something that must not change.
type outside struct {
	t      testing.TB
	top    string
	image  string
	victim string
}

func newOutside(t testing.TB) *outside {
	t.Helper()
	o := &outside{t: t, top: t.TempDir()}
	o.image, o.victim = filepath.Join(o.top, "image"), filepath.Join(o.top, "victim")
	if err := errors.Join(os.Mkdir(o.image, 0o700), os.WriteFile(o.victim, []byte("untouched"), 0o600)); err != nil {
		t.Fatal(err)
	}
	return o
}

// check fails unless everything outside of the image's directory is as it was.
func (o *outside) check() error {
	entries, err := os.ReadDir(o.top)
	if err != nil {
		return err
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	var st unix.Stat_t
	raw, err := os.ReadFile(o.victim)
	if err == nil {
		err = unix.Stat(o.victim, &st)
	}
	if err != nil || string(raw) != "untouched" || st.Nlink != 1 || st.Mode&0o777 != 0o600 || !slices.Equal(names, []string{"image", "victim"}) {
		return fmt.Errorf("outside of the image: %q, %d names, mode %o, %v, %v", raw, st.Nlink, st.Mode&0o777, names, err)
	}
	return nil
}

func (o *outside) unpack(limits Limits, layers ...[]byte) (Report, error) {
	o.t.Helper()
	u, err := New(o.image, limits)
	if err != nil {
		o.t.Fatal(err)
	}
	defer u.Close() // only read
	for _, l := range layers {
		if err := u.Layer(context.Background(), bytes.NewReader(l)); err != nil {
			return u.Report(), err
		}
	}
	return u.Report(), nil
}

// tree lists the image's directory: "path", "path/", "path -> target", and contents of small files.
func (o *outside) tree() string {
	o.t.Helper()
	var out []string
	err := filepath.WalkDir(o.image, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == o.image {
			return err
		}
		line, _ := filepath.Rel(o.image, path)
		switch {
		case d.IsDir():
			line += "/"
		case d.Type()&fs.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += "->" + to
		default:
			raw, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += "=" + string(raw)
		}
		out = append(out, line)
		return nil
	})
	if err != nil {
		o.t.Fatal(err)
	}
	return strings.Join(out, " ")
}

func small() Limits { return Limits{Bytes: 1 << 20, Files: 100, Depth: 16} }

// evil are layers that want out. Where tree is empty they must be refused.
func evil(t testing.TB, victim string) map[string]struct {
	layers [][]byte
	tree   string
} {
	up := strings.Repeat("../", 40)
	one := func(entries ...entry) [][]byte { return [][]byte{layer(t, entries...)} }
	return map[string]struct {
		layers [][]byte
		tree   string
	}{
		"dot dot":                    {one(entry{name: "../victim", content: "x"}), ""},
		"dot dot in the middle":      {one(entry{name: "a/../../victim", content: "x"}), ""},
		"absolute":                   {one(entry{name: "/a" + victim, content: "x"}), "a/ a" + strings.Join(prefixes(victim), "/ a") + "=x"},
		"through a link upwards":     {one(entry{name: "s", kind: tar.TypeSymlink, link: "../"}, entry{name: "s/victim", content: "x"}), "s->../ victim=x"},
		"through many links upwards": {one(entry{name: "s", kind: tar.TypeSymlink, link: up}, entry{name: "s/victim", content: "x"}), "s->" + up + " victim=x"},
		"through an absolute link":   {one(entry{name: "s", kind: tar.TypeSymlink, link: filepath.Dir(victim)}, entry{name: "s/victim", content: "x"}), ""},
		"over a link to a file":      {one(entry{name: "s", kind: tar.TypeSymlink, link: victim}, entry{name: "s", content: "x"}), "s=x"},
		"over a link, next layer": {append(one(entry{name: "s", kind: tar.TypeSymlink, link: victim}),
			layer(t, entry{name: "s", content: "x"})), "s=x"},
		"directory over a link":         {one(entry{name: "s", kind: tar.TypeSymlink, link: ".."}, entry{name: "s", kind: tar.TypeDir, mode: 0o777}), "s/"},
		"hard link outside":             {one(entry{name: "h", kind: tar.TypeLink, link: "../victim"}), ""},
		"hard link to an absolute path": {one(entry{name: "h", kind: tar.TypeLink, link: victim}), ""},
		"hard link through a link":      {one(entry{name: "s", kind: tar.TypeSymlink, link: "../"}, entry{name: "h", kind: tar.TypeLink, link: "s/victim"}), ""},
		"hard link to a link":           {one(entry{name: "s", kind: tar.TypeSymlink, link: victim}, entry{name: "h", kind: tar.TypeLink, link: "s"}), ""},
		"hard link to a directory":      {one(entry{name: "d", kind: tar.TypeDir}, entry{name: "h", kind: tar.TypeLink, link: "d"}), ""},
		"hard link to itself":           {one(entry{name: "h", content: "x"}, entry{name: "h", kind: tar.TypeLink, link: "h"}), "h=x"},
		"whiteout outside": {append(one(entry{name: "s", kind: tar.TypeSymlink, link: "../"}),
			layer(t, entry{name: "s/.wh.victim"})), "s->../"},
		"whiteout of dot dot":   {append(one(entry{name: "a", content: "x"}), layer(t, entry{name: ".wh..."})), ""},
		"whiteout of all above": {append(one(entry{name: "d", kind: tar.TypeDir}), layer(t, entry{name: "d/.wh..."})), ""},
		"opaque through a link": {append(one(entry{name: "s", kind: tar.TypeSymlink, link: ".."}, entry{name: "a", content: "x"}),
			layer(t, entry{name: "s/.wh..wh..opq"})), " "},
		"magic link": {one(entry{name: "s", kind: tar.TypeSymlink, link: "/proc/self/cwd"}, entry{name: "s/x", content: "x"}), ""},
		"devices and FIFOs": {one(entry{name: "null", kind: tar.TypeChar}, entry{name: "disk", kind: tar.TypeBlock}, entry{name: "f", kind: tar.TypeFifo},
			entry{name: "a", content: "x"}), "a=x"},
		"a link to itself":  {one(entry{name: "s", kind: tar.TypeSymlink, link: "s"}, entry{name: "s/x", content: "x"}), ""},
		"below a file":      {one(entry{name: "a", content: "x"}, entry{name: "a/b", content: "x"}), ""},
		"the root as file":  {one(entry{name: ".", content: "x"}), " "},
		"the root replaced": {one(entry{name: "./", kind: tar.TypeSymlink, link: ".."}), " "},
		"twice":             {one(entry{name: "a", content: "1"}, entry{name: "./a", content: "2"}), "a=2"},
		"twice through a hard link": {one(entry{name: "a", content: "1"}, entry{name: "b", kind: tar.TypeLink, link: "a"}, entry{name: "b", content: "2"}),
			"a=1 b=2"},
	}
}

func prefixes(path string) []string {
	var out []string
	for i, c := range path {
		if c == '/' && i > 0 {
			out = append(out, path[:i])
		}
	}
	return append(out, path)
}

func TestNothingLeavesTheDirectory(t *testing.T) {
	o := newOutside(t)
	for name := range evil(t, o.victim) {
		t.Run(name, func(t *testing.T) {
			o := newOutside(t)
			c := evil(t, o.victim)[name]
			_, err := o.unpack(small(), c.layers...)
			if bad := o.check(); bad != nil {
				t.Fatal(bad)
			}
			switch {
			case c.tree == "" && err == nil:
				t.Errorf("it was not refused, and left %q", o.tree())
			case c.tree != "" && err != nil:
				t.Errorf("it was refused: %v", err)
			case c.tree != "" && o.tree() != strings.TrimSpace(c.tree):
				t.Errorf("tree %q, want %q", o.tree(), c.tree)
			}
		})
	}
}

// TestTheEvilLayersAreEvil is the control: joined to the directory by hand, as careless programs do, these paths
// change what is outside.
func TestTheEvilLayersAreEvil(t *testing.T) {
	for _, name := range []string{"dot dot", "dot dot in the middle", "through a link upwards", "through an absolute link", "over a link to a file",
		"hard link outside", "hard link through a link", "whiteout outside"} {
		o := newOutside(t)
		for _, l := range evil(t, o.victim)[name].layers {
			careless(o.image, l)
		}
		if o.check() == nil {
			t.Errorf("%s: nothing outside changed: the test above proves nothing", name)
		}
	}
}

func careless(dir string, stream []byte) {
	tr := tar.NewReader(bytes.NewReader(stream))
	for hdr, err := tr.Next(); err == nil; hdr, err = tr.Next() {
		path := filepath.Join(dir, hdr.Name)
		switch {
		case strings.HasPrefix(filepath.Base(path), whiteout):
			os.RemoveAll(filepath.Join(filepath.Dir(path), strings.TrimPrefix(filepath.Base(path), whiteout)))
		case hdr.Typeflag == tar.TypeSymlink:
			os.Symlink(hdr.Linkname, path)
		case hdr.Typeflag == tar.TypeLink:
			os.Link(filepath.Join(dir, hdr.Linkname), path)
		default:
			os.WriteFile(path, []byte("overwritten"), 0o600)
		}
	}
}

func TestLayersHideWhatIsBelow(t *testing.T) {
	base := layer(t, entry{name: "d", kind: tar.TypeDir}, entry{name: "d/a", content: "1"}, entry{name: "d/e", kind: tar.TypeDir},
		entry{name: "d/e/f", content: "1"}, entry{name: "g", content: "1"}, entry{name: "l", kind: tar.TypeSymlink, link: "d"})
	for name, c := range map[string]struct {
		top  []entry
		tree string
	}{
		"nothing":            {nil, "d/ d/a=1 d/e/ d/e/f=1 g=1 l->d"},
		"a file":             {[]entry{{name: "d/.wh.a"}}, "d/ d/e/ d/e/f=1 g=1 l->d"},
		"a directory":        {[]entry{{name: ".wh.d"}}, "g=1 l->d"},
		"a link":             {[]entry{{name: ".wh.l"}}, "d/ d/a=1 d/e/ d/e/f=1 g=1"},
		"what is not there":  {[]entry{{name: ".wh.x"}, {name: "x/.wh.y"}}, "d/ d/a=1 d/e/ d/e/f=1 g=1 l->d"},
		"through a link":     {[]entry{{name: "l/.wh.a"}}, "d/ d/e/ d/e/f=1 g=1 l->d"},
		"opaque":             {[]entry{{name: "d/.wh..wh..opq"}}, "d/ g=1 l->d"},
		"opaque, then new":   {[]entry{{name: "d/.wh..wh..opq"}, {name: "d/a", content: "2"}}, "d/ d/a=2 g=1 l->d"},
		"new, then opaque":   {[]entry{{name: "d/a", content: "2"}, {name: "d/e/n", content: "2"}, {name: "d/.wh..wh..opq"}}, "d/ d/a=2 d/e/ d/e/n=2 g=1 l->d"},
		"new, then a file":   {[]entry{{name: "d/a", content: "2"}, {name: "d/.wh.a"}}, "d/ d/a=2 d/e/ d/e/f=1 g=1 l->d"},
		"opaque root":        {[]entry{{name: "n", content: "2"}, {name: ".wh..wh..opq"}}, "n=2"},
		"moved":              {[]entry{{name: "h", kind: tar.TypeLink, link: "g"}, {name: ".wh.g"}}, "d/ d/a=1 d/e/ d/e/f=1 h=1 l->d"},
		"aufs's own":         {[]entry{{name: ".wh..wh.plnk"}, {name: ".wh..wh.aufs"}}, "d/ d/a=1 d/e/ d/e/f=1 g=1 l->d"},
		"file for directory": {[]entry{{name: "d", content: "2"}}, "d=2 g=1 l->d"},
		"directory for file": {[]entry{{name: "g", kind: tar.TypeDir}, {name: "g/x", content: "2"}}, "d/ d/a=1 d/e/ d/e/f=1 g/ g/x=2 l->d"},
		"directory stays":    {[]entry{{name: "d", kind: tar.TypeDir}, {name: "d/z", content: "2"}}, "d/ d/a=1 d/e/ d/e/f=1 d/z=2 g=1 l->d"},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOutside(t)
			if _, err := o.unpack(small(), base, layer(t, c.top...)); err != nil {
				t.Fatal(err)
			}
			if got := o.tree(); got != c.tree {
				t.Errorf("tree %q, want %q", got, c.tree)
			}
		})
	}
}

func TestLimits(t *testing.T) {
	many := make([]entry, 101)
	for i := range many {
		many[i] = entry{name: fmt.Sprint("f", i)}
	}
	same := make([]entry, 101)
	for i := range same {
		same[i] = entry{name: "f"}
	}
	big, long := strings.Repeat("x", 600<<10), strings.Repeat("n", 255)+"/"
	for name, layers := range map[string][][]byte{
		"many files":             {layer(t, many...)},
		"one file many times":    {layer(t, same...)},
		"many layers":            {layer(t, many[:60]...), layer(t, many[60:]...)},
		"implied directories":    {layer(t, entry{name: strings.Repeat("d/", 15) + "f"}), layer(t, many[:90]...)},
		"bytes":                  {layer(t, entry{name: "a", content: big}, entry{name: "b", content: big})},
		"bytes of removed files": {layer(t, entry{name: "a", content: big}), layer(t, entry{name: "a", content: big})},
		"depth":                  {layer(t, entry{name: strings.Repeat("d/", 17), kind: tar.TypeDir})},
		"depth by way of a link": {layer(t, entry{name: strings.Repeat("d/", 15), kind: tar.TypeDir}, entry{name: "l", kind: tar.TypeSymlink, link: strings.Repeat("d/", 15)}, entry{name: "l/d/d", kind: tar.TypeDir})},
		"path by way of a link":  {layer(t, entry{name: strings.Repeat(long, 15), kind: tar.TypeDir}, entry{name: "l", kind: tar.TypeSymlink, link: strings.Repeat(long, 15)}, entry{name: "l/" + long + "x", content: "x"})},
		"name":                   {layer(t, entry{name: strings.Repeat("n", 256)})},
		"path":                   {layer(t, entry{name: strings.Repeat(strings.Repeat("n", 200)+"/", 21), kind: tar.TypeDir})},
		"a size that is a lie":   {lie(t, 1<<40)},
		"padding":                {append(layer(t, entry{name: "a"}), make([]byte, 4<<20)...)},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOutside(t)
			if _, err := o.unpack(small(), layers...); !errors.Is(err, ErrLimit) {
				t.Errorf("%v, want %v", err, ErrLimit)
			}
		})
	}
	// Controls: what is just within them.
	o := newOutside(t)
	r, err := o.unpack(small(), layer(t, many[:100]...))
	if err != nil || r.Files != 100 {
		t.Errorf("100 files of 100: %+v, %v", r, err)
	}
	if _, err := newOutside(t).unpack(small(), layer(t, entry{name: strings.Repeat("d/", 16), kind: tar.TypeDir}, entry{name: "l", kind: tar.TypeSymlink, link: strings.Repeat("d/", 14)},
		entry{name: "l/d/f", content: "x"})); err != nil {
		t.Errorf("16 levels of 16: %v", err)
	}
}

// lie is a layer whose one file claims to be size bytes long.
func lie(t *testing.T, size int64) []byte {
	t.Helper()
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	if err := tw.WriteHeader(&tar.Header{Name: "a", Size: size, Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestTruncatedLayerIsRefused(t *testing.T) {
	whole := layer(t, entry{name: "a", content: strings.Repeat("x", 2000)})
	for _, n := range []int{100, 513, 2000} {
		o := newOutside(t)
		if _, err := o.unpack(small(), whole[:n]); err == nil {
			t.Errorf("%d of %d bytes: no error", n, len(whole))
		}
	}
}

// TestHolesAreCalledOff: a sparse file of many zeros takes nothing from the stream, and ends with the caller all the same.
func TestHolesAreCalledOff(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	o := newOutside(t)
	u, err := New(o.image, Limits{Bytes: 1 << 50, Files: 10, Depth: 10})
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close() // only read
	done := make(chan error, 1)
	go func() { done <- u.Layer(ctx, bytes.NewReader(hole(t, 1<<45))) }()
	deadline := time.Now().Add(20 * time.Second)
	for info, err := os.Stat(filepath.Join(o.image, "a")); err != nil || info.Size() == 0; info, err = os.Stat(filepath.Join(o.image, "a")) {
		if time.Now().After(deadline) {
			t.Fatal("the hole is not being written")
		}
	}
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want %v", err, context.Canceled)
		}
	case <-time.After(20 * time.Second):
		t.Error("it goes on without its caller")
	}
}

// hole is a layer with a sparse file of so many zeros and no data, in GNU's format 1.0, which the library reads and does not write.
func hole(t *testing.T, size int64) []byte {
	t.Helper()
	var records string
	for _, r := range []string{"GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.name=a", fmt.Sprint("GNU.sparse.realsize=", size)} {
		n := len(r) + 2 // a blank and a line's end
		for len(fmt.Sprint(n))+len(r)+2 != n {
			n++
		}
		records += fmt.Sprintf("%d %s\n", n, r)
	}
	head := layer(t, entry{name: "records", content: records})
	head = head[:len(head)-1024] // without the archive's end
	head[156] = 'x'
	copy(head[148:156], "        ")
	sum := 0
	for _, b := range head[:512] {
		sum += int(b)
	}
	copy(head[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return append(head, layer(t, entry{name: "a", content: "0\n" + strings.Repeat("\x00", 510)})...)
}

func TestCalledOff(t *testing.T) {
	o := newOutside(t)
	u, err := New(o.image, small())
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close() // only read
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := u.Layer(ctx, bytes.NewReader(layer(t, entry{name: "a"}))); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
}

func TestAttributes(t *testing.T) {
	testroot.Require(t)
	o := newOutside(t)
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	when := time.Unix(1_700_000_000, 0)
	for _, h := range []tar.Header{
		{Name: "su", Typeflag: tar.TypeReg, Mode: 0o6755, Uid: 0, Gid: 5, ModTime: when, PAXRecords: map[string]string{"SCHILY.xattr.user.tagout": "x", "SCHILY.xattr.security.capability": "\x01"}},
		{Name: "tmp", Typeflag: tar.TypeDir, Mode: 0o7777, Uid: 1000, Gid: 1000},
		{Name: "far", Typeflag: tar.TypeReg, Mode: 0o600, Uid: 1 << 20, Gid: 65536},
		{Name: "link", Typeflag: tar.TypeSymlink, Linkname: "su", Uid: 7, Gid: 8},
	} {
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := o.unpack(small(), out.Bytes()); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"su": "0 5 755", "tmp": "1000 1000 1777", "far": "65534 65534 600", "link": "7 8 777"} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(o.image, name), &st); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%d %d %o", st.Uid, st.Gid, st.Mode&0o7777); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
		if name == "su" && st.Mtim.Sec != when.Unix() {
			t.Errorf("su: changed at %d, want %d", st.Mtim.Sec, when.Unix())
		}
	}
	if n, err := unix.Llistxattr(filepath.Join(o.image, "su"), make([]byte, 1024)); err != nil || n != 0 {
		t.Errorf("su has %d bytes of names of extended attributes, %v", n, err)
	}
}

// FuzzLayer unpacks any bytes, over an image with links of all kinds, and looks outside.
func FuzzLayer(f *testing.F) {
	o := newOutside(f)
	for _, c := range evil(f, o.victim) {
		for _, l := range c.layers {
			f.Add(l)
		}
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		o := newOutside(t)
		base := layer(t, entry{name: "up", kind: tar.TypeSymlink, link: ".."}, entry{name: "abs", kind: tar.TypeSymlink, link: o.top},
			entry{name: "s", kind: tar.TypeSymlink, link: "../"}, entry{name: "f", kind: tar.TypeSymlink, link: o.victim},
			entry{name: "d", kind: tar.TypeDir}, entry{name: "d/a", content: "x"})
		r, err := o.unpack(small(), base, stream)
		if bad := o.check(); bad != nil {
			t.Fatalf("%v (%+v, %v)", bad, r, err)
		}
		if r.Bytes > small().Bytes {
			t.Errorf("%d bytes were written, more than the limit", r.Bytes)
		}
	})
}
