package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

// layoutDir is a directory that is an OCI image layout.
type layoutDir struct{ local }

func (l layoutDir) Unpack(ctx context.Context, u *unpack.Unpacker, _ string, m *store.Manifest) error {
	return l.unpackFrom(ctx, u, l.file, m)
}

// layoutTar is an archive of one. It is unpacked first, as carefully as an image.
type layoutTar struct{ local }

func (l layoutTar) Unpack(ctx context.Context, u *unpack.Unpacker, scratch string, m *store.Manifest) error {
	f, err := os.Open(l.file)
	if err != nil {
		return err
	}
	defer f.Close() // only read
	dir, err := unpack.New(scratch, unpack.DefaultLimits())
	if err != nil {
		return err
	}
	if err := errors.Join(dir.Layer(ctx, f), dir.Close()); err != nil {
		return fmt.Errorf("unpacking the layout: %w", err)
	}
	return l.unpackFrom(ctx, u, scratch, m)
}

func (l local) unpackFrom(ctx context.Context, u *unpack.Unpacker, dir string, m *store.Manifest) error {
	root, err := os.OpenRoot(dir) // no link in it leads out
	if err != nil {
		return err
	}
	defer root.Close() // only read
	raw, err := readSmall(root, "index.json")
	if err != nil {
		return fmt.Errorf("%s is no OCI image layout: %w", l.file, err)
	}
	desc, err := choose(root, raw, 0)
	if err != nil {
		return fmt.Errorf("reading the index of %s: %w", l.file, err)
	}
	docs, err := readDocuments(root, desc.Digest)
	if err != nil {
		return fmt.Errorf("reading %s: %w", l.file, err)
	}
	config, err := docs.unpack(ctx, u, l.progress)
	if err != nil {
		return err
	}
	l.note(m, store.KindOCI, desc.Digest.String(), config)
	return nil
}

func readDocuments(root *os.Root, digest v1.Hash) (documents, error) {
	d := documents{open: func(desc v1.Descriptor) (io.ReadCloser, error) {
		return root.OpenFile(blobName(desc.Digest), os.O_RDONLY|unix.O_NONBLOCK, 0)
	}}
	raw, err := readBlob(root, digest)
	if err != nil {
		return d, fmt.Errorf("the manifest: %w", err)
	}
	if d.manifest, err = v1.ParseManifest(bytes.NewReader(raw)); err != nil {
		return d, fmt.Errorf("the manifest: %w", err)
	}
	if d.config, err = readBlob(root, d.manifest.Config.Digest); err != nil {
		return d, fmt.Errorf("the configuration: %w", err)
	}
	return d, nil
}

// choose returns the one image of an index that this machine can run. Indexes can be nested.
func choose(root *os.Root, raw []byte, depth int) (v1.Descriptor, error) {
	index, err := v1.ParseIndexManifest(bytes.NewReader(raw))
	if err != nil {
		return v1.Descriptor{}, err
	}
	var fit []v1.Descriptor
	for _, d := range index.Manifests {
		if p := d.Platform; (d.MediaType.IsImage() || d.MediaType.IsIndex()) && (p == nil || p.OS == platform().OS && p.Architecture == platform().Architecture) {
			fit = append(fit, d)
		}
	}
	switch {
	case len(fit) == 0:
		return v1.Descriptor{}, fmt.Errorf("it has no image for %s", platform().String())
	case len(fit) > 1:
		return v1.Descriptor{}, fmt.Errorf("it has %d images for %s: copy the one that you want by itself", len(fit), platform().String())
	case !fit[0].MediaType.IsIndex():
		return fit[0], nil
	case depth > 3:
		return v1.Descriptor{}, errors.New("it is nested too deep")
	}
	raw, err = readBlob(root, fit[0].Digest)
	if err != nil {
		return v1.Descriptor{}, err
	}
	return choose(root, raw, depth+1)
}

func readBlob(root *os.Root, digest v1.Hash) ([]byte, error) {
	if digest.Algorithm != "sha256" {
		return nil, compare(digest, nil)
	}
	raw, err := readSmall(root, blobName(digest))
	if err != nil {
		return nil, err
	}
	return raw, check(raw, digest)
}

func blobName(digest v1.Hash) string { return filepath.Join("blobs", digest.Algorithm, digest.Hex) }

func readSmall(root *os.Root, name string) ([]byte, error) {
	info, err := root.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxDocument {
		return nil, fmt.Errorf("%s is %d bytes long, or no file: the most is %d", name, info.Size(), maxDocument)
	}
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	return io.ReadAll(io.LimitReader(f, maxDocument))
}
