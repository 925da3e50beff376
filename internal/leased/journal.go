package leased

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/provider"
	"tagout/internal/wire"
)

// The journal is a directory with one sealed file a lease. A handle may be the leased token itself, so nothing of it lies
// there in clear. Files are replaced whole; one lease never waits for another's.

const journalEnd = ".age"

// entry is what a file holds.
type entry struct {
	Leased wire.Leased     `json:"leased"`
	Handle provider.Handle `json:"handle"`
	Noted  bool            `json:"noted"`
}

func (k *Keeper) file(id string) string { return filepath.Join(k.cfg.Dir, id+journalEnd) }

// write puts the lease as it is now into the journal, on disk.
func (k *Keeper) write(l *lease) error {
	l.mu.Lock()
	e := entry{Leased: l.shown, Handle: l.handle, Noted: l.noted}
	l.mu.Unlock()
	raw, err := json.Marshal(e)
	defer clear(raw)
	if err != nil {
		return err
	}
	return k.cfg.Seal(k.file(l.id), raw)
}

// unlink takes the lease out of the journal. What comes back after a power failure is revoked once more.
func (k *Keeper) unlink(l *lease) {
	if err := os.Remove(k.file(l.id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		k.cfg.Log.Error("taking a lease out of the journal", "lease", l.id, "error", err)
	}
}

// Load reads the journal and begins to revoke what an earlier credd has left: its sessions' tokens died with it. It is
// called once, when the vault's identity is there.
func (k *Keeper) Load() error {
	if err := os.Mkdir(k.cfg.Dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("making the journal of leases: %w", err)
	}
	files, err := os.ReadDir(k.cfg.Dir)
	if err != nil {
		return fmt.Errorf("reading the journal of leases: %w", err)
	}
	for _, f := range files {
		if id, ok := strings.CutSuffix(f.Name(), journalEnd); ok && !strings.HasPrefix(id, ".") {
			k.load(id)
			continue
		}
		// A writer was killed before the file had its name: what it was to note was not asked for yet, or is noted in the
		// file as it was before.
		if err := os.Remove(filepath.Join(k.cfg.Dir, f.Name())); err != nil {
			return fmt.Errorf("reading the journal of leases: %w", err)
		}
	}
	return nil
}

func (k *Keeper) load(id string) {
	raw, err := k.cfg.Unseal(k.file(id))
	defer clear(raw)
	var e entry
	if err == nil && (json.Unmarshal(raw, &e) != nil || e.Leased.ID != id) { // the decoder's words may quote a handle
		err = errors.New("it is not an entry")
	}
	if err != nil {
		k.cfg.Log.Error("an entry in the journal of leases cannot be read: what it names may be valid, and is not revoked", "file", k.file(id), "error", err)
		k.cfg.Audit.Log(audit.Record{Event: audit.EventRevokeFailed, Outcome: audit.OutcomeFail,
			Detail: "an entry in the journal of leases cannot be read: " + id, Fields: map[string]string{"lease": id}})
		k.mu.Lock()
		k.bad = append(k.bad, id)
		k.mu.Unlock()
		return
	}
	w := e.Leased
	l := &lease{id: id, want: Want{Secret: w.Secret, Provider: w.Provider, Role: w.Role}, handle: e.Handle, noted: e.Noted, shown: w,
		who: Session{ID: w.Session, Kid: w.Kid, Card: w.Card, Mark: w.Mark}}
	k.redact(l, e.Handle.Token)
	l.over = k.cfg.Boottime() + min(max(w.ValidUntil.Sub(k.cfg.Now()), 0), k.longest(w.Provider))
	if w.State == wire.LeaseRevoked { // it waits to be tidied up
		if t, ok := k.cfg.Issuers[w.Provider].Provider.(provider.Tidier); ok {
			k.spawn(func() { k.tidy(l, t) })
			return
		}
	}
	l.shown.Ended, l.shown.Tries, l.shown.Detail = time.Time{}, 0, "left by an earlier credd"
	k.mu.Lock()
	k.leases[id] = l
	k.mu.Unlock()
	k.revokeSoon(l)
}

// longest is the most that a lease of the provider can live.
func (k *Keeper) longest(name string) time.Duration {
	if is, ok := k.cfg.Issuers[name]; ok {
		return is.MaxLifetime
	}
	return 31 * 24 * time.Hour // the most that the configuration takes
}
