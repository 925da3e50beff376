package kids

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

const (
	sequenceBlock = 32        // numbers reserved with one write
	sequenceEnd   = 1<<20 - 1 // marks have 20 bits for it
)

// sequence gives out the numbers that become session marks. A number is never given out twice, also across
// a crash: the file holds the first number that nobody may have used. It is kept across reboots, because
// tags that name marks are. Guarded by Manager.mu.
type sequence struct {
	path     string
	next     uint32
	reserved uint32 // first number that is not reserved yet
}

func openSequence(path string) (*sequence, error) {
	s := &sequence{path: path, next: 1, reserved: 1}
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the session counter: %w", err)
	}
	// Without its line end the number may be the beginning of a longer one.
	text, whole := strings.CutSuffix(string(raw), "\n")
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n == 0 || !whole {
		return nil, fmt.Errorf("reading the session counter: %s holds %q: write a line into it with a number that is larger than any session's so far, up to %d", path, raw, sequenceEnd)
	}
	s.next, s.reserved = uint32(n), uint32(n)
	return s, nil
}

// take returns a number that was never returned before.
func (s *sequence) take() (uint32, error) {
	if s.next >= sequenceEnd {
		return 0, fmt.Errorf("all %d session marks of this instance are used up: set it up again with `tagout cleanup` and `tagout setup`", sequenceEnd)
	}
	if s.next >= s.reserved {
		if err := s.reserve(s.next + sequenceBlock); err != nil {
			return 0, fmt.Errorf("reserving session marks: %w", err)
		}
	}
	n := s.next
	s.next++
	return n, nil
}

// pass puts the counter past n, which is in use.
func (s *sequence) pass(n uint32) {
	if n >= s.next {
		s.next = n + 1
	}
}

func (s *sequence) reserve(upTo uint32) error {
	if err := os.MkdirAll(filepath.Dir(s.path), 0o700); err != nil {
		return err
	}
	tmp := s.path + ".new"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, upTo)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp, s.path); err != nil {
		return err
	}
	s.reserved = upTo
	return nil
}
