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
	"tagout/internal/audit"
)

// A daemon owns its directory: names and times in it are its word, and a daemon that was broken into could make its own
// records look old, or have links lead elsewhere. What is removed follows what was seen here, and no link is followed.

// seenClosed says since when, by the time that records expire by, each piece of a log has been closed; pieces that are
// new are noted.
func (k *Keeper) seenClosed(daemon string, shards []audit.Shard, now time.Time) (map[uint64]time.Time, error) {
	file := filepath.Join(k.cfg.State, "audit-pieces.json")
	all := map[string]map[uint64]time.Time{}
	raw, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(raw, &all)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading when pieces of the audit logs were closed: %w", err)
	}
	before, seen := all[daemon], map[uint64]time.Time{}
	changed := len(before) > 0
	for _, s := range shards {
		if s.Live {
			continue
		}
		at, ok := before[s.First]
		if !ok {
			at, changed = now, true
		}
		seen[s.First] = at
	}
	if !changed || len(seen) == len(before) && subset(seen, before) {
		return seen, nil
	}
	all[daemon] = seen
	if raw, err = json.Marshal(all); err == nil {
		err = atomicfile.WriteSynced(file, raw, 0o600, -1, -1)
	}
	if err != nil {
		return nil, fmt.Errorf("noting when pieces of the audit logs were closed: %w", err)
	}
	return seen, nil
}

func subset(a, b map[uint64]time.Time) bool {
	for n := range a {
		if _, ok := b[n]; !ok {
			return false
		}
	}
	return true
}

// closedDir opens the directory of a log's closed pieces, which must be one itself.
func (k *Keeper) closedDir(daemon string) (*os.Root, error) {
	path := filepath.Join(k.cfg.Dir, daemon, "shards")
	there, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !there.IsDir() {
		return nil, fmt.Errorf("%s is no directory: look into what %s did", path, daemon)
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	opened, err := root.Stat(".")
	if err == nil && !os.SameFile(there, opened) {
		err = fmt.Errorf("%s was replaced: look into what %s did", path, daemon)
	}
	if err != nil {
		root.Close() // only read
		return nil, err
	}
	return root, nil
}

// regular refuses what is no file of its own.
func regular(root *os.Root, name string) error {
	info, err := root.Lstat(name)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file", name)
	}
	return err
}
