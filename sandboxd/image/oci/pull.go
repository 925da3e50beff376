package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

// ErrReference is wrapped where a reference names no image.
var ErrReference = errors.New("this names no image of a registry")

// Pulled is an image in a registry.
type Pulled struct {
	Ref       string            // such as registry.example.com/tools/shell:1.2 or …@sha256:…
	Transport http.RoundTripper // how to reach registries
	Progress  Progress
}

// Unpack implements store.Source. Layers are unpacked as they arrive; nothing is kept of one that is not whole.
func (r Pulled) Unpack(ctx context.Context, u *unpack.Unpacker, _ string, m *store.Manifest) error {
	ref, err := name.ParseReference(r.Ref)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrReference, err)
	}
	r.Progress.say("asking %s for %s", ref.Context().RegistryStr(), ref.Identifier())
	img, err := remote.Image(ref, r.options(ctx)...)
	if err != nil {
		return fmt.Errorf("asking for %s: %w", ref, err)
	}
	digest, err := img.Digest()
	if err != nil {
		return fmt.Errorf("asking for %s: %w", ref, err)
	}
	docs, err := remoteDocuments(img, digest)
	if err != nil {
		return fmt.Errorf("asking for %s: %w", ref, err)
	}
	config, err := docs.unpack(ctx, u, r.Progress)
	if err != nil {
		return err
	}
	note(m, store.KindPulled, ref.Name(), digest.String(), config)
	return nil
}

func (r Pulled) options(ctx context.Context) []remote.Option {
	return []remote.Option{
		remote.WithContext(ctx), remote.WithTransport(r.Transport), remote.WithPlatform(platform()),
		remote.WithAuthFromKeychain(authn.DefaultKeychain), remote.WithUserAgent("tagout"),
	}
}

func remoteDocuments(img v1.Image, digest v1.Hash) (documents, error) {
	d := documents{open: func(desc v1.Descriptor) (io.ReadCloser, error) {
		layer, err := img.LayerByDigest(desc.Digest)
		if err != nil {
			return nil, err
		}
		return layer.Compressed()
	}}
	raw, err := img.RawManifest()
	if err == nil {
		err = check(raw, digest)
	}
	if err == nil {
		d.manifest, err = img.Manifest()
	}
	if err == nil {
		err = fits(d.manifest.Config.Size)
	}
	if err == nil {
		d.config, err = img.RawConfigFile()
	}
	return d, err
}

// fits says why a document of that many bytes is not fetched. The library would keep all of it, and takes a negative size for
// one that need not be compared.
func fits(size int64) error {
	if size < 0 || size > maxDocument {
		return fmt.Errorf("%w: its configuration has %d bytes: the most is %d", unpack.ErrLimit, size, maxDocument)
	}
	return nil
}

// Latest returns the digest that the reference has at the registry now.
func (r Pulled) Latest(ctx context.Context) (string, error) {
	ref, err := name.ParseReference(r.Ref)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrReference, err)
	}
	img, err := remote.Image(ref, r.options(ctx)...)
	if err != nil {
		return "", fmt.Errorf("asking for %s: %w", ref, err)
	}
	digest, err := img.Digest()
	return digest.String(), err
}
