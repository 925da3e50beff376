package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/oklog/ulid/v2"
	"golang.org/x/sys/unix"

	"tagout/internal/atomicfile"
	"tagout/internal/card"
	"tagout/sandboxd/image/unpack"
)

// Source is where an image comes from.
type Source interface {
	// Unpack applies the image's layers and fills in the manifest's Kind, Source, Digest, SourceAt and Env. scratch
	// is a directory for whatever it needs meanwhile.
	Unpack(ctx context.Context, u *unpack.Unpacker, scratch string, m *Manifest) error
}

// Add unpacks an image and gives it the name. The image that had the name before stays until no kid uses it; gone is what a
// sweep removed meanwhile. On an error, and after a kill, nothing stays.
func (s *Store) Add(ctx context.Context, name string, src Source, limits unpack.Limits) (m Manifest, gone []Manifest, err error) {
	if !card.NamesImage(name) {
		return m, nil, fmt.Errorf("%w: %q: use 1 to 63 lower-case letters, digits, dots, dashes and underscores, a letter first, and not %s", ErrName, name, card.HostImage)
	}
	w, err := s.begin()
	if err != nil {
		return m, nil, err
	}
	defer func() { gone, err = w.gone, errors.Join(err, w.end()) }()
	m, err = s.fill(ctx, w, name, src, limits)
	if err == nil {
		err = s.commit(w, &m)
	}
	if err != nil {
		err = fmt.Errorf("adding image %s: %w", name, err)
	}
	return m, nil, err
}

// fill makes the image in w.
func (s *Store) fill(ctx context.Context, w *work, name string, src Source, limits unpack.Limits) (Manifest, error) {
	m := Manifest{Version: manifestVersion, ID: filepath.Base(w.dir), Name: name, Created: time.Now().UTC(), Env: map[string]string{}}
	u, err := unpack.New(w.rootfs(), limits)
	if err != nil {
		return m, err
	}
	defer u.Close() // only read
	if err := src.Unpack(ctx, u, filepath.Join(w.dir, "scratch"), &m); err != nil {
		return m, err
	}
	r := u.Report()
	m.Size, m.Files, m.Skipped = r.Bytes, r.Files, r.Skipped
	if r.Files == 0 {
		return m, errors.New("it has no files")
	}
	return m, fit(u)
}

// work is an image that is being made. Its directory is locked by this process: whoever finds it unlocked may remove it.
type work struct {
	dir  string
	hold *os.File
	gone []Manifest // what sweeps removed meanwhile
}

func (w *work) rootfs() string { return filepath.Join(w.dir, rootfsName) }

// begin makes a directory below tmp.
func (s *Store) begin() (*work, error) {
	unlock, err := s.lock(unix.LOCK_EX) // a sweep must not come between the next two steps
	if err != nil {
		return nil, err
	}
	defer unlock()
	swept, err := s.sweep()
	if err != nil {
		return nil, err
	}
	dir := s.path("tmp", ulid.Make().String())
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making room for an image: %w", err)
	}
	w := &work{dir: dir, gone: swept.Images}
	w.hold, err = os.Open(dir)
	if err == nil {
		err = errors.Join(flock(w.hold, unix.LOCK_EX), os.Mkdir(w.rootfs(), 0o700), os.Mkdir(filepath.Join(dir, "scratch"), 0o700))
	}
	if err == nil {
		err = os.Chmod(w.rootfs(), 0o755) // the root directory that kids see
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making room for an image: %w", err), w.end())
	}
	return w, nil
}

// end removes what is still there.
func (w *work) end() error {
	err := os.RemoveAll(w.dir)
	if w.hold != nil {
		w.hold.Close() // only read
	}
	return err
}

// commit writes everything to disk, then puts the image in place and gives it its name.
func (s *Store) commit(w *work, m *Manifest) error {
	raw, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	err = errors.Join(os.RemoveAll(filepath.Join(w.dir, "scratch")), os.WriteFile(filepath.Join(w.dir, manifestName), append(raw, '\n'), 0o600))
	if err == nil {
		err = unix.Syncfs(int(w.hold.Fd())) // all files at once
	}
	if err != nil {
		return fmt.Errorf("writing it to disk: %w", err)
	}
	unlock, err := s.lock(unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.Rename(w.dir, s.path("content", m.ID)); err != nil {
		return fmt.Errorf("putting it in place: %w", err)
	}
	if err := atomicfile.SyncDir(s.path("content")); err != nil {
		return err
	}
	if err := atomicfile.WriteSynced(s.path("names", m.Name), []byte(m.ID+"\n"), 0o600, -1, -1); err != nil {
		return fmt.Errorf("giving it its name: %w", err)
	}
	swept, err := s.sweep() // what had the name before
	w.gone = append(w.gone, swept.Images...)
	return err
}
