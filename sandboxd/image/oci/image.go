// Package oci reads images as others write them: OCI image layouts, what `docker save` writes, archives of root
// filesystems, and registries. It promises that every byte that reaches the unpacker belongs to a digest that was
// checked when Unpack returns without an error: the manifest's against the reference, the configuration's and each
// layer's against the manifest, and each layer's content against the configuration.
package oci

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"regexp"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

// ErrDigest is wrapped where bytes are not those that a digest names.
var ErrDigest = errors.New("the digest does not match")

const (
	maxLayers   = 256
	maxDocument = 8 << 20  // bytes of an index, a manifest or a configuration
	maxEnv      = 64 << 10 // bytes of an image's environment
)

// Progress is told what is being done, in a line for people. It may be nil.
type Progress func(format string, args ...any)

func (p Progress) say(format string, args ...any) {
	if p != nil {
		p(format, args...)
	}
}

// platform is the one whose images this machine can run.
func platform() v1.Platform { return v1.Platform{OS: "linux", Architecture: runtime.GOARCH} }

// documents are an image's manifest and configuration, and a way to its layers as they are stored.
type documents struct {
	manifest *v1.Manifest
	config   []byte
	open     func(v1.Descriptor) (io.ReadCloser, error)
}

// unpack checks an image's configuration, then checks and applies its layers, lowest first. The manifest is checked.
func (d documents) unpack(ctx context.Context, u *unpack.Unpacker, p Progress) (*v1.ConfigFile, error) {
	config, err := parseConfig(d.config, d.manifest.Config.Digest)
	if err != nil {
		return nil, err
	}
	layers := d.manifest.Layers
	if len(layers) != len(config.RootFS.DiffIDs) {
		return nil, fmt.Errorf("it has %d layers, and %d in its configuration", len(layers), len(config.RootFS.DiffIDs))
	}
	for i, desc := range layers {
		p.say("layer %d of %d: %s, %d KiB", i+1, len(layers), desc.Digest, desc.Size>>10)
		stream, err := d.open(desc)
		if err == nil {
			err = errors.Join(unpackBlob(ctx, u, stream, desc, config.RootFS.DiffIDs[i]), stream.Close())
		}
		if err != nil {
			return nil, fmt.Errorf("layer %d, %s: %w", i+1, desc.Digest, err)
		}
	}
	return config, nil
}

// parseConfig reads an image's configuration and checks that it is the one that want names and that its layers can
// be run here.
func parseConfig(raw []byte, want v1.Hash) (*v1.ConfigFile, error) {
	if err := check(raw, want); err != nil {
		return nil, fmt.Errorf("its configuration: %w", err)
	}
	config, err := v1.ParseConfigFile(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("reading its configuration: %w", err)
	}
	if config.OS != "" && config.OS != "linux" || config.Architecture != "" && config.Architecture != runtime.GOARCH {
		return nil, fmt.Errorf("it is for %s/%s: this machine runs linux/%s", config.OS, config.Architecture, runtime.GOARCH)
	}
	if n := len(config.RootFS.DiffIDs); n == 0 || n > maxLayers {
		return nil, fmt.Errorf("it has %d layers: from 1 to %d can be unpacked", n, maxLayers)
	}
	return config, nil
}

// check compares a document with its digest.
func check(raw []byte, want v1.Hash) error {
	sum := sha256.Sum256(raw)
	return compare(want, sum[:])
}

func compare(want v1.Hash, sum []byte) error {
	if want.Algorithm != "sha256" {
		return fmt.Errorf("%w: %s is not sha256, the only one that is checked", ErrDigest, want.Algorithm)
	}
	if got := hex.EncodeToString(sum); got != want.Hex {
		return fmt.Errorf("%w: it is sha256:%s instead of %s", ErrDigest, got, want)
	}
	return nil
}

// unpackBlob applies one layer while it is read, and compares it with what the manifest and the configuration say.
func unpackBlob(ctx context.Context, u *unpack.Unpacker, blob io.Reader, desc v1.Descriptor, diff v1.Hash) error {
	sum := sha256.New()
	counted := &counter{from: io.TeeReader(blob, sum), most: desc.Size}
	plain, err := decompress(counted)
	if err != nil {
		return err
	}
	defer plain.Close() // only read
	err = unpackStream(ctx, u, plain, diff)
	if errors.Is(err, unpack.ErrLimit) || ctx.Err() != nil {
		return err
	}
	// What is spoilt often cannot be unpacked either: the digest is what says so.
	if spoilt := whole(counted, desc, sum); err == nil || errors.Is(spoilt, ErrDigest) {
		return spoilt
	}
	return err
}

// whole reads a blob to its end and compares it with its descriptor. sum is of all that is read.
func whole(blob *counter, desc v1.Descriptor, sum hash.Hash) error {
	if _, err := io.Copy(io.Discard, blob); err != nil {
		if strings.HasPrefix(err.Error(), "error verifying ") { // go-containerregistry's own check, whose type is not exported
			err = fmt.Errorf("%w: %w", ErrDigest, err)
		}
		return err
	}
	if blob.n != desc.Size {
		return fmt.Errorf("it is %d bytes long instead of %d", blob.n, desc.Size)
	}
	return compare(desc.Digest, sum.Sum(nil))
}

// unpackStream applies one uncompressed layer whose content has the digest diff.
func unpackStream(ctx context.Context, u *unpack.Unpacker, plain io.Reader, diff v1.Hash) error {
	sum := sha256.New()
	if err := u.Layer(ctx, io.TeeReader(plain, sum)); err != nil {
		return err
	}
	return contentMatches(diff, sum)
}

func contentMatches(diff v1.Hash, sum hash.Hash) error {
	if err := compare(diff, sum.Sum(nil)); err != nil {
		return fmt.Errorf("its content: %w", err)
	}
	return nil
}

// counter counts what is read, and fails after most bytes.
type counter struct {
	from    io.Reader
	n, most int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	if c.n += int64(n); c.n > c.most {
		return 0, fmt.Errorf("it is longer than the %d bytes that its manifest says", c.most)
	}
	return n, err
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

// environment keeps what can be set.
func environment(list []string) map[string]string {
	out, left := map[string]string{}, maxEnv
	for _, entry := range list {
		name, value, ok := strings.Cut(entry, "=")
		if left -= len(entry); ok && left > 0 && envName.MatchString(name) && !strings.ContainsRune(value, 0) {
			out[name] = value
		}
	}
	return out
}

// note fills in what the configuration says.
func note(m *store.Manifest, kind, source, digest string, config *v1.ConfigFile) {
	m.Kind, m.Source, m.Digest = kind, source, digest
	if config != nil {
		m.Env = environment(config.Config.Env)
	}
}
