// Package store keeps images on the box: unpacked once, each in a directory of its own that never changes once it is
// in place, shared by every kid that runs on it.
//
//	lock           held while the store changes; shared while a kid begins to use an image
//	names/NAME     the id of the image that has the name now
//	content/ID/    manifest.json and the root filesystem, in rootfs/
//	tmp/           what is being made; what a kill left here goes when sandboxd starts or another image is added
//
// It promises that an image is there whole or not at all, and that one which a kid uses stays. Only root reaches
// the store: files in it belong to whom the images say, and bear the names of users of this machine.
package store

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/card"
)

var (
	// ErrUnknown is wrapped where no image has the name.
	ErrUnknown = errors.New("there is no such image")
	// ErrName is wrapped where no image can have such a name.
	ErrName = errors.New("this cannot name an image")
	// ErrForged is wrapped where a source's bytes are not those that a digest or a signature vouches for.
	ErrForged = errors.New("the bytes are not those that were vouched for")
	// ErrInUse is wrapped where a kid that lives uses the image.
	ErrInUse = errors.New("the image is in use")
)

// Manifest describes an image. It is written once.
type Manifest struct {
	Version  int               `json:"version"`
	ID       string            `json:"id"`
	Name     string            `json:"name"`
	Kind     string            `json:"kind"`                // where it came from: one of the Kinds
	Source   string            `json:"source"`              // a path or a reference
	Digest   string            `json:"digest"`              // of the image's manifest, or of the archive
	SourceAt *time.Time        `json:"source_at,omitempty"` // when the source, a file, had last changed
	Created  time.Time         `json:"created"`
	Size     int64             `json:"size"` // bytes of files
	Files    int               `json:"files"`
	Skipped  map[string]int    `json:"skipped,omitempty"` // reason -> entries that were left out
	Env      map[string]string `json:"env,omitempty"`     // what the image wants in the environment
	Build    *Build            `json:"build,omitempty"`   // of one that was built here
}

// Kinds of sources.
const (
	KindRootfs = "rootfs" // an archive of a root filesystem
	KindDocker = "docker" // what `docker save` writes
	KindOCI    = "oci"    // an OCI image layout
	KindPulled = "pulled" // a registry
	KindBuilt  = "built"  // built here, of Debian packages
)

const (
	manifestVersion = 1
	manifestName    = "manifest.json"
	rootfsName      = "rootfs"
	useName         = "image" // in a kid's directory: the id of the image that it uses
)

// Image is a manifest with who uses it.
type Image struct {
	Manifest
	Current bool     `json:"current"`           // it has its name still; no newer image took it
	UsedBy  []string `json:"used_by,omitempty"` // kids
	Broken  string   `json:"broken,omitempty"`  // why its manifest cannot be read; only ID is known then
}

// Store is the store of one instance. Safe for concurrent use, also by several processes.
type Store struct {
	dir  string
	kids string
}

// Open opens the store in dir, which is made where it is missing. kids is the directory that holds a directory for each
// living kid.
func Open(dir, kids string) (*Store, error) {
	s := &Store{dir: dir, kids: kids}
	for _, d := range []string{dir, s.path("names"), s.path("content"), s.path("tmp")} {
		if err := os.Mkdir(d, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("opening the image store: is the instance set up (`tagout setup`)? %w", err)
		}
		if err := os.Chmod(d, 0o700); err != nil {
			return nil, fmt.Errorf("opening the image store: %w", err)
		}
	}
	return s, nil
}

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.dir}, parts...)...)
}

// lock takes the store's lock, shared or alone. The kernel drops it when the process ends, however it ends.
func (s *Store) lock(how int) (unlock func(), err error) {
	f, err := os.OpenFile(s.path("lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the image store: %w", err)
	}
	if err := flock(f, how); err != nil {
		f.Close() // nothing was written
		return nil, fmt.Errorf("locking the image store: %w", err)
	}
	return func() { f.Close() }, nil // nothing was written
}

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// List returns all images by name, the current one of a name first.
func (s *Store) List() ([]Image, error) {
	unlock, err := s.lock(unix.LOCK_SH)
	if err != nil {
		return nil, err
	}
	defer unlock()
	return s.list()
}

func (s *Store) list() ([]Image, error) {
	ids, err := os.ReadDir(s.path("content"))
	if err != nil {
		return nil, fmt.Errorf("listing images: %w", err)
	}
	uses, err := s.uses()
	if err != nil {
		return nil, err
	}
	out := []Image{}
	for _, e := range ids {
		m, err := s.manifest(e.Name())
		if err != nil {
			out = append(out, Image{Manifest: Manifest{ID: e.Name()}, Broken: err.Error()})
			continue
		}
		current, err := s.current(m.Name)
		if err != nil && !errors.Is(err, ErrUnknown) {
			return nil, err
		}
		out = append(out, Image{Manifest: m, Current: current == m.ID, UsedBy: uses[m.ID]})
	}
	slices.SortFunc(out, func(a, b Image) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), b.Created.Compare(a.Created))
	})
	return out, nil
}

// manifest reads the manifest of the image with that id.
func (s *Store) manifest(id string) (Manifest, error) {
	var m Manifest
	file := s.path("content", id, manifestName)
	raw, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(raw, &m)
	}
	if err == nil && (m.Version != manifestVersion || m.ID != id || !card.NamesImage(m.Name)) {
		err = errors.New("it is not for this version of Tagout")
	}
	if err != nil {
		return m, fmt.Errorf("reading %s: %w: remove %s and import the image again", file, err, filepath.Dir(file))
	}
	return m, nil
}

// current returns the id of the image that has the name.
func (s *Store) current(name string) (string, error) {
	if !card.NamesImage(name) {
		return "", fmt.Errorf("image %q: %w", name, ErrUnknown)
	}
	raw, err := os.ReadFile(s.path("names", name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("image %s: %w: `tagout image ls` shows those that there are", name, ErrUnknown)
	}
	if err != nil {
		return "", fmt.Errorf("looking for image %s: %w", name, err)
	}
	id := strings.TrimSpace(string(raw))
	if id != filepath.Base(id) || id == "." || id == "" {
		return "", fmt.Errorf("looking for image %s: %s names no image: import it again", name, s.path("names", name))
	}
	return id, nil
}

// Get returns the image that has the name.
func (s *Store) Get(name string) (Manifest, error) {
	unlock, err := s.lock(unix.LOCK_SH)
	if err != nil {
		return Manifest{}, err
	}
	defer unlock()
	id, err := s.current(name)
	if err != nil {
		return Manifest{}, err
	}
	return s.manifest(id)
}

// uses maps the ids of images to the kids that use them.
func (s *Store) uses() (map[string][]string, error) {
	files, err := filepath.Glob(filepath.Join(s.kids, "*", useName))
	if err != nil {
		return nil, err
	}
	out := map[string][]string{}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // destroyed by now
		}
		if err != nil {
			return nil, fmt.Errorf("looking which kids use which images: %w", err)
		}
		id := strings.TrimSpace(string(raw))
		out[id] = append(out[id], filepath.Base(filepath.Dir(file)))
	}
	return out, nil
}

// Use notes in kidDir, the kid's directory below the one that Open was given, that the kid uses the image, and returns
// its root filesystem. The image stays for as long as kidDir does.
func (s *Store) Use(name, kidDir string) (rootfs string, m Manifest, err error) {
	unlock, err := s.lock(unix.LOCK_SH)
	if err != nil {
		return "", m, err
	}
	defer unlock()
	id, err := s.current(name)
	if err != nil {
		return "", m, err
	}
	if m, err = s.manifest(id); err != nil {
		return "", m, err
	}
	if err := os.WriteFile(filepath.Join(kidDir, useName), []byte(id+"\n"), 0o600); err != nil {
		return "", m, fmt.Errorf("noting that a kid uses image %s: %w", name, err)
	}
	return s.path("content", id, rootfsName), m, nil
}

// Used returns the manifest of the image that the kid with that directory uses; ErrUnknown where it uses none.
func (s *Store) Used(kidDir string) (Manifest, error) {
	raw, err := os.ReadFile(filepath.Join(kidDir, useName))
	if errors.Is(err, fs.ErrNotExist) {
		return Manifest{}, ErrUnknown
	}
	if err != nil {
		return Manifest{}, err
	}
	return s.manifest(filepath.Base(strings.TrimSpace(string(raw))))
}
