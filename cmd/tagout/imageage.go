package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"time"

	"tagout/internal/doctor"
	"tagout/sandboxd/image/build"
	"tagout/sandboxd/image/oci"
	"tagout/sandboxd/image/store"
)

// askLimit bounds how long doctor waits for all registries together.
const askLimit = 5 * time.Second

// imageAge says which images are not what their sources would give now. There is nothing to say, and ok is false, where the
// box is not set up or has no images.
func (a *app) imageAge(ctx context.Context) (c doctor.Check, ok bool) {
	inst, err := a.open()
	if err != nil || os.Geteuid() != 0 {
		return c, false
	}
	if _, err := os.Stat(inst.ImageDir()); err != nil {
		return c, false
	}
	c = doctor.Check{Name: "images", Cost: "kids run on programs that may lack corrections", Fix: "import, pull or build them again, and spawn their kids again"}
	s, err := a.images()
	var list []store.Image
	if err == nil {
		list, err = s.List()
	}
	if err != nil {
		c.Missing = err.Error()
		return c, true
	}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	old, asked := a.oldImages(ctx, list)
	if len(old) > 0 {
		c.Missing = strings.Join(old, "; ")
		return c, true
	}
	c.OK, c.Cost, c.Fix = true, "", ""
	c.Found = count(len(list), "image") + ", none older than its source"
	if len(asked) > 0 {
		c.Found += "; not known of " + strings.Join(asked, ", ")
	}
	return c, len(list) > 0
}

// oldImages returns why images are old, and those of which nobody could say.
func (a *app) oldImages(ctx context.Context, list []store.Image) (old, unknown []string) {
	for _, i := range list {
		switch {
		case i.Broken != "":
			old = append(old, i.Broken)
		case !i.Current && len(i.UsedBy) > 0:
			old = append(old, fmt.Sprintf("there is a newer build of %s than %s runs on", i.Name, strings.Join(i.UsedBy, ", ")))
		case !i.Current:
		case i.SourceAt != nil:
			info, err := os.Stat(i.Source)
			switch {
			case errors.Is(err, fs.ErrNotExist): // it was imported to be rid of it
			case err != nil:
				unknown = append(unknown, i.Name)
			case info.ModTime().After(*i.SourceAt):
				old = append(old, "older than its source: "+i.Name)
			}
		case i.Kind == store.KindPulled:
			switch latest, err := a.latest(ctx, i.Source); {
			case err != nil:
				unknown = append(unknown, i.Name)
			case latest != i.Digest:
				old = append(old, "its registry has a newer build: "+i.Name)
			}
		case i.Build != nil:
			switch newer, err := a.newerPackages(ctx, i.Build); {
			case err != nil:
				unknown = append(unknown, i.Name)
			case newer:
				old = append(old, "its mirrors have other packages by now: "+i.Name)
			}
		}
	}
	return old, unknown
}

func (a *app) latest(ctx context.Context, ref string) (string, error) {
	transport, err := a.registryTransport()
	if err != nil {
		return "", err
	}
	defer transport.CloseIdleConnections()
	return oci.Pulled{Ref: ref, Transport: transport}.Latest(ctx)
}

func (a *app) newerPackages(ctx context.Context, b *store.Build) (bool, error) {
	transport, err := a.registryTransport()
	if err != nil {
		return false, err
	}
	defer transport.CloseIdleConnections()
	return build.Newer(ctx, b, &http.Client{Transport: transport})
}
