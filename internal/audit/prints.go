package audit

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// What credd alone knows must not be in the records of the others either, and telling them would spread it. So credd
// writes down what recognises a value and does not give it away: for each form of it (see forms) its length, twenty bits
// of a keyed hash of its first six bytes, which say where to look, and a keyed MAC of the whole, which says whether it
// stands there. Who reads the file can try guesses, as who asks credd can; who has it learns no value.

// print recognises one form of one value.
type print struct {
	Length int    `json:"n"`
	Head   uint32 `json:"h"`
	MAC    []byte `json:"m"`
}

// printsFile is what lies on disk.
type printsFile struct {
	Version int     `json:"version"`
	Key     []byte  `json:"key"`
	Prints  []print `json:"prints"`
}

const (
	printsVersion = 1
	headBits      = 20
	macLen        = 16
	maxPrints     = 1 << 20
)

// Prints writes the file. Safe for concurrent use.
type Prints struct {
	save   func([]byte) error
	failed func(error)

	mu    sync.Mutex
	file  printsFile        // guarded by mu
	known map[[32]byte]bool // values that are in it, by their MAC; guarded by mu
	due   bool              // it will be written soon; guarded by mu
}

// writeSoon is how long the file waits for more values: a vault has many.
const writeSoon = 3 * time.Millisecond

// NewPrints writes the file anew, empty. save writes it, whole or not at all, by giving another file its name; failed is
// told when it cannot be written later.
func NewPrints(save func([]byte) error, failed func(error)) (*Prints, error) {
	p := &Prints{save: save, failed: failed, file: printsFile{Version: printsVersion, Key: make([]byte, 32), Prints: []print{}}, known: map[[32]byte]bool{}}
	rand.Read(p.file.Key) // never fails
	return p, p.write()
}

// Add makes every logger that follows the file redact value, some milliseconds later.
func (p *Prints) Add(value string) {
	if len(value) < minSecret {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	id := [32]byte(mac(p.file.Key, value))
	if p.known[id] {
		return
	}
	p.known[id] = true
	for _, f := range forms(value) {
		p.file.Prints = append(p.file.Prints, print{Length: len(f), Head: head(multiplier(p.file.Key), f), MAC: mac(p.file.Key, f)[:macLen]})
	}
	p.writeLater()
}

// Remove has the value recognised no more: it is worth nothing any more.
func (p *Prints) Remove(value string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := [32]byte(mac(p.file.Key, value))
	if !p.known[id] {
		return
	}
	delete(p.known, id)
	gone := map[string]bool{}
	for _, f := range forms(value) {
		gone[string(mac(p.file.Key, f)[:macLen])] = true
	}
	p.file.Prints = slices.DeleteFunc(p.file.Prints, func(one print) bool { return gone[string(one.MAC)] })
	p.writeLater()
}

// writeLater is called with mu held.
func (p *Prints) writeLater() {
	if p.due {
		return
	}
	p.due = true
	time.AfterFunc(writeSoon, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.due = false
		if err := p.write(); err != nil {
			p.failed(err)
		}
	})
}

// write is called with mu held, or before anybody else has p.
func (p *Prints) write() error {
	raw, err := json.Marshal(&p.file)
	if err == nil {
		err = p.save(raw)
	}
	if err != nil {
		return fmt.Errorf("telling the other daemons what to redact: %w", err)
	}
	return nil
}

func mac(key []byte, text string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(text))
	return h.Sum(nil)
}

func multiplier(key []byte) uint64 { return binary.LittleEndian.Uint64(key) | 1 }

// head hashes the first minSecret bytes of a text that has as many.
func head(by uint64, s string) uint32 {
	x := uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 | uint64(s[4])<<32 | uint64(s[5])<<40
	x = (x + 1) * by
	return uint32((x ^ x>>29) * by >> (64 - headBits)) // that many bits
}

// prints is the file as it is used. It never changes.
type prints struct {
	key    []byte
	by     uint64
	maybe  [1 << headBits / 64]uint64 // heads that there are
	byHead map[uint32][]print
}

func readPrints(path string) (*prints, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var f printsFile
	if err := json.Unmarshal(raw, &f); err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	if f.Version != printsVersion || len(f.Key) != 32 || len(f.Prints) > maxPrints {
		return nil, fmt.Errorf("reading %s: it is none of this version", path)
	}
	p := &prints{key: f.Key, by: multiplier(f.Key), byHead: map[uint32][]print{}}
	for _, one := range f.Prints {
		if one.Length < minSecret || one.Head >= 1<<headBits || len(one.MAC) != macLen {
			return nil, fmt.Errorf("reading %s: a line of it makes no sense", path)
		}
		p.maybe[one.Head/64] |= 1 << (one.Head % 64)
		p.byHead[one.Head] = append(p.byHead[one.Head], one)
	}
	return p, nil
}

// text returns s without the values.
func (p *prints) text(s string) string {
	var out *strings.Builder
	done := 0
	for i := 0; i+minSecret <= len(s); i++ {
		h := head(p.by, s[i:])
		if p.maybe[h/64]&(1<<(h%64)) == 0 {
			continue
		}
		n := p.match(h, s[i:])
		if n == 0 {
			continue
		}
		if out == nil {
			out = &strings.Builder{}
		}
		out.WriteString(s[done:i])
		out.WriteString(Redacted)
		i += n - 1
		done = i + 1
	}
	if out == nil {
		return s
	}
	out.WriteString(s[done:])
	return out.String()
}

// match is the length of the longest form that s begins with, 0 of none.
func (p *prints) match(h uint32, s string) (longest int) {
	for _, one := range p.byHead[h] {
		if one.Length > longest && one.Length <= len(s) && hmac.Equal(mac(p.key, s[:one.Length])[:macLen], one.MAC) {
			longest = one.Length
		}
	}
	return longest
}

// FollowPrints makes the logger redact what the file at path recognises, now and whenever it is written anew, until the
// logger is closed. A file that cannot be read leaves in force what was read before; failed is told of it, and must not
// block.
func (l *Logger) FollowPrints(path string, failed func(error)) {
	load := func() {
		p, err := readPrints(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return // credd has not started yet
		case err != nil:
			failed(err)
			return
		}
		l.redact.prints.Store(p)
	}
	watch, err := watchDir(filepath.Dir(path))
	load()
	if err != nil {
		failed(fmt.Errorf("watching for what to redact: what credd learns from now on is not known here: %w", err))
		return
	}
	go func() {
		<-l.done
		watch.Close() // only read
	}()
	go func() {
		buf := make([]byte, 4096)
		for {
			if _, err := watch.Read(buf); err != nil {
				return // closed
			}
			load()
		}
	}()
}

// watchDir tells by something to read when a file of a directory was given its name.
func watchDir(dir string) (*os.File, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_MOVED_TO); err != nil {
		unix.Close(fd) // already failing
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return os.NewFile(uintptr(fd), "inotify"), nil
}
