package authority

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"

	"tagout/internal/reason"
)

// remember is for how long an order that has expired is remembered all the same: a wall clock that is set back by
// less brings none of them to life.
const remember = 48 * time.Hour

// floorFile holds the latest end of an order that was forgotten: orders that ended before are never accepted, so
// that forgetting one cannot make it good again, whatever happens to the clock.
const floorFile = "floor"

// Used remembers which orders were used: in memory, and on disk as one small file each, named after the order. No
// method but Keep and Tidy waits for the disk. Safe for concurrent use.
type Used struct {
	dir string

	mu     sync.Mutex
	ids    map[string]time.Time // id -> when the order expires
	unkept map[string]time.Time // of these, those that the disk does not have
	floor  time.Time
}

// OpenUsed reads the orders that were used out of dir, which it makes where it is missing. What cannot be read
// counts as used. An error says that the directory cannot be read: then every Check refuses.
func OpenUsed(dir string, now time.Time) (*Used, error) {
	u := &Used{dir: dir, ids: map[string]time.Time{}, unkept: map[string]time.Time{}}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return broken(dir), err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return broken(dir), err
	}
	if err := u.readFloor(now); err != nil {
		return broken(dir), err
	}
	for _, e := range entries {
		if id, err := ulid.ParseStrict(e.Name()); err != nil || id.String() != e.Name() {
			continue
		}
		u.ids[e.Name()] = u.readExpiry(e.Name(), now)
	}
	u.forget(now)
	return u, nil
}

// broken remembers nothing and accepts nothing.
func broken(dir string) *Used { return &Used{dir: dir} }

func (u *Used) readFloor(now time.Time) error {
	raw, err := os.ReadFile(filepath.Join(u.dir, floorFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if u.floor, err = time.Parse(time.RFC3339, strings.TrimSpace(string(raw))); err != nil {
		u.floor = now.Add(MaxLife) // what was forgotten cannot end later, and from then on all is well again
	}
	return nil
}

// readExpiry returns when the order of a file expires; where the file does not say, the latest that is possible.
func (u *Used) readExpiry(id string, now time.Time) time.Time {
	raw, err := os.ReadFile(filepath.Join(u.dir, id))
	if err == nil {
		if at, err := time.Parse(time.RFC3339, strings.TrimSpace(string(raw))); err == nil {
			return at
		}
	}
	return now.Add(MaxLife)
}

// Take marks an order as used, in memory at once. It is a *Refusal where the order was used before. The order is
// safe from being used again after a restart once Keep has returned nil.
func (u *Used) Take(o Order, now time.Time) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ids == nil {
		return refuse(reason.OrderNotKept, "it is not known which orders were used: %s cannot be read: look at it, then restart killswitchd", u.dir)
	}
	if _, ok := u.ids[o.ID]; ok {
		return refuse(reason.OrderReplayed, "order %s was used before: an order is carried out once, sign a new one", o.ID)
	}
	if !o.Expires.After(u.floor) {
		return refuse(reason.OrderExpired, "orders that end before %s are no longer told apart from used ones: the clock of this box, or of the signer's, is behind", u.floor.UTC().Format(time.RFC3339))
	}
	u.ids[o.ID], u.unkept[o.ID] = o.Expires, o.Expires
	return nil
}

// Keep puts on disk what was taken. It may hang as long as the disk does.
func (u *Used) Keep(id string) error {
	u.mu.Lock()
	at, ok := u.unkept[id]
	u.mu.Unlock()
	if !ok {
		return nil
	}
	err := writeSynced(filepath.Join(u.dir, id), at)
	if err == nil {
		err = syncDir(u.dir)
	}
	if err != nil {
		return fmt.Errorf("noting that order %s was used: %w", id, err)
	}
	u.mu.Lock()
	delete(u.unkept, id)
	u.mu.Unlock()
	return nil
}

// Tidy tries again what the disk has refused, and forgets what is long over. It may hang as long as the disk does,
// and nothing else waits for it meanwhile. One call at a time.
func (u *Used) Tidy(now time.Time) {
	u.mu.Lock()
	var again []string
	for id := range u.unkept {
		again = append(again, id)
	}
	u.mu.Unlock()
	for _, id := range again {
		u.Keep(id) // tried again at the next call
	}
	u.forget(now)
}

// forget removes what is long over. Nothing is forgotten until the disk has the floor.
func (u *Used) forget(now time.Time) {
	old, floor := u.over(now)
	if len(old) == 0 {
		return
	}
	if err := u.writeFloor(floor); err != nil {
		return // tried again at the next call
	}
	u.mu.Lock()
	u.floor = floor
	u.mu.Unlock()
	for _, id := range old {
		if err := os.Remove(filepath.Join(u.dir, id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		u.mu.Lock()
		delete(u.ids, id)
		u.mu.Unlock()
	}
}

// over lists what can be forgotten, and the floor that this needs.
func (u *Used) over(now time.Time) (old []string, floor time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	floor = u.floor
	for id, at := range u.ids {
		if _, unkept := u.unkept[id]; unkept || now.Sub(at) <= remember {
			continue
		}
		old = append(old, id)
		if at.After(floor) {
			floor = at
		}
	}
	return old, floor
}

func (u *Used) writeFloor(floor time.Time) error {
	tmp := filepath.Join(u.dir, ".new-"+floorFile)
	if err := writeSynced(tmp, floor); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(u.dir, floorFile)); err != nil {
		return err
	}
	return syncDir(u.dir)
}

func writeSynced(path string, at time.Time) error {
	w, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o640)
	if err != nil {
		return err
	}
	_, err = w.WriteString(at.UTC().Format(time.RFC3339) + "\n")
	return errors.Join(err, w.Sync(), w.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
