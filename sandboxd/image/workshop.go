package image

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"tagout/internal/idmap"
	"tagout/sandboxd/runtime"
)

// Workshop is the root filesystem of a kid in which an image is finished: what has been unpacked of it, below a throw-away
// layer in memory. Unlike Writable's it holds nothing of the machine's.
type Workshop struct {
	base string
	of   *Writable
}

// WorkshopFor is the workshop over base, a directory that holds every place of runtime.RootFiles, for the kid whose user
// namespace is pinned to userns and maps uid to root.
func (h *Host) WorkshopFor(base, userns string, uid int, size int64) *Workshop {
	return &Workshop{base: base, of: h.WritableFor(userns, uid, size)}
}

// Env is root's environment, without the places of a trust store that is not there.
func (w *Workshop) Env(dir string) map[string]string {
	env := w.of.Env(dir)
	for name := range w.of.host.trustEnv() {
		delete(env, name)
	}
	return env
}

// Root makes the root directory at dir and mounts the layer beside it. What it mounted, the caller unmounts, also where it
// fails: dir, and LayersDir beside it.
func (w *Workshop) Root(dir, kid string, _ netip.Addr) ([]runtime.Mount, error) {
	fail := func(err error) ([]runtime.Mount, error) {
		return nil, fmt.Errorf("making the workshop of kid %s: %w", kid, err)
	}
	layers := filepath.Join(filepath.Dir(dir), LayersDir)
	if err := w.of.mountLayer(layers, dir); err != nil {
		return fail(err)
	}
	lower, upper, work := filepath.Join(layers, "lower"), filepath.Join(layers, "upper"), filepath.Join(layers, "work")
	for _, d := range []string{lower, upper, work} {
		if err := makeDir(d); err != nil {
			return fail(err)
		}
	}
	if err := os.Chown(upper, w.of.uid, w.of.uid); err != nil {
		return fail(err)
	}
	if err := idmap.Mount(w.base, lower, w.of.userns); err != nil {
		return fail(fmt.Errorf("building an image needs idmapped mounts: %w", err))
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, upper, work)
	if err := unix.Mount("tagout", dir, "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fail(err)
	}
	return nil, nil
}
