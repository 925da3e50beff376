// Package build makes images of Debian packages. It promises that nothing that comes from a mirror is run on the machine,
// and that what is run in a kid has no network:
//
//	first kid    the machine's programs below a throw-away layer; it reaches the mirrors alone. mmdebstrap has apt
//	             resolve, fetch and check the packages, and lays out their files; none of their scripts is run
//	second kid   those files and nothing of the machine's; no network. dpkg installs them, which runs their scripts
//
// Both are kids as any other: uids of their own, no capability over the machine, seccomp, limits; a stop ends them, and one
// that a killed sandboxd left is taken apart when the next one starts, because no build is under way then. What comes out
// of them is a tar stream that nobody trusts, for package unpack. The list of packages is the first kid's.
package build

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"

	"tagout/internal/wire"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
	"tagout/sandboxd/runtime"
)

//go:embed fetch.sh
var fetchScript string

//go:embed describe.sh
var describeScript string

//go:embed finish.sh
var finishScript string

var (
	// ErrBusy is wrapped where an image of the name is being built, or too many are.
	ErrBusy = errors.New("an image is being built")
	// ErrTool is wrapped where a program is missing that builds need.
	ErrTool = errors.New("a program is missing: install the Debian package mmdebstrap")
)

// maxBuilds bounds the builds that go on at once: each may use its space in memory.
const maxBuilds = 2

// Kid is a kid for one step of a build.
type Kid struct {
	Image   string // what Image knows
	Card    string
	Purpose string
	Actor   string
}

// Kids makes and removes kids.
type Kids interface {
	Spawn(ctx context.Context, k Kid) (name string, err error)
	Exec(ctx context.Context, name, actor string, r wire.ExecRequest, send func(wire.ExecFrame) error) error
	Put(ctx context.Context, name, actor, path string, content io.Reader) error
	Destroy(ctx context.Context, name, actor, why string) error
}

// Builder makes images. Safe for concurrent use.
type Builder struct {
	kids Kids

	mu    sync.Mutex
	under map[string]*Job // by the image's name, under way; guarded by mu
}

// New returns a builder whose kids are made by kids.
func New(kids Kids) *Builder { return &Builder{kids: kids, under: map[string]*Job{}} }

// Job is one build. It is the source of one image.
type Job struct {
	b        *Builder
	id       string
	name     string
	actor    string
	request  Request
	sources  []Source
	progress func(line string)
	base     string // where the second kid's files are laid out; guarded by Builder.mu
}

// Begin takes the image's name for a build: ErrBusy where another one has it. progress, which may be nil, is told of each
// step, in a line for people. The caller calls End, whatever becomes of it.
func (b *Builder) Begin(name, actor string, r Request, progress func(line string)) (*Job, error) {
	r, sources, err := r.complete()
	if err != nil {
		return nil, err
	}
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTool, err)
	}
	if progress == nil {
		progress = func(string) {}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.under[name] != nil:
		return nil, fmt.Errorf("image %s: %w under this name already: wait for it, or take another name", name, ErrBusy)
	case len(b.under) >= maxBuilds:
		return nil, fmt.Errorf("%w %d times already: wait for one to end", ErrBusy, maxBuilds)
	}
	j := &Job{b: b, id: strings.ToLower(ulid.Make().String()), name: name, actor: actor, request: r, sources: sources, progress: progress}
	b.under[name] = j
	return j, nil
}

// Mirror is the first of the sources, with its suite.
func (j *Job) Mirror() string { return j.sources[0].URL + " " + j.request.Suite }

// End gives the name free.
func (j *Job) End() {
	j.b.mu.Lock()
	defer j.b.mu.Unlock()
	delete(j.b.under, j.name)
}

// imagePrefix begins the names of the images of builds' kids. No card can name such an image.
const imagePrefix = "build:"

func (j *Job) image(step string) string { return imagePrefix + j.id + ":" + step }

// Base says what the image of a build's kid is: the machine's own programs (""), or what lies in a directory. It fails where
// that build is not under way.
func (b *Builder) Base(image string) (dir string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, j := range b.under {
		switch image {
		case j.image("fetch"):
			return "", nil
		case j.image("finish"):
			if j.base != "" {
				return j.base, nil
			}
		}
	}
	return "", fmt.Errorf("image %q is none that a card can name, and no such build is under way", image)
}

// Unpack implements store.Source.
func (j *Job) Unpack(ctx context.Context, u *unpack.Unpacker, scratch string, m *store.Manifest) error {
	ctx, cancel := context.WithTimeoutCause(ctx, j.request.Time, fmt.Errorf("it took longer than %s", j.request.Time))
	defer cancel()
	base := filepath.Join(scratch, "base")
	info, err := j.fetch(ctx, base)
	if err != nil {
		return why(ctx, err)
	}
	j.b.mu.Lock()
	j.base = base
	j.b.mu.Unlock()
	sum, err := j.finish(ctx, u)
	if err != nil {
		return why(ctx, err)
	}
	m.Kind, m.Source, m.Digest, m.Build = store.KindBuilt, j.Mirror(), sum, info
	return nil
}

// why puts the end of ctx before what it broke.
func why(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// fetch lays out the packages' files in base.
func (j *Job) fetch(ctx context.Context, base string) (info *store.Build, err error) {
	j.progress("fetching the packages from " + j.sources[0].URL)
	kid, end, err := j.spawn(ctx, "fetch", cardFor("Fetch the packages of an image.", j.request, j.sources))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	keyring := DefaultKeyring
	if len(j.request.Keyring) > 0 {
		keyring = "/workspace/keyring.gpg"
		if err := j.b.kids.Put(ctx, kid, j.actor, keyring, strings.NewReader(string(j.request.Keyring))); err != nil {
			return nil, err
		}
	}
	argv := []string{keyring, j.request.Suite, strings.Join(append([]string{"apt"}, j.request.Packages...), ",")}
	for _, s := range j.sources {
		argv = append(argv, s.line())
	}
	if err := j.script(ctx, kid, fetchScript, argv, nil); err != nil {
		return nil, fmt.Errorf("fetching the packages: %w", told(err))
	}
	var text strings.Builder
	if err := j.script(ctx, kid, describeScript, nil, atMost(&text, maxDescription)); err != nil {
		return nil, fmt.Errorf("listing the packages: %w", err)
	}
	if info, err = describe(text.String(), j.sources, j.request.Packages); err != nil {
		return nil, fmt.Errorf("listing the packages: %w", err)
	}
	j.progress(fmt.Sprintf("laying out the files of %d packages", len(info.Packages)))
	if err := os.Mkdir(base, 0o755); err != nil {
		return nil, err
	}
	if err := os.Chmod(base, 0o755); err != nil { // the second kid's root directory, whatever the umask is
		return nil, err
	}
	return info, j.stream(ctx, kid, []string{"/bin/tar", "-C", "/build/root", "--numeric-owner", "-cf", "-", "."}, func(tar io.Reader) error {
		return layOut(ctx, tar, base, j.request.Space)
	})
}

// layOut unpacks the first kid's files, and adds the places on which the runtime mounts.
func layOut(ctx context.Context, tar io.Reader, base string, space int64) error {
	limits := unpack.DefaultLimits()
	limits.Bytes = space // the layer that they come from has no more
	u, err := unpack.New(base, limits)
	if err != nil {
		return err
	}
	defer u.Close() // only read
	if err := u.Layer(ctx, tar); err != nil {
		return err
	}
	dirs, files := runtime.RootFiles()
	for _, d := range dirs {
		if err := u.Dir(d); err != nil {
			return err
		}
	}
	for _, f := range files {
		if err := u.File(f); err != nil {
			return err
		}
	}
	return nil
}

// finish installs the packages and gives what came of it to u. It returns the stream's digest.
func (j *Job) finish(ctx context.Context, u *unpack.Unpacker) (digest string, err error) {
	j.progress("installing the packages")
	kid, end, err := j.spawn(ctx, "finish", cardFor("Install the packages of an image.", j.request, nil))
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, end()) }()
	if err := j.script(ctx, kid, finishScript, nil, nil); err != nil {
		return "", fmt.Errorf("installing the packages: %w", told(err))
	}
	j.progress("unpacking the image")
	argv := []string{"/bin/tar", "-C", "/", "--numeric-owner", "--exclude=./workspace", "--exclude=./.tagout", "--exclude=./proc/*", "--exclude=./sys/*",
		"--exclude=./dev/*", "--exclude=./tmp/*", "--exclude=./run/*", "-cf", "-", "."}
	err = j.stream(ctx, kid, argv, func(tar io.Reader) error {
		digest, err = layer(ctx, u, tar)
		return err
	})
	return digest, err
}

// endLimit bounds how long a build waits for its kid to be gone; sandboxd goes on trying after it.
const endLimit = 30 * time.Second

// spawn makes a kid for one step. end destroys it, also where ctx has ended.
func (j *Job) spawn(ctx context.Context, step, card string) (kid string, end func() error, err error) {
	kid, err = j.b.kids.Spawn(ctx, Kid{Image: j.image(step), Card: card, Actor: j.actor, Purpose: "build image " + j.name + ": " + step})
	if err != nil {
		return "", nil, err
	}
	return kid, func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endLimit)
		defer cancel()
		return j.b.kids.Destroy(ctx, kid, j.actor, "this step of the build is over")
	}, nil
}
