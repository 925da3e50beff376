// Package once remembers which requests were carried out under an Idempotency-Key, so that a client which lost the
// answer can repeat its request and gets the same answer instead of a second effect.
//
// It promises that of two requests with one key one is carried out; that a key means one request for as long as it
// is kept; and that this outlives the process, until the machine boots again. Where it does not know what became of
// a request, because the process died over it, it says so and never guesses.
package once

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"tagout/internal/atomicfile"
	"tagout/internal/bootclock"
)

// Keep is how long a key means one request, by the boot clock.
const Keep = 24 * time.Hour

// Bounds of what is remembered.
const (
	MaxKey    = 255      // bytes of a key
	MaxBody   = 32 << 10 // bytes of an answer that are kept
	maxCaller = 512      // keys of one caller
	maxAll    = 2048     // keys of all callers together
)

// Why Begin carries nothing out.
var (
	ErrOther   = errors.New("the key was used for another request")
	ErrBusy    = errors.New("the request with this key is still under way")
	ErrUnknown = errors.New("what became of the request with this key is not known: the daemon ended over it")
	ErrFull    = errors.New("too many keys are remembered")
	ErrKey     = errors.New("a key is 1 to 255 printable ASCII characters")
)

// Answer is what a request got.
type Answer struct {
	Status int               `json:"status"`
	Header map[string]string `json:"header,omitempty"`
	Body   []byte            `json:"body,omitempty"`
	Lost   bool              `json:"lost,omitempty"` // the body was longer than MaxBody and is not kept
}

// Config is a store's configuration.
type Config struct {
	Dir  string               // the store's own; on a file system that a boot empties
	Wait time.Duration        // how long a repeat waits for the request that is under way
	Now  func() time.Duration // CLOCK_BOOTTIME; nil: the real one
}

// Store remembers keys. Safe for concurrent use.
type Store struct {
	cfg Config

	mu      sync.Mutex
	entries map[string]*entry // by id; guarded by mu
}

// entry is one key. Its fields are guarded by Store.mu.
type entry struct {
	caller string
	print  string
	began  time.Duration
	busy   chan struct{} // closed when the request is over; nil where it is, or where a predecessor died over it
	done   bool
}

// file is an entry's form on disk.
type file struct {
	Version int           `json:"version"`
	Caller  string        `json:"caller"`
	Print   string        `json:"print"`
	Began   time.Duration `json:"began_ns"` // CLOCK_BOOTTIME
	Answer  *Answer       `json:"answer,omitempty"`
}

const fileVersion = 1

// Open reads what a predecessor left. A file that cannot be understood stands for a request of which nothing is known.
func Open(cfg Config) (*Store, error) {
	if cfg.Now == nil {
		cfg.Now = bootclock.Now
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("preparing to remember idempotency keys: %w", err)
	}
	names, err := os.ReadDir(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("reading the idempotency keys: %w", err)
	}
	s := &Store{cfg: cfg, entries: map[string]*entry{}}
	for _, n := range names {
		id, ok := strings.CutSuffix(n.Name(), ".json")
		if !ok {
			os.Remove(filepath.Join(cfg.Dir, n.Name())) // half-written
			continue
		}
		f, err := s.read(id)
		if err != nil || f.Version != fileVersion {
			s.entries[id] = &entry{began: cfg.Now()}
			continue
		}
		s.entries[id] = &entry{caller: f.Caller, print: f.Print, began: f.Began, done: f.Answer != nil}
	}
	return s, nil
}

// Print is the fingerprint of a request: what has to be equal for a repeat to be one.
func Print(parts ...[]byte) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:", len(p))
		h.Write(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Ticket is the right to carry a request out. Exactly one of Keep and Forget must be called.
type Ticket struct {
	// ID stands for caller and key, for whoever must find again what the request made.
	ID string
	// Resumed says that a predecessor died while it carried the request out.
	Resumed bool

	s *Store
	e *entry
}

// Begin asks to carry out the caller's request with that key. It returns a ticket, or the answer that the request
// got before, or why there is neither: one of the errors above, or what the disk said. resume says that the request
// can find out by itself what a predecessor that died made of it.
func (s *Store) Begin(ctx context.Context, caller, key, print string, resume bool) (*Ticket, *Answer, error) {
	if !validKey(key) {
		return nil, nil, ErrKey
	}
	id := Print([]byte(caller), []byte(key))
	limit, cancel := context.WithTimeout(ctx, s.cfg.Wait)
	defer cancel()
	for {
		t, busy, err := s.claim(id, caller, print, resume)
		switch {
		case err != nil || t != nil:
			return t, nil, err
		case busy == nil:
			a, err := s.answer(id)
			return nil, a, err
		}
		select {
		case <-busy:
		case <-limit.Done():
			return nil, nil, ErrBusy
		}
	}
}

func validKey(key string) bool {
	return key != "" && len(key) <= MaxKey && strings.IndexFunc(key, func(r rune) bool { return r < 0x20 || r > 0x7e }) < 0
}

// claim takes the key. Without a ticket and an error there is an answer, or one to come when busy is closed.
func (s *Store) claim(id, caller, print string, resume bool) (t *Ticket, busy <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expire()
	e := s.entries[id]
	switch {
	case e == nil:
	case e.print != "" && e.print != print:
		return nil, nil, ErrOther
	case e.busy != nil:
		return nil, e.busy, nil
	case e.done:
		return nil, nil, nil
	case !resume:
		return nil, nil, ErrUnknown
	}
	if e == nil && s.full(caller) {
		return nil, nil, ErrFull
	}
	t = &Ticket{ID: id, Resumed: e != nil, s: s}
	t.e = &entry{caller: caller, print: print, began: s.cfg.Now(), busy: make(chan struct{})}
	if err := s.write(id, t.e, nil); err != nil {
		return nil, nil, err
	}
	s.entries[id] = t.e
	return t, nil, nil
}

// full says whether the caller may have no further key. Keys are never dropped early: that would break their promise.
func (s *Store) full(caller string) bool {
	n := 0
	for _, e := range s.entries {
		if e.caller == caller {
			n++
		}
	}
	return n >= maxCaller || len(s.entries) >= maxAll
}

// expire forgets the keys whose time is over.
func (s *Store) expire() {
	for id, e := range s.entries {
		if e.busy == nil && s.cfg.Now()-e.began > Keep {
			s.drop(id)
		}
	}
}

func (s *Store) drop(id string) {
	delete(s.entries, id)
	os.Remove(s.path(id)) // it is found expired again otherwise
}

// Keep notes what the request got: whoever repeats it gets the same. An error means that it is not kept; a repeat
// is then told that the outcome is not known.
func (t *Ticket) Keep(a Answer) error {
	if len(a.Body) > MaxBody || a.Lost {
		a.Body, a.Lost = nil, true
	}
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	busy := t.e.busy
	t.e.busy = nil
	defer close(busy)
	err := t.s.write(t.ID, t.e, &a)
	t.e.done = err == nil
	return err
}

// Forget notes that the request had no effect: whoever repeats it tries again.
func (t *Ticket) Forget() {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	close(t.e.busy)
	t.s.drop(t.ID)
}

func (s *Store) answer(id string) (*Answer, error) {
	f, err := s.read(id)
	if err != nil {
		return nil, err
	}
	if f.Answer == nil {
		return nil, ErrUnknown
	}
	return f.Answer, nil
}

func (s *Store) path(id string) string { return filepath.Join(s.cfg.Dir, id+".json") }

func (s *Store) read(id string) (file, error) {
	var f file
	raw, err := os.ReadFile(s.path(id))
	if err == nil {
		err = json.Unmarshal(raw, &f)
	}
	if err != nil {
		return f, fmt.Errorf("reading an idempotency key: %w", err)
	}
	return f, nil
}

func (s *Store) write(id string, e *entry, a *Answer) error {
	raw, err := json.Marshal(file{Version: fileVersion, Caller: e.caller, Print: e.print, Began: e.began, Answer: a})
	if err == nil {
		err = atomicfile.Write(s.path(id), raw, 0o600, -1, -1)
	}
	if err != nil {
		return fmt.Errorf("remembering an idempotency key: %w", err)
	}
	return nil
}
