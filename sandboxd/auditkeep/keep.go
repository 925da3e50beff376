// Package auditkeep looks after all daemons' audit logs: it gives their checkpoints to witnesses, exports their public
// keys, encrypts closed pieces and removes those whose time is over, and watches the disk. It runs in sandboxd, which alone
// may do so to every log, and never holds up whoever writes one.
package auditkeep

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"filippo.io/age"

	"tagout/internal/atomicfile"
	"tagout/internal/audit"
	"tagout/internal/audit/seal"
	"tagout/internal/audit/verify"
	"tagout/internal/bootclock"
)

// Recorder is sandboxd's own log.
type Recorder interface {
	Log(audit.Record)
	LogDurable(ctx context.Context, r audit.Record) error
}

// Metrics counts what is done. Its methods must be safe for concurrent use.
type Metrics interface {
	AuditFree(bytes, total uint64)
	AuditOldest(daemon string, age time.Duration)
	Witnessed(witness, outcome string)
}

// Kids are what is held up when the disk is nearly full.
type Kids interface {
	Running(ctx context.Context) []string
	Pause(ctx context.Context, name, actor, why string) error
	Stop(ctx context.Context, name, why string) error
}

// Config is a keeper's. All but Recipients and Witnesses is needed.
type Config struct {
	Dir        string // inst.AuditDir()
	State      string // a directory of sandboxd's own
	Retention  time.Duration
	Recipients []string // age
	Witnesses  []Witness
	Space      Space
	Audit      Recorder
	Metrics    Metrics
	Log        *slog.Logger

	Now       func() time.Time // wall clock; nil: the machine's
	SealAfter time.Duration    // how long a closed piece stays in clear for those who follow the log; 0: 10 minutes
}

// Keeper looks after the logs. Make one with New.
type Keeper struct {
	cfg        Config
	recipients []age.Recipient
	lanes      []*lane
	seen       map[string]string // log -> its newest checkpoint that witnesses were given
	full       space

	mu sync.Mutex
	at mark // guarded by mu
}

// New returns a keeper. What is wrong with the configuration is an error: nothing is kept in clear, or from a witness,
// because of a mistake.
func New(cfg Config) (*Keeper, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	k := &Keeper{cfg: cfg, seen: map[string]string{}}
	for _, s := range cfg.Recipients {
		r, err := seal.Recipient(s)
		if err != nil {
			return nil, fmt.Errorf("preparing to encrypt audit logs for %s: %w", s, err)
		}
		k.recipients = append(k.recipients, r)
	}
	for _, w := range cfg.Witnesses {
		l, err := newLane(w, cfg)
		if err != nil {
			return nil, fmt.Errorf("preparing the witness %s: %w", w.Name, err)
		}
		k.lanes = append(k.lanes, l)
	}
	return k, nil
}

// How often things are looked at.
const (
	lookEvery = time.Second
	tidyEvery = time.Minute
)

// Run keeps the logs until ctx ends.
func (k *Keeper) Run(ctx context.Context, kids Kids) error {
	var wg sync.WaitGroup
	for _, l := range k.lanes {
		wg.Go(func() { l.run(ctx) })
	}
	wg.Go(func() { k.watchSpace(ctx, kids) })
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var tidied time.Duration
	for ctx.Err() == nil {
		k.offer()
		if now := bootclock.Now(); tidied == 0 || now-tidied > tidyEvery {
			if err := k.Tidy(ctx); err != nil && ctx.Err() == nil {
				k.cfg.Log.Error("looking after the audit logs; trying again", "error", err)
			}
			tidied = now
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	wg.Wait()
	return nil
}

// Tidy exports keys, encrypts what is due and removes what is over.
func (k *Keeper) Tidy(ctx context.Context) error {
	logs, err := k.logs()
	if err != nil {
		return err
	}
	now, err := k.wall()
	if err != nil {
		return err
	}
	for _, daemon := range logs {
		err = errors.Join(err, k.export(daemon), k.sealLog(ctx, daemon, now), k.expire(ctx, daemon, now, logs))
	}
	return err
}

// logs lists the daemons that have one with a tree.
func (k *Keeper) logs() ([]string, error) {
	entries, err := os.ReadDir(k.cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("listing the audit logs: %w", err)
	}
	var out []string
	for _, e := range entries {
		if _, err := os.Lstat(filepath.Join(k.cfg.Dir, e.Name(), audit.HashFile)); e.IsDir() && err == nil {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// export copies a daemon's public key to where everybody can read it and the daemon cannot write. One that is there is
// never replaced: a daemon with another key is told of.
func (k *Keeper) export(daemon string) error {
	dir := filepath.Join(k.cfg.Dir, verify.KeyDir)
	if err := os.Mkdir(dir, 0o755); err == nil {
		err = os.Chmod(dir, 0o755)
		if err != nil {
			return fmt.Errorf("exporting the key of %s: %w", daemon, err)
		}
	} else if !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("exporting the key of %s: %w", daemon, err)
	}
	raw, err := k.read(daemon, audit.PublicKeyFile)
	if err != nil {
		return fmt.Errorf("exporting the key of %s: %w", daemon, err)
	}
	file := filepath.Join(dir, daemon+".pub")
	have, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := atomicfile.WriteSynced(file, raw, 0o644, 0, 0); err != nil {
			return fmt.Errorf("exporting the key of %s: %w", daemon, err)
		}
	case err != nil:
		return fmt.Errorf("exporting the key of %s: %w", daemon, err)
	case string(have) != string(raw):
		if !k.told("key " + daemon + string(raw)) {
			k.cfg.Audit.Log(audit.Record{Event: audit.EventGap, Fields: map[string]string{audit.FieldCause: "key", audit.FieldDaemon: daemon},
				Detail: "the log of " + daemon + " is signed with another key than the one that was exported: what it signs now does not verify"})
		}
	}
	return nil
}

// told remembers what was said once.
func (k *Keeper) told(what string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.seen["told "+what] != "" {
		return true
	}
	k.seen["told "+what] = "yes"
	return false
}

// maxSmall bounds the small files that a daemon writes and that are read here.
const maxSmall = 64 << 10

// read reads a small file in a daemon's directory, out of which no link leads.
func (k *Keeper) read(daemon, name string) ([]byte, error) {
	root, err := os.OpenRoot(filepath.Join(k.cfg.Dir, daemon))
	if err != nil {
		return nil, err
	}
	defer root.Close() // only read
	info, err := root.Lstat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxSmall {
		return nil, fmt.Errorf("%s is no small regular file", filepath.Join(k.cfg.Dir, daemon, name))
	}
	return root.ReadFile(name)
}
