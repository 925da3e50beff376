package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/atomicfile"
)

// Remove takes the name away and removes every image that had it, and whatever else a sweep would; gone is all of these.
// ErrInUse where a kid uses one of them: then nothing changes.
func (s *Store) Remove(name string) (gone []Manifest, err error) {
	unlock, err := s.lock(unix.LOCK_EX)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if _, err := s.current(name); err != nil {
		return nil, err
	}
	images, err := s.list()
	if err != nil {
		return nil, err
	}
	for _, i := range images {
		if i.Name == name && len(i.UsedBy) > 0 {
			return nil, fmt.Errorf("image %s is used by %s: destroy that first: %w", name, strings.Join(i.UsedBy, ", "), ErrInUse)
		}
	}
	if err := os.Remove(s.path("names", name)); err != nil {
		return nil, fmt.Errorf("removing image %s: %w", name, err)
	}
	if err := atomicfile.SyncDir(s.path("names")); err != nil {
		return nil, err
	}
	swept, err := s.sweep()
	return swept.Images, err
}

// Swept says what a sweep removed.
type Swept struct {
	Images    []Manifest `json:"images"`    // that had lost their names, and that no kid uses
	Leftovers int        `json:"leftovers"` // what killed processes left
}

// Sweep removes images that a newer one of the same name replaced, once no kid uses them, and what killed processes left
// half made.
func (s *Store) Sweep() (Swept, error) {
	unlock, err := s.lock(unix.LOCK_EX)
	if err != nil {
		return Swept{}, err
	}
	defer unlock()
	return s.sweep()
}

// sweep is Sweep with the lock held.
func (s *Store) sweep() (Swept, error) {
	out := Swept{Images: []Manifest{}}
	errs := []error{s.sweepNames()}
	images, err := s.list()
	if err != nil {
		return out, err
	}
	for _, i := range images {
		if i.Current || len(i.UsedBy) > 0 || i.Broken != "" {
			continue
		}
		// Out of sight first, so that no half of it is ever taken for an image.
		if err := os.Rename(s.path("content", i.ID), s.path("tmp", i.ID)); err != nil {
			errs = append(errs, fmt.Errorf("removing image %s: %w", i.Name, err))
			continue
		}
		out.Images = append(out.Images, i.Manifest)
		errs = append(errs, os.RemoveAll(s.path("tmp", i.ID)))
	}
	left, err := s.sweepTmp()
	out.Leftovers = left
	return out, errors.Join(append(errs, err)...)
}

// sweepTmp removes what nobody works at any more.
func (s *Store) sweepTmp() (int, error) {
	entries, err := os.ReadDir(s.path("tmp"))
	if err != nil {
		return 0, err
	}
	n, errs := 0, []error{}
	for _, e := range entries {
		dir := s.path("tmp", e.Name())
		f, err := os.Open(dir)
		if err != nil {
			continue // gone by now
		}
		if flock(f, unix.LOCK_EX|unix.LOCK_NB) == nil {
			n++
			errs = append(errs, os.RemoveAll(dir))
		}
		f.Close() // only read
	}
	return n, errors.Join(errs...)
}

// sweepNames removes names that were being written when their writer was killed.
func (s *Store) sweepNames() error {
	old, err := filepath.Glob(s.path("names", ".new-*"))
	for _, file := range old {
		err = errors.Join(err, os.Remove(file))
	}
	return err
}
