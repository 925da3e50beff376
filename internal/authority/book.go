package authority

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"tagout/internal/reason"
)

// maxList bounds the list's file.
const maxList = 1 << 20

// Encode returns the list as Book reads it.
func (l List) Encode() ([]byte, error) {
	raw, err := json.MarshalIndent(l, "", "  ")
	return append(raw, '\n'), err
}

// bookWait is how long a question may wait for the disk before it is answered with what was read last.
const bookWait = 50 * time.Millisecond

// Book is the list in a file, read again when the file has changed. Safe for concurrent use.
type Book struct {
	path  string
	owner uint32

	mu   sync.Mutex
	look chan struct{} // closed when the look under way ends; nil: there is none
	seen stamp
	list List
	err  error
}

// stamp tells one state of a file from another.
type stamp struct {
	dev, ino    uint64
	size        int64
	mtime, ctim syscall.Timespec
}

// NewBook returns the list at path, which counts only while the file belongs to the user owner and nobody else can
// write it.
func NewBook(path string, owner int) *Book {
	b := &Book{path: path, owner: uint32(owner), err: refuse(reason.OrderKey, "the authority list was not read yet")}
	b.List() // what is wrong is said to whoever asks
	return b
}

// List returns the list as it is now. On an error, which is a *Refusal, nobody is known. A disk that hangs does
// not hold the caller up: then the list is what it was before.
func (b *Book) List() (List, error) {
	b.mu.Lock()
	if b.look == nil {
		b.look = make(chan struct{})
		go b.refresh(b.look)
	}
	look := b.look
	b.mu.Unlock()
	limit := time.NewTimer(bookWait)
	defer limit.Stop()
	select {
	case <-look:
	case <-limit.C:
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.list, b.err
}

// GrantorFlag returns the flag of `tagout grant` by which somebody may open something here: with a key where one
// counts for that, or where the list cannot be read and may hold some; otherwise by name.
func (b *Book) GrantorFlag(now time.Time) string {
	if list, err := b.List(); err == nil && len(list.Signers(RoleGrant, now)) == 0 {
		return "--by NAME"
	}
	return "--key FILE"
}

func (b *Book) refresh(done chan struct{}) {
	now, err := b.stamp()
	var l List
	b.mu.Lock()
	same := err == nil && now == b.seen
	b.mu.Unlock()
	if err == nil && !same {
		l, err = b.read()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case same:
	case err != nil:
		b.seen, b.list, b.err = stamp{}, List{}, refuse(reason.OrderKey, "the authority list %s cannot be read, so no key counts: %v: run `tagout setup` again", b.path, err)
	default:
		b.seen, b.list, b.err = now, l, nil
	}
	b.look = nil
	close(done)
}

func (b *Book) stamp() (stamp, error) {
	info, err := os.Stat(b.path)
	if err != nil {
		return stamp{}, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok || !info.Mode().IsRegular():
		return stamp{}, errors.New("it is no file")
	case st.Uid != b.owner || info.Mode().Perm()&0o022 != 0:
		return stamp{}, fmt.Errorf("it belongs to uid %d with mode %v, and only uid %d may write it", st.Uid, info.Mode().Perm(), b.owner)
	case info.Size() > maxList:
		return stamp{}, fmt.Errorf("it is longer than %d bytes", maxList)
	}
	return stamp{uint64(st.Dev), st.Ino, st.Size, st.Mtim, st.Ctim}, nil
}

func (b *Book) read() (List, error) {
	raw, err := os.ReadFile(b.path)
	if err != nil {
		return List{}, err
	}
	var l List
	err = json.Unmarshal(raw, &l)
	return l, err
}
