package sandboxd

import (
	"context"
	"path/filepath"
	"time"

	"tagout/internal/instance"
	"tagout/sandboxd/image"
	"tagout/sandboxd/image/keep"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/kids"
)

// tryLimit bounds the trial of an idmapped mount.
const tryLimit = 5 * time.Second

// storedImages opens the store, removes what killed imports left there, and finds out how its images can be mounted.
func storedImages(cfg Config, host *image.Host) (func(name, userns string) (kids.Image, error), error) {
	dir := cfg.Inst.ImageDir()
	s, err := store.Open(dir, filepath.Dir(cfg.Inst.KidDir("x")))
	if err != nil {
		return nil, err
	}
	if swept, err := (&keep.Keeper{Store: s, Audit: cfg.Audit}).Sweep(instance.Sandboxd); err != nil {
		cfg.Log.Error("sweeping the image store; `tagout image gc` tries again", "error", err)
	} else if swept.Leftovers > 0 {
		cfg.Log.Warn("removed what killed imports of images had left", "count", swept.Leftovers)
	}
	ctx, cancel := context.WithTimeout(context.Background(), tryLimit)
	defer cancel()
	stored, why := image.NewStored(ctx, host, s, dir)
	if why != nil {
		cfg.Log.Warn("files of imported images will be nobody's in kids: no idmapped mounts here", "error", why)
	}
	return func(name, userns string) (kids.Image, error) { return stored.Get(name, userns) }, nil
}
