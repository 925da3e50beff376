package image

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"

	"tagout/internal/idmap"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/runtime"
)

// Stored are the images that were imported. Safe for concurrent use.
type Stored struct {
	host   *Host
	store  *store.Store
	mapped bool // owners of files are shifted into the kid's user namespace
}

// NewStored serves the images of s with the same trust store, resolver and environment as host's. Whether this kernel and
// the store's file system can shift owners is tried. Where they cannot, files of an image that are root's alone cannot be
// read in a kid, and all of them seem to be nobody's; nothing else is different. unmapped says why, nil where they can.
func NewStored(ctx context.Context, host *Host, s *store.Store, dir string) (out *Stored, unmapped error) {
	unmapped = idmap.Try(ctx, dir)
	return &Stored{host: host, store: s, mapped: unmapped == nil}, unmapped
}

// Get returns the image that has the name now, for the kid whose user namespace is pinned to userns.
func (s *Stored) Get(name, userns string) (*StoredImage, error) {
	if _, err := s.store.Get(name); err != nil {
		return nil, err
	}
	return &StoredImage{of: s, name: name, userns: userns}, nil
}

// StoredImage is an image for one kid.
type StoredImage struct {
	of           *Stored
	name, userns string
}

// Env is the host image's environment with what the image wants put over it, but not the places of the trust store. dir
// is the kid's root directory.
func (i *StoredImage) Env(dir string) map[string]string {
	env := i.of.host.Env(dir)
	m, err := i.of.store.Used(filepath.Dir(dir))
	if err != nil {
		return env // the image is there, and its manifest is not readable: its programs are in the usual places
	}
	trust := i.of.host.trustEnv()
	maps.Copy(env, m.Env)
	maps.Copy(env, trust)
	return env
}

// Root mounts the image's root filesystem at dir, which must not exist and which somebody must unmount, and returns what has
// to be mounted into it. The kid's own directory is the one that holds dir.
func (i *StoredImage) Root(dir, kid string, addr netip.Addr) ([]runtime.Mount, error) {
	fail := func(err error) ([]runtime.Mount, error) {
		return nil, fmt.Errorf("making the root filesystem of kid %s: %w", kid, err)
	}
	kidDir := filepath.Dir(dir)
	rootfs, _, err := i.of.store.Use(i.name, kidDir)
	if err != nil {
		return fail(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil { // out of sight below the mount
		return fail(err)
	}
	userns := i.userns
	if !i.of.mapped {
		userns = ""
	}
	if err := idmap.Mount(rootfs, dir, userns); err != nil {
		return fail(err)
	}
	own := filepath.Join(kidDir, "etc") // not root's alone: the runtime reaches it as the kid's root
	if err := makeDir(own); err != nil {
		return fail(err)
	}
	mounts := []runtime.Mount{{Source: i.of.host.bundle, Target: store.TrustPath}}
	texts := etc(kid, addr, i.of.host.gateway)
	for _, target := range []string{store.ResolvConf, store.Hosts, store.Hostname} {
		source := filepath.Join(own, filepath.Base(target))
		if err := writeFile(source, []byte(texts[target[1:]])); err != nil {
			return fail(err)
		}
		mounts = append(mounts, runtime.Mount{Source: source, Target: target})
	}
	return mounts, nil
}
