package oci

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"

	"github.com/google/go-containerregistry/pkg/name"

	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

// layerTar is a layer of files by name; an empty content is a whiteout's.
func layerTar(t testing.TB, files ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	for i := 0; i < len(files); i += 2 {
		err := tw.WriteHeader(&tar.Header{Name: files[i], Mode: 0o755, Size: int64(len(files[i+1])), Typeflag: tar.TypeReg})
		if err == nil {
			_, err = io.WriteString(tw, files[i+1])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// testImage has three layers: a and b, then a changed, then b hidden.
func testImage(t testing.TB) v1.Image {
	t.Helper()
	img := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	for _, raw := range [][]byte{layerTar(t, "a", "one", "b", "one"), layerTar(t, "a", "two"), layerTar(t, ".wh.b", "")} {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(raw)), nil })
		if err == nil {
			img, err = mutate.AppendLayers(img, l)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	config, err := img.ConfigFile()
	if err == nil {
		config = config.DeepCopy()
		config.OS, config.Architecture = platform().OS, platform().Architecture
		config.Config.Env = []string{"PATH=/opt/bin:/bin", "GREETING=hello=you", "bad name=x", "novalue"}
		img, err = mutate.ConfigFile(img, config)
	}
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// writeLayout writes the image as a layout.
func writeLayout(t testing.TB, img v1.Image) string {
	t.Helper()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	if err == nil {
		err = p.AppendImage(img)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func writeFile(t testing.TB, name string, content []byte) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// tarOf packs a directory.
func tarOf(t testing.TB, dir string) []byte {
	t.Helper()
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	if err := errors.Join(tw.AddFS(os.DirFS(dir)), tw.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func dockerSaved(t testing.TB, img v1.Image) []byte {
	t.Helper()
	tag, err := name.NewTag("test:latest")
	var out bytes.Buffer
	if err == nil {
		err = tarball.Write(tag, img, &out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// add adds the image in file to a store of its own; its files a and b are returned.
func add(t testing.TB, file string) (m store.Manifest, a, b string, err error) {
	t.Helper()
	src, err := File(file, nil)
	if err != nil {
		return m, "", "", err
	}
	return addFrom(t, src)
}

func addFrom(t testing.TB, src store.Source) (m store.Manifest, a, b string, err error) {
	t.Helper()
	kids := t.TempDir()
	s, err := store.Open(filepath.Join(t.TempDir(), "images"), kids)
	if err != nil {
		t.Fatal(err)
	}
	m, _, err = s.Add(t.Context(), "test", src, unpack.DefaultLimits())
	if err != nil {
		if images, lerr := s.List(); lerr != nil || len(images) != 0 {
			t.Errorf("after %v there is %+v, %v", err, images, lerr)
		}
		return m, "", "", err
	}
	root, _, err := s.Use("test", kids)
	if err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		raw, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return "none"
		}
		return string(raw)
	}
	return m, read("a"), read("b"), nil
}

func compressed(t testing.TB, raw []byte, how string) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser = gzip.NewWriter(&out)
	if how == "zstd" {
		var err error
		if w, err = zstd.NewWriter(&out); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestEveryFormat(t *testing.T) {
	img := testImage(t)
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	id, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	plain := layerTar(t, "a", "two")
	dir := writeLayout(t, img)
	for name, c := range map[string]struct{ file, kind, digest string }{
		"layout":         {dir, store.KindOCI, digest.String()},
		"layout archive": {writeFile(t, "x.tar", tarOf(t, dir)), store.KindOCI, digest.String()},
		"docker save":    {writeFile(t, "x.tar", dockerSaved(t, img)), store.KindDocker, id.String()},
		"rootfs":         {writeFile(t, "x.tar", plain), store.KindRootfs, ""},
		"rootfs, gzip":   {writeFile(t, "x.tgz", compressed(t, plain, "gzip")), store.KindRootfs, ""},
		"rootfs, zstd":   {writeFile(t, "x", compressed(t, plain, "zstd")), store.KindRootfs, ""},
	} {
		m, a, b, err := add(t, c.file)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if a != "two" || b != "none" {
			t.Errorf("%s: a = %s, b = %s, want two and none", name, a, b)
		}
		if m.Kind != c.kind || c.digest != "" && m.Digest != c.digest || m.SourceAt == nil || m.Source != c.file {
			t.Errorf("%s: %+v", name, m)
		}
		if c.kind != store.KindRootfs && (len(m.Env) != 2 || m.Env["GREETING"] != "hello=you") {
			t.Errorf("%s: environment %v", name, m.Env)
		}
	}
}

// TestEveryDigestIsChecked changes one byte in each file of a layout, and in each layer of a saved image.
func TestEveryDigestIsChecked(t *testing.T) {
	img := testImage(t)
	blobs, err := filepath.Glob(filepath.Join(writeLayout(t, img), "blobs", "sha256", "*"))
	if err != nil || len(blobs) != 5 { // a manifest, a configuration, three layers
		t.Fatalf("%v, %v", blobs, err)
	}
	for _, blob := range blobs {
		dir := writeLayout(t, img)
		flip(t, filepath.Join(dir, "blobs", "sha256", filepath.Base(blob)))
		if _, _, _, err := add(t, dir); !errors.Is(err, ErrDigest) && !errors.Is(err, gzip.ErrChecksum) && !errors.Is(err, gzip.ErrHeader) {
			t.Errorf("a changed blob of the layout: %v", err)
		}
	}
	saved := dockerSaved(t, img)
	at := bytes.LastIndex(saved, []byte{0x1f, 0x8b})
	saved[at+4]++ // the time in gzip's header changes no content
	if _, _, _, err := add(t, writeFile(t, "x.tar", saved)); err != nil {
		t.Errorf("a layer whose content is the same: %v", err)
	}
	other := dockerSaved(t, img)
	other = bytes.Replace(other, []byte(`"diff_ids":["sha256:`), []byte(`"diff_ids":["sha256;`), 1)
	if _, _, _, err := add(t, writeFile(t, "x.tar", other)); !errors.Is(err, ErrDigest) {
		t.Errorf("a changed configuration: %v", err)
	}
}

// flip changes one byte.
func flip(t *testing.T, file string) {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	raw[4] ^= 0x20
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestLayerThatIsAnother swaps the layers of a saved image: both are whole, and neither is what the configuration says.
func TestLayerThatIsAnother(t *testing.T) {
	raw := dockerSaved(t, testImage(t))
	var names []string
	tr := tar.NewReader(bytes.NewReader(raw))
	for hdr, err := tr.Next(); err == nil; hdr, err = tr.Next() {
		if strings.HasSuffix(hdr.Name, ".tar.gz") {
			names = append(names, hdr.Name)
		}
	}
	if len(names) != 3 {
		t.Fatalf("layers %v", names)
	}
	swapped := bytes.Replace(raw, []byte(`"`+names[0]+`","`+names[1]+`"`), []byte(`"`+names[1]+`","`+names[0]+`"`), 1)
	if bytes.Equal(swapped, raw) {
		t.Fatal("nothing was swapped")
	}
	if _, _, _, err := add(t, writeFile(t, "x.tar", swapped)); !errors.Is(err, ErrDigest) {
		t.Errorf("swapped layers: %v", err)
	}
}

// TestDocumentsFitIntoMemory: no part of a saved image that is kept in memory may be long, whatever it is called.
func TestDocumentsFitIntoMemory(t *testing.T) {
	long := strings.Repeat(" ", maxDocument+1)
	for name, files := range map[string][]string{
		"the list of images":              {"manifest.json", long},
		"a configuration":                 {"manifest.json", `[{"Config":"a.json"}]`, "a.json", long},
		"a configuration of another name": {"manifest.json", `[{"Config":"blobs/a"}]`, "blobs/a", long},
	} {
		if _, _, _, err := add(t, writeFile(t, "x.tar", layerTar(t, files...))); !errors.Is(err, unpack.ErrLimit) {
			t.Errorf("%s: %v, want %v", name, err, unpack.ErrLimit)
		}
	}
	short := layerTar(t, "manifest.json", `[{"Config":"blobs/a"}]`, "blobs/a", "{}") // control: what is refused is the length
	if _, _, _, err := add(t, writeFile(t, "x.tar", short)); err == nil || errors.Is(err, unpack.ErrLimit) {
		t.Errorf("a short document: %v", err)
	}
}

func TestWhatIsNoImage(t *testing.T) {
	img := testImage(t)
	twice := writeLayout(t, img)
	other, err := mutate.Time(img, fixedTime)
	if err == nil {
		err = layout.Path(twice).AppendImage(other)
	}
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.Architecture = "mips"
	foreign, err := mutate.ConfigFile(img, config)
	if err != nil {
		t.Fatal(err)
	}
	link := writeLayout(t, img)
	if err := errors.Join(os.Remove(filepath.Join(link, "index.json")), os.Symlink("/etc/hostname", filepath.Join(link, "index.json"))); err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string]string{
		"an empty directory": t.TempDir(), "an empty file": writeFile(t, "x", nil), "noise": writeFile(t, "x", bytes.Repeat([]byte("noise"), 999)),
		"two images": twice, "another machine's": writeLayout(t, foreign),
		"missing": filepath.Join(t.TempDir(), "x"), "a device": "/dev/null", "an index that is a link": link,
		"bzip2": writeFile(t, "x", []byte("BZh91AY&SY")),
	} {
		if _, _, _, err := add(t, file); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

var fixedTime = time.Unix(1_700_000_000, 0)
