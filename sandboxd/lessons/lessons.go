// Package lessons keeps what was learned from kids: one Markdown note for each, in a directory of sandboxd's own.
//
// It promises that a note is there whole or not at all, also after a kill; that none is overwritten; that a session has
// one at most, so that who is not sure whether a note was kept can keep it again; that what stands in a note cannot
// leave its place there, steer a terminal or name a file; and that notes, which AI agents write, have bounds in size and
// number. Secrets are taken out as they are from audit records. It does not promise that a note is true.
package lessons

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/oklog/ulid/v2"
	"golang.org/x/sys/unix"

	"tagout/internal/atomicfile"
	"tagout/internal/wire"
)

// Dir is where notes lie, below the instance's state directory.
const Dir = "learned/kids"

// Bounds.
const (
	MaxNotes  = 1000
	maxFile   = 128 << 10 // bytes of a note; the longest that is written is shorter
	maxSame   = 100       // notes of one day and purpose
	maxDenied = 50
	maxLogs   = 16 << 20 // bytes of each audit log that are searched for what a kid was refused
	maxField  = 1024     // bytes of each field
	maxPlace  = 280      // and of each place that a kid was refused
)

var (
	// ErrFull is what Keep wraps where there are as many notes as may be.
	ErrFull = errors.New("no more lessons are kept")
	// ErrInvalid is what Keep wraps where there is nothing to keep, or too much of it.
	ErrInvalid = errors.New("not a lesson")
	// ErrNotFound is what Get returns.
	ErrNotFound = errors.New("there is no such lesson")
)

var nameRE = regexp.MustCompile(`^[0-9]{4}-[0-9]{2}-[0-9]{2}-[a-z0-9-]{1,60}\.md$`)

// Store keeps the notes of one instance. Safe for concurrent use; there is one of each directory.
type Store struct {
	path string
	logs string // directory of the audit logs; "": none
	dir  *os.Root

	mu sync.Mutex // one writer

	fault func(step string) error // for tests: after each step of writing
}

// Open makes the directory below state (inst.StateDir()), which nobody but root reaches, and removes what a kill left
// half-written. logs is inst.AuditDir().
func Open(state, logs string) (*Store, error) {
	dir, err := openDir(state)
	if err != nil {
		return nil, fmt.Errorf("opening the lessons in %s/%s: %w", state, Dir, err)
	}
	s := &Store{path: state + "/" + Dir, logs: logs, dir: dir}
	entries, err := s.entries()
	for _, e := range entries {
		if err == nil && strings.HasPrefix(e.Name(), newPrefix) {
			err = dir.Remove(e.Name())
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening the lessons in %s: %w", s.path, err), dir.Close())
	}
	return s, nil
}

// openDir makes the directories and follows no link to them.
func openDir(state string) (*os.Root, error) {
	dir, err := os.OpenRoot(state)
	if err != nil {
		return nil, err
	}
	for name := range strings.SplitSeq(Dir, "/") {
		next, err := openNext(dir, name)
		dir.Close() // only a handle
		if err != nil {
			return nil, err
		}
		dir = next
	}
	return dir, nil
}

func openNext(dir *os.Root, name string) (*os.Root, error) {
	if err := dir.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	info, err := dir.Lstat(name)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%s is no directory: move it away", name)
	}
	return dir.OpenRoot(name)
}

func (s *Store) entries() ([]fs.DirEntry, error) { return fs.ReadDir(s.dir.FS(), ".") }

// newPrefix begins the names of files that are being written.
const newPrefix = ".new-"

// Keep keeps l as a note and returns its name. What the kid was refused is looked up; secrets are values that must not
// be in it. Where the session has a note already, that one stays as it is, and its name is returned.
func (s *Store) Keep(l wire.Lesson, secrets []string) (name string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.fill(&l, secrets); err != nil {
		return "", err
	}
	all, unread, err := s.list()
	if err != nil {
		return "", err
	}
	if i := slices.IndexFunc(all, func(other wire.Lesson) bool { return other.Session == l.Session }); i >= 0 {
		return all[i].Name, nil
	}
	if len(all)+unread >= MaxNotes {
		return "", fmt.Errorf("%w: there are %d: remove some of the files in %s", ErrFull, len(all)+unread, s.path)
	}
	return s.write(&l)
}

// write makes the file: first under a name that nobody reads, then, when all of it is on disk, under its own.
func (s *Store) write(l *wire.Lesson) (string, error) {
	tmp := newPrefix + ulid.Make().String()
	f, err := s.dir.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", fmt.Errorf("keeping a lesson: %w", err)
	}
	defer s.dir.Remove(tmp) // after a kill, Open does
	_, err = io.WriteString(f, render(l))
	if err = errors.Join(err, s.failed("written"), f.Sync(), f.Close()); err != nil {
		return "", fmt.Errorf("keeping a lesson: %w", err)
	}
	for n := 1; n <= maxSame; n++ {
		name := fileName(l, n)
		err := s.dir.Link(tmp, name)
		if errors.Is(err, fs.ErrExist) {
			continue // never overwritten
		}
		if err = errors.Join(err, s.failed("linked")); err == nil {
			err = atomicfile.SyncDir(s.path)
		}
		if err != nil {
			return "", fmt.Errorf("keeping a lesson: %w", err)
		}
		return name, nil
	}
	return "", fmt.Errorf("%w: there are %d of this day and purpose in %s", ErrFull, maxSame, s.path)
}

func (s *Store) failed(step string) error {
	if s.fault == nil {
		return nil
	}
	return s.fault(step)
}

// List returns the notes in which all the words occur, however they are written, the newest first, with the first line
// of each text.
func (s *Store) List(words []string) ([]wire.Lesson, error) {
	all, _, err := s.list(words...)
	if err != nil {
		return nil, err
	}
	for i := range all {
		all[i].Text, _, _ = strings.Cut(all[i].Text, "\n")
	}
	slices.SortFunc(all, func(a, b wire.Lesson) int {
		return cmp.Or(b.Destroyed.Compare(a.Destroyed), cmp.Compare(b.Name, a.Name))
	})
	return all, nil
}

// list returns the notes that hold all the words, and how many files are no notes.
func (s *Store) list(words ...string) (notes []wire.Lesson, unread int, err error) {
	entries, err := s.entries()
	if err != nil {
		return nil, 0, fmt.Errorf("listing the lessons: %w", err)
	}
	for _, e := range entries {
		if !nameRE.MatchString(e.Name()) {
			continue
		}
		raw, err := s.read(e.Name())
		if err != nil {
			unread++
			continue
		}
		l, err := parse(raw)
		if err != nil {
			unread++
			continue
		}
		if l.Name = e.Name(); holds(raw, words) {
			notes = append(notes, l)
		}
	}
	return notes, unread, nil
}

func holds(raw string, words []string) bool {
	raw = strings.ToLower(raw)
	return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(raw, strings.ToLower(w)) })
}

// Get returns one note, whole. The error is ErrNotFound where there is none of the name.
func (s *Store) Get(name string) (wire.Lesson, error) {
	if !nameRE.MatchString(name) {
		return wire.Lesson{}, ErrNotFound
	}
	raw, err := s.read(name)
	if errors.Is(err, fs.ErrNotExist) {
		return wire.Lesson{}, ErrNotFound
	}
	if err != nil {
		return wire.Lesson{}, fmt.Errorf("reading lesson %s: %w", name, err)
	}
	l, err := parse(raw)
	if err != nil {
		return wire.Lesson{}, fmt.Errorf("reading lesson %s: %w", name, err)
	}
	l.Name = name
	return l, nil
}

func (s *Store) read(name string) (string, error) {
	if info, err := s.dir.Lstat(name); err != nil || !info.Mode().IsRegular() {
		return "", cmp.Or(err, errNoNote)
	}
	f, err := s.dir.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close() // only read
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || info.Size() > maxFile) {
		err = errNoNote
	}
	if err != nil {
		return "", err
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxFile))
	return string(raw), err
}
