package daemon

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"sync"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/instance"
	"tagout/internal/session"
)

// completeRecords has records leave out what credd knows, and name the card of their session. credd itself knows what it
// knows.
func (d *Daemon) completeRecords() {
	if d.Name != instance.Credd {
		d.Audit.FollowPrints(d.Inst.PrintsFile(), func(err error) { d.Log.Error("leaving secrets out of records", "error", err) })
	}
	c := cards{documents: session.NewStore(d.Inst.SessionDir()), known: map[string]string{}, missed: map[string]time.Duration{}}
	d.Audit.SetCards(c.of)
}

// config names the box's configuration that the daemon starts with, where it can be read.
func (d *Daemon) config() map[string]string {
	raw, err := os.ReadFile(d.Inst.BoxConfig())
	if err != nil {
		return nil // and so did the daemon, or it would not start
	}
	sum := sha256.Sum256(raw)
	return map[string]string{"config_sha256": hex.EncodeToString(sum[:])}
}

// cards knows the hash of a session's card, which never changes.
type cards struct {
	documents session.Store

	mu     sync.Mutex
	known  map[string]string        // by session; guarded by mu
	missed map[string]time.Duration // when a kid had no document, CLOCK_BOOTTIME; guarded by mu
}

const (
	maxCards  = 4096
	missAgain = time.Second
)

// of returns the hash for a session, or for the session that a kid has now where the record names none; "" where there is
// no such session. It reads the session's document the first time.
func (c *cards) of(id, kid string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if hash := c.known[id]; hash != "" && id != "" {
		return hash
	}
	if kid == "" || bootclock.Now()-c.missed[kid] < missAgain && c.missed[kid] != 0 {
		return ""
	}
	s, err := c.documents.Get(kid)
	if err != nil || id != "" && s.ID != id {
		if len(c.missed) >= maxCards {
			clear(c.missed)
		}
		c.missed[kid] = bootclock.Now()
		return ""
	}
	if len(c.known) >= maxCards {
		clear(c.known)
	}
	c.known[s.ID] = s.CardHash
	delete(c.missed, kid)
	return s.CardHash
}
