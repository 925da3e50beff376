package oci

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

// File returns the image in file: a directory that is an OCI layout, an archive of one, what `docker save` writes, or an
// archive of a root filesystem, each plain or compressed but the first two. The first bytes decide, not the name.
func File(file string, p Progress) (store.Source, error) {
	file, err := filepath.Abs(file)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("looking at the image: %w", err)
	}
	base := local{file: file, changed: info.ModTime().UTC(), progress: p}
	switch {
	case info.IsDir():
		return layoutDir{base}, nil
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is neither a file nor a directory", file)
	}
	names, err := topNames(file)
	if err != nil {
		return nil, fmt.Errorf("looking at %s: is it a tar archive? %w", file, err)
	}
	switch {
	case names["manifest.json"]:
		return dockerSave{base}, nil
	case names["oci-layout"] && names["index.json"]:
		return layoutTar{base}, nil
	}
	return rootfs{base}, nil
}

// local is a source on this machine.
type local struct {
	file     string
	changed  time.Time
	progress Progress
}

func (l local) note(m *store.Manifest, kind, digest string, config *v1.ConfigFile) {
	note(m, kind, l.file, digest, config)
	m.SourceAt = &l.changed
}

// topNames returns the names of the files at the top of an archive. What is compressed holds a root filesystem, and is
// not looked into: neither of the other formats is compressed.
func topNames(file string) (map[string]bool, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	out := map[string]bool{}
	head := make([]byte, 4)
	if _, err := io.ReadFull(f, head); err != nil {
		return nil, err
	}
	if string(head[:2]) == "\x1f\x8b" || string(head) == "\x28\xb5\x2f\xfd" {
		return out, nil
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	tr := tar.NewReader(f) // seeks over contents
	for n := 0; ; n++ {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		if most := unpack.DefaultLimits().Files; n >= most { // it is looked through once more for each layer
			return nil, fmt.Errorf("%w: more than %d files", unpack.ErrLimit, most)
		}
		name := strings.TrimPrefix(path.Clean("/"+hdr.Name), "/")
		if hdr.Typeflag == tar.TypeReg && !strings.Contains(name, "/") && len(out) < 64 {
			out[name] = true
		}
	}
}

// rootfs is an archive of a root filesystem.
type rootfs struct{ local }

func (r rootfs) Unpack(ctx context.Context, u *unpack.Unpacker, _ string, m *store.Manifest) error {
	f, err := os.Open(r.file)
	if err != nil {
		return err
	}
	defer f.Close() // only read
	sum := sha256.New()
	raw := io.TeeReader(f, sum)
	plain, err := decompress(raw)
	if err != nil {
		return fmt.Errorf("reading %s: %w", r.file, err)
	}
	defer plain.Close() // only read
	r.progress.say("unpacking %s", r.file)
	if err := u.Layer(ctx, plain); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, raw); err != nil {
		return fmt.Errorf("reading %s: %w", r.file, err)
	}
	r.note(m, store.KindRootfs, "sha256:"+hex.EncodeToString(sum.Sum(nil)), nil)
	return nil
}

// dockerSave is what `docker save` and `podman save` write. Its digest is that of the configuration, which Docker calls
// the image's id.
type dockerSave struct{ local }

func (d dockerSave) Unpack(ctx context.Context, u *unpack.Unpacker, _ string, m *store.Manifest) error {
	raw, err := d.document(ctx, "manifest.json")
	if err != nil {
		return err
	}
	var list tarball.Manifest
	if err := json.Unmarshal(raw, &list); err != nil {
		return fmt.Errorf("reading manifest.json of %s: %w", d.file, err)
	}
	if len(list) != 1 {
		return fmt.Errorf("%s holds %d images: save the one that you want by itself", d.file, len(list))
	}
	if raw, err = d.document(ctx, list[0].Config); err != nil {
		return err
	}
	id := strings.TrimPrefix(strings.TrimSuffix(path.Base(list[0].Config), ".json"), "sha256:")
	config, err := parseConfig(raw, v1.Hash{Algorithm: "sha256", Hex: id})
	if err != nil {
		return err
	}
	if len(list[0].Layers) != len(config.RootFS.DiffIDs) {
		return fmt.Errorf("it has %d layers, and %d in its configuration", len(list[0].Layers), len(config.RootFS.DiffIDs))
	}
	for i, diff := range config.RootFS.DiffIDs {
		d.progress.say("layer %d of %d: %s", i+1, len(config.RootFS.DiffIDs), diff)
		if err := d.layer(ctx, u, list[0].Layers[i], diff); err != nil {
			return fmt.Errorf("layer %d, %s: %w", i+1, diff, err)
		}
	}
	d.note(m, store.KindDocker, "sha256:"+id, config)
	return nil
}

// document reads a file of the archive that has to fit into memory. The library is not asked: it reads whatever has the name,
// however long it is.
func (d dockerSave) document(ctx context.Context, name string) ([]byte, error) {
	f, err := os.Open(d.file)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	content, err := find(ctx, f, name)
	if err != nil {
		return nil, err
	}
	raw, err := io.ReadAll(io.LimitReader(content, maxDocument+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading %s: %w", d.file, err)
	case len(raw) > maxDocument:
		return nil, fmt.Errorf("%w: %q in %s is longer than the %d bytes of the longest document", unpack.ErrLimit, name, d.file, maxDocument)
	}
	return raw, nil
}

// layer unpacks one layer. The library is not asked for it: it would look a layer up by its digest, which two may share.
func (d dockerSave) layer(ctx context.Context, u *unpack.Unpacker, name string, diff v1.Hash) error {
	f, err := os.Open(d.file)
	if err != nil {
		return err
	}
	defer f.Close() // only read
	content, err := find(ctx, f, name)
	if err != nil {
		return err
	}
	plain, err := decompress(content)
	if err != nil {
		return err
	}
	defer plain.Close() // only read
	return unpackStream(ctx, u, plain, diff)
}

// find returns the content of a regular file in an archive, by way of the links that older versions of Docker make
// between equal layers.
func find(ctx context.Context, f *os.File, name string) (io.Reader, error) {
	for range 8 {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return nil, err
		}
		tr := tar.NewReader(f)
		hdr, err := tr.Next()
		for err == nil && path.Clean(hdr.Name) != path.Clean(name) {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			hdr, err = tr.Next()
		}
		switch {
		case err != nil:
			return nil, fmt.Errorf("looking for %q in the archive: %w", name, err)
		case hdr.Typeflag == tar.TypeReg:
			return tr, nil
		case hdr.Typeflag == tar.TypeSymlink:
			name = path.Join(path.Dir(hdr.Name), hdr.Linkname)
		case hdr.Typeflag == tar.TypeLink:
			name = hdr.Linkname
		default:
			return nil, fmt.Errorf("%q in the archive is no file", name)
		}
	}
	return nil, errors.New("the links in the archive go in circles")
}
