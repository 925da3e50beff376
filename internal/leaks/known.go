package leaks

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"sync"
)

// mostKnown is how many files are remembered; then it begins anew.
const mostKnown = 4096

// known are the SHA-256 sums of files in which nothing looks like a key.
type known struct {
	mu   sync.Mutex
	sums map[[sha256.Size]byte]struct{}
}

func (k *known) has(sum [sha256.Size]byte) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, ok := k.sums[sum]
	return ok
}

func (k *known) add(sum [sha256.Size]byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.sums == nil || len(k.sums) >= mostKnown {
		k.sums = map[[sha256.Size]byte]struct{}{}
	}
	k.sums[sum] = struct{}{}
}

var errChanged = errors.New("the file was changed while it was read")

// GuardFile is Guard for a file: one that was searched before, whole and in vain, is not searched again. A kid gets the
// same programs over and over.
func (d *Detector) GuardFile(f io.ReadSeeker, pass func(Finding) bool) (io.Reader, error) {
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return nil, fmt.Errorf("looking for keys: %w", err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("looking for keys: %w", err)
	}
	sum := [sha256.Size]byte(h.Sum(nil))
	if d.known.has(sum) {
		return &summed{Reader: f, h: sha256.New(), done: func(now [sha256.Size]byte) error {
			if now != sum {
				return errChanged
			}
			return nil
		}}, nil
	}
	clean := true
	guard := d.Guard(f, func(found Finding) bool {
		clean = false
		return pass != nil && pass(found)
	})
	return &summed{Reader: guard, h: sha256.New(), done: func(now [sha256.Size]byte) error {
		if clean {
			d.known.add(now)
		}
		return nil
	}}, nil
}

// summed says at the end what the sum of all that was read is.
type summed struct {
	io.Reader
	h    hash.Hash
	done func([sha256.Size]byte) error
}

// Read implements io.Reader.
func (s *summed) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	s.h.Write(p[:n])
	if errors.Is(err, io.EOF) {
		if why := s.done([sha256.Size]byte(s.h.Sum(nil))); why != nil {
			err = why
		}
	}
	return n, err
}
