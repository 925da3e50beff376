package sandboxd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"tagout/internal/authority"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/image"
	"tagout/sandboxd/image/build"
	"tagout/sandboxd/image/keep"
	"tagout/sandboxd/image/oci"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
	"tagout/sandboxd/kids"
	"tagout/sandboxd/runtime"
)

// tryLimit bounds the trial of an idmapped mount.
const tryLimit = 5 * time.Second

// imageSet is the images that kids can run on.
type imageSet struct {
	host    *image.Host
	stored  *image.Stored
	keeper  *keep.Keeper
	builder *build.Builder
	signed  bool                                        // making a kid takes a signature
	places  chan struct{}                               // one is taken by each pull and import under way
	reach   func(private bool) (*http.Transport, error) // registries
}

// newImages opens the store, removes what killed processes left there, and finds out how its images can be mounted. builds'
// kids are made by kids.
func newImages(cfg Config, kids build.Kids) (*imageSet, error) {
	host, err := image.NewHost(image.Config{
		Dir: filepath.Join(cfg.Inst.RunDir(), "image"), Gateway: cfg.Inst.Gateway(),
		Trust: image.Trust(filepath.Join(cfg.Inst.CADir(), "ca.pem")),
	})
	if err != nil {
		return nil, fmt.Errorf("is the instance set up (`tagout setup`)? %w", err)
	}
	dir := cfg.Inst.ImageDir()
	s, err := store.Open(dir, filepath.Dir(cfg.Inst.KidDir("x")))
	if err != nil {
		return nil, err
	}
	keeper := &keep.Keeper{Store: s, Audit: cfg.Audit}
	if swept, err := keeper.Sweep(instance.Sandboxd); err != nil {
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
	return &imageSet{host: host, stored: stored, keeper: keeper, builder: build.New(kids), signed: cfg.SpawnSigned, places: make(chan struct{}, maxArrivals), reach: cfg.Registries}, nil
}

// writable is an image for a kid whose root may write: the machine's, or a build's.
func (i *imageSet) writable(name, userns string, uid int, size int64) (kids.Image, error) {
	if name == image.WritableName {
		return i.host.WritableFor(userns, uid, size), nil
	}
	base, err := i.builder.Base(name)
	switch {
	case err != nil:
		return nil, err
	case base == "":
		return i.host.WritableFor(userns, uid, size), nil
	}
	return i.host.WorkshopFor(base, userns, uid, size), nil
}

// get is an image of the store for a kid.
func (i *imageSet) get(name, userns string) (kids.Image, error) {
	img, err := i.stored.Get(name, userns)
	if err != nil {
		return nil, absent(err)
	}
	return storedImage{img}, nil
}

// storedImage can be removed until the kid's root filesystem is made.
type storedImage struct{ *image.StoredImage }

func (s storedImage) Root(dir, kid string, addr netip.Addr) ([]runtime.Mount, error) {
	mounts, err := s.StoredImage.Root(dir, kid, addr)
	return mounts, absent(err)
}

// absent tells that the card names an image that is not there from what is the box's fault.
func absent(err error) error {
	if errors.Is(err, store.ErrUnknown) {
		return &kids.Error{Kind: kids.Invalid, Reason: reason.Malformed, Err: err}
	}
	return err
}

// List returns all images by name.
func (i *imageSet) List() ([]store.Image, error) { return i.keeper.Store.List() }

// Remove removes the image.
func (i *imageSet) Remove(name, actor string) error { return i.keeper.Remove(name, actor) }

// Sweep removes replaced images that no kid uses, and leftovers.
func (i *imageSet) Sweep(actor string) (store.Swept, error) { return i.keeper.Sweep(actor) }

// maxArrivals bounds the pulls and imports that go on at once: each may take twice its limit of the disk.
const maxArrivals = 4

// add is the keeper's for what comes from outside, where there is a place for it.
func (i *imageSet) add(ctx context.Context, w keep.Wish, src store.Source) (store.Manifest, error) {
	select {
	case i.places <- struct{}{}:
		defer func() { <-i.places }()
		return i.keeper.Add(ctx, w, src)
	default:
		return store.Manifest{}, i.keeper.Refuse(w, fmt.Errorf("%w: %d are already: wait for one to end", keep.ErrBusy, maxArrivals))
	}
}

// Pull fetches an image from a registry; local callers, who are root, also from one at a private address.
func (i *imageSet) Pull(ctx context.Context, actor string, local bool, r wire.PullRequest, tell func(string)) (store.Manifest, error) {
	transport, err := i.reach(local)
	if err != nil {
		return store.Manifest{}, err
	}
	defer transport.CloseIdleConnections()
	progress := func(format string, args ...any) { tell(fmt.Sprintf(format, args...)) }
	return i.add(ctx, keep.Wish{Name: r.Name, Actor: actor, Way: "pull", Source: r.Ref, Limits: limits(r.ImageLimits)},
		oci.Pulled{Ref: r.Ref, Transport: transport, Progress: progress})
}

// Import unpacks an image that arrives as an archive.
func (i *imageSet) Import(ctx context.Context, name, actor string, l wire.ImageLimits, archive io.Reader) (store.Manifest, error) {
	max := limits(l)
	return i.add(ctx, keep.Wish{Name: name, Actor: actor, Way: "import", Source: uploaded, Limits: max}, upload{archive, max})
}

// Build makes an image of Debian packages.
func (i *imageSet) Build(ctx context.Context, actor string, r wire.BuildRequest, tell func(string)) (store.Manifest, error) {
	w := keep.Wish{Name: r.Name, Actor: actor, Way: "build", Source: r.Mirror, Limits: limits(r.ImageLimits)}
	if i.signed {
		return store.Manifest{}, i.keeper.Refuse(w, errSigned)
	}
	job, err := i.builder.Begin(r.Name, actor, build.Request{
		Suite: r.Suite, Mirror: r.Mirror, Components: r.Components, More: r.Sources, Packages: r.Packages, Keyring: r.Keyring, Space: r.Space, Time: r.Timeout,
	}, tell)
	if err != nil {
		return store.Manifest{}, i.keeper.Refuse(w, err)
	}
	defer job.End()
	w.Source = job.Mirror()
	return i.keeper.Add(ctx, w, job)
}

// errSigned: no order is for a build's kids, and what runs in them is whoever's packages were named.
var errSigned = &authority.Refusal{Code: reason.OrderUnsigned,
	Text: "making a kid takes a signature on this box (`spawn:` in its configuration), and a build makes two that nobody can sign for: import an image that was made elsewhere"}

func limits(l wire.ImageLimits) unpack.Limits {
	out := unpack.DefaultLimits()
	if l.MaxBytes > 0 {
		out.Bytes = l.MaxBytes
	}
	if l.MaxFiles > 0 {
		out.Files = l.MaxFiles
	}
	return out
}

// uploaded is the source of an image that came as a stream.
const uploaded = "uploaded"

// upload is an image that arrives as an archive of any kind.
type upload struct {
	archive io.Reader
	limits  unpack.Limits
}

// Unpack implements store.Source. The archive is kept until it is unpacked: some kinds are read more than once.
func (u upload) Unpack(ctx context.Context, to *unpack.Unpacker, scratch string, m *store.Manifest) error {
	file, dir := filepath.Join(scratch, "archive"), filepath.Join(scratch, "dir")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := spool(u.archive, file, u.limits.Stream()); err != nil {
		return err
	}
	src, err := oci.File(file, nil)
	if err != nil {
		return err
	}
	if err := src.Unpack(ctx, to, dir, m); err != nil {
		return err
	}
	m.Source, m.SourceAt = uploaded, nil
	return nil
}

// spool writes a stream of at most so many bytes to a file.
func spool(from io.Reader, path string, most int64) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	n, err := io.Copy(f, io.LimitReader(from, most+1))
	if err == nil && n > most {
		err = fmt.Errorf("%w: an archive of more than %d bytes", unpack.ErrLimit, most)
	}
	return err
}

// buildKids makes the kids of builds.
type buildKids struct{ manager *kids.Manager }

func (b *buildKids) Spawn(ctx context.Context, k build.Kid) (string, error) {
	plan, err := PlanFromCard(wire.SpawnRequest{Card: k.Card})
	if err != nil {
		return "", err
	}
	plan.Image = k.Image
	kid, err := b.manager.Spawn(ctx, kids.Request{Purpose: k.Purpose, Actor: k.Actor, Plan: plan})
	return kid.Name, err
}

func (b *buildKids) Exec(ctx context.Context, name, actor string, r wire.ExecRequest, send func(wire.ExecFrame) error) error {
	return b.manager.Exec(ctx, name, actor, r, send)
}

func (b *buildKids) Put(ctx context.Context, name, actor, path string, content io.Reader) error {
	_, err := b.manager.PutFile(ctx, name, actor, path, 0o644, content)
	return err
}

func (b *buildKids) Destroy(ctx context.Context, name, actor, why string) error {
	return b.manager.Destroy(ctx, name, actor, why)
}
