package auditkeep

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"tagout/internal/atomicfile"
	"tagout/internal/bootclock"
)

// mark is what both clocks said when they were last looked at, and by how much the wall clock had been set forward.
type mark struct {
	Wall  time.Time     `json:"wall"`
	Boot  time.Duration `json:"boot_ns"`
	ID    string        `json:"boot_id"`
	Ahead time.Duration `json:"ahead_ns"` // never negative
}

// jump is the least by which a clock that is set, and not just adjusted, goes apart from the boot clock.
const jump = 10 * time.Second

// wall is the time by which records expire: the wall clock less what it was set forward by while the machine ran. A clock
// that jumps by a year removes nothing; one that was wrong before and is right now keeps records longer than it need.
func (k *Keeper) wall() (time.Time, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	file := filepath.Join(k.cfg.State, "audit-clock.json")
	if k.at.Wall.IsZero() {
		raw, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(raw, &k.at)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return time.Time{}, fmt.Errorf("reading when the audit logs were last looked after: %w", err)
		}
	}
	id, err := bootclock.Boot()
	if err != nil {
		return time.Time{}, fmt.Errorf("reading the boot's id: %w", err)
	}
	next := mark{Wall: k.cfg.Now().UTC().Round(0), Boot: bootclock.Now(), ID: id, Ahead: k.at.Ahead}
	if k.at.ID == id {
		if d := next.Wall.Sub(k.at.Wall) - (next.Boot - k.at.Boot); d.Abs() > jump {
			next.Ahead = max(0, next.Ahead+d)
		}
	}
	raw, err := json.Marshal(next)
	if err == nil {
		err = atomicfile.Write(file, raw, 0o600, -1, -1)
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("noting when the audit logs were looked after: %w", err)
	}
	k.at = next
	return next.Wall.Add(-next.Ahead), nil
}
