package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Store is the directory of session documents, one JSON file a session named after its kid.
type Store struct{ dir string }

// NewStore returns the store in dir, which must exist.
func NewStore(dir string) Store { return Store{dir: dir} }

func (st Store) path(kid string) string { return filepath.Join(st.dir, kid+".json") }

// Put writes the document whole or not at all, readable by the instance's group gid.
func (st Store) Put(s *Session, gid int) error {
	if err := s.Check(); err != nil {
		return fmt.Errorf("storing session: %w", err)
	}
	raw, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("storing session %s: %w", s.ID, err)
	}
	tmp, err := os.CreateTemp(st.dir, newPrefix+"*")
	if err != nil {
		return fmt.Errorf("storing session %s: %w", s.ID, err)
	}
	defer os.Remove(tmp.Name()) // gone after the rename
	_, err = tmp.Write(append(raw, '\n'))
	err = errors.Join(err, tmp.Chown(-1, gid), tmp.Chmod(0o640), tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), st.path(s.Kid))
	}
	if err != nil {
		return fmt.Errorf("storing session %s: %w", s.ID, err)
	}
	return nil
}

// newPrefix begins the name of a document that is being written.
const newPrefix = ".new-"

// Sweep removes the documents that a process was killed over while it wrote them. Call it where nobody else puts.
func (st Store) Sweep() error {
	old, err := filepath.Glob(filepath.Join(st.dir, newPrefix+"*"))
	for _, path := range old {
		err = errors.Join(err, os.Remove(path))
	}
	if err != nil {
		return fmt.Errorf("removing half-written sessions: %w", err)
	}
	return nil
}

// Delete removes the kid's document; deleting what is not there is not an error.
func (st Store) Delete(kid string) error {
	if err := os.Remove(st.path(kid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("deleting session of kid %s: %w", kid, err)
	}
	return nil
}

// Get reads one kid's document; errors.Is(err, fs.ErrNotExist) where there is none.
func (st Store) Get(kid string) (*Session, error) {
	raw, err := os.ReadFile(st.path(kid))
	if err != nil {
		return nil, fmt.Errorf("reading session of kid %s: %w", kid, err)
	}
	var s Session
	if err := json.Unmarshal(raw, &s); err != nil {
		return nil, fmt.Errorf("reading session of kid %s: %w", kid, err)
	}
	if err := s.Check(); err != nil {
		return nil, err
	}
	return &s, nil
}

// Load reads every document. What cannot be read is left out and joined into err: the caller goes on with
// the sessions that it got, and the rest stay denied.
func (st Store) Load() ([]*Session, error) {
	entries, err := os.ReadDir(st.dir)
	if err != nil {
		return nil, fmt.Errorf("reading sessions: %w", err)
	}
	var out []*Session
	var errs []error
	for _, e := range entries {
		kid, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || strings.HasPrefix(kid, ".") {
			continue
		}
		s, err := st.Get(kid)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, s)
	}
	return out, errors.Join(errs...)
}
