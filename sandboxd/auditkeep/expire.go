package auditkeep

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"tagout/internal/audit"
	"tagout/internal/audit/seal"
	"tagout/internal/bootclock"
)

// expire removes the oldest pieces of a log whose time is over, whole, and says so before. The hashes of their records
// stay, so that all that is left can be verified.
func (k *Keeper) expire(ctx context.Context, daemon string, now time.Time, logs []string) error {
	shards, err := audit.ShardsOf(k.cfg.Dir, daemon)
	if err != nil {
		return err
	}
	seen, err := k.seenClosed(daemon, shards, now)
	if err != nil {
		return err
	}
	if len(shards) > 0 && !shards[0].Live {
		k.cfg.Metrics.AuditOldest(daemon, now.Sub(seen[shards[0].First]))
	}
	signed := k.signed(daemon)
	n, to := 0, uint64(0)
	for i, s := range shards {
		if s.Live || i+1 == len(shards) || now.Sub(seen[s.First]) < k.cfg.Retention || shards[i+1].First > signed {
			break
		}
		n, to = i+1, shards[i+1].First
	}
	if n == 0 {
		return nil
	}
	if err := k.sayExpired(ctx, daemon, to, n, logs); err != nil {
		return fmt.Errorf("removing pieces of the log of %s, which takes a record: %w", daemon, err)
	}
	root, err := k.closedDir(daemon)
	if err != nil {
		return fmt.Errorf("removing pieces of the log of %s: %w", daemon, err)
	}
	defer root.Close() // only read
	for _, s := range shards[:n] {
		if err := root.Remove(filepath.Base(s.Path)); err != nil {
			return fmt.Errorf("removing a piece of the log of %s: %w", daemon, err)
		}
	}
	return nil
}

// signed is how many records a log's newest checkpoint says it covers.
func (k *Keeper) signed(daemon string) uint64 {
	raw, err := k.read(daemon, audit.CheckpointFile)
	if err != nil {
		return 0
	}
	c, err := audit.ParseCheckpoint(string(raw))
	if err != nil {
		return 0
	}
	return c.Size
}

// sayExpired records from which number on a log's records are kept. It says so of all logs, since the records that said
// it before may be among those that go now.
func (k *Keeper) sayExpired(ctx context.Context, daemon string, to uint64, pieces int, logs []string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for _, other := range logs {
		if other == daemon {
			continue
		}
		shards, err := audit.ShardsOf(k.cfg.Dir, other)
		if err != nil {
			return err
		}
		if len(shards) == 0 || shards[0].First == 0 {
			continue
		}
		if err := k.cfg.Audit.LogDurable(ctx, k.expired(other, shards[0].First, "")); err != nil {
			return err
		}
	}
	detail := fmt.Sprintf("%d pieces of this log were removed, older than %v", pieces, k.cfg.Retention)
	return k.cfg.Audit.LogDurable(ctx, k.expired(daemon, to, detail))
}

func (k *Keeper) expired(daemon string, to uint64, detail string) audit.Record {
	return audit.Record{Event: audit.EventExpired, Outcome: audit.OutcomeOK, Detail: detail,
		Fields: map[string]string{audit.FieldDaemon: daemon, audit.FieldTo: fmt.Sprint(to)}}
}

// sealAfter is how long a closed piece stays in clear, for those who follow the log.
const sealAfter = 10 * time.Minute

// sealLog encrypts a log's closed pieces.
func (k *Keeper) sealLog(ctx context.Context, daemon string, _ time.Time) error {
	if len(k.recipients) == 0 {
		return nil
	}
	shards, err := audit.ShardsOf(k.cfg.Dir, daemon)
	if err != nil {
		return err
	}
	for i, s := range shards {
		if s.Live || s.Sealed || i+1 == len(shards) || !k.rested(s.Path) {
			continue
		}
		if err := k.sealPiece(ctx, daemon, s, shards[i+1].First); err != nil {
			return fmt.Errorf("encrypting %s: %w", s.Path, err)
		}
	}
	return nil
}

// rested says whether a piece was seen closed so long ago, by the boot clock.
func (k *Keeper) rested(path string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	since, ok := k.seen["closed "+path]
	if !ok {
		k.seen["closed "+path] = fmt.Sprint(int64(bootclock.Now()))
		return false
	}
	var n int64
	if _, err := fmt.Sscan(since, &n); err != nil {
		return false
	}
	return bootclock.Now()-time.Duration(n) >= k.sealAfter()
}

func (k *Keeper) sealAfter() time.Duration {
	if k.cfg.SealAfter > 0 {
		return k.cfg.SealAfter
	}
	return sealAfter
}

// sealPiece encrypts one piece. What is no longer what was written stays as it is, for whoever looks into it.
func (k *Keeper) sealPiece(ctx context.Context, daemon string, s audit.Shard, next uint64) error {
	root, err := k.closedDir(daemon)
	if err != nil {
		return err
	}
	defer root.Close() // only read
	name := filepath.Base(s.Path)
	if err := regular(root, name); err != nil {
		return err
	}
	from, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // should it be a FIFO by now
	if err != nil {
		return err
	}
	defer from.Close() // only read
	info, err := from.Stat()
	if err != nil {
		return err
	}
	to, err := root.OpenFile(name+".new", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o640)
	if err != nil {
		return err
	}
	defer root.Remove(name + ".new") // gone after the rename
	leaves := &leafCheck{}
	sum := sha256.New()
	err = seal.Encrypt(io.MultiWriter(to, sum), io.TeeReader(from, leaves), k.recipients...)
	if st, ok := info.Sys().(*syscall.Stat_t); ok && err == nil {
		err = errors.Join(to.Chown(int(st.Uid), int(st.Gid)), to.Chmod(0o640))
	}
	if err = errors.Join(err, to.Sync(), to.Close()); err != nil {
		return err
	}
	if err := leaves.compare(k.cfg.Dir, daemon, s.First, next); err != nil {
		if !k.told("unsealed " + s.Path) {
			k.cfg.Log.Error("a piece of an audit log is not encrypted: see `tagout audit verify`", "file", s.Path, "error", err)
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	sealed := name + ".age"
	if err := k.cfg.Audit.LogDurable(ctx, audit.Record{Event: audit.EventSealed, Outcome: audit.OutcomeOK, Count: next - s.First, Fields: map[string]string{
		audit.FieldDaemon: daemon, audit.FieldShard: sealed, audit.FieldSHA256: hex.EncodeToString(sum.Sum(nil)),
	}}); err != nil {
		return err
	}
	if err := root.Rename(name+".new", sealed); err != nil {
		return err
	}
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return err
	}
	return root.Remove(name) // not before the other one is there
}

// leafCheck hashes the lines that are written to it.
type leafCheck struct {
	rest   []byte
	hasher audit.LeafHasher
	leaves []audit.Hash
}

func (c *leafCheck) Write(p []byte) (int, error) {
	for rest := p; ; {
		line, more, whole := bytes.Cut(rest, []byte{'\n'})
		c.rest = append(c.rest, line...)
		if !whole {
			return len(p), nil
		}
		c.leaves = append(c.leaves, c.hasher.Line(c.rest))
		c.rest, rest = c.rest[:0], more
	}
}

// compare says where the lines are not those of the tree.
func (c *leafCheck) compare(dir, daemon string, first, next uint64) error {
	if uint64(len(c.leaves)) != next-first || len(c.rest) > 0 {
		return fmt.Errorf("it has %d records, and the next piece begins after %d", len(c.leaves), next-first)
	}
	tree, err := audit.OpenTree(dir, daemon)
	if err != nil {
		return err
	}
	defer tree.Close() // only read
	for i, leaf := range c.leaves {
		kept, err := tree.Leaf(first + uint64(i))
		if err != nil {
			return err
		}
		if kept != leaf {
			return fmt.Errorf("record %d is not what was written", first+uint64(i))
		}
	}
	return nil
}
