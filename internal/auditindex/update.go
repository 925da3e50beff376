package auditindex

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"tagout/internal/audit"
)

const (
	stretchLines = 1 << 16
	stretchBytes = 64 << 20
	maxLine      = 1 << 20 // a longer line is no record
	tailBytes    = 4096    // before the last indexed place: what tells a log from one that took its name
)

// Progress says what an update did.
type Progress struct {
	Lines   int64         // that it added
	Bytes   int64         // of the logs that it read
	Dropped int           // logs, or pieces of them, that it forgot: they are gone, encrypted, or were replaced
	Took    time.Duration // on the monotonic clock
}

// Update adds to the index in dir what the logs below logs have got since. Only one process does so at a time; another
// gets ErrBusy. A damaged index is thrown away and made again.
func Update(ctx context.Context, dir, logs string) (Progress, error) {
	return update(ctx, dir, logs, false)
}

// Rebuild makes the index again from the logs alone.
func Rebuild(ctx context.Context, dir, logs string) (Progress, error) {
	return update(ctx, dir, logs, true)
}

func update(ctx context.Context, dir, logs string, anew bool) (p Progress, err error) {
	began := time.Now()
	unlock, err := lock(dir)
	if err != nil {
		return p, fmt.Errorf("indexing the audit logs: %w", err)
	}
	defer unlock()
	if anew {
		if err := remove(dir); err != nil {
			return p, fmt.Errorf("indexing the audit logs: %w", err)
		}
	}
	u := &updater{ctx: ctx, dir: dir}
	err = u.run(logs)
	if damaged(err) && !anew {
		if err = remove(dir); err == nil {
			u.Progress = Progress{}
			err = u.run(logs)
		}
	}
	u.Took = time.Since(began)
	if err != nil {
		return u.Progress, fmt.Errorf("indexing the audit logs: %w", err)
	}
	return u.Progress, nil
}

// remove takes the database away. Whoever reads it reads on what it has opened.
func remove(dir string) error {
	for _, f := range dbFiles(dir) {
		if err := os.RemoveAll(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// updater writes the index. Its process holds the lock.
type updater struct {
	Progress
	ctx context.Context
	dir string
	db  *sql.DB
}

func (u *updater) run(logs string) (err error) {
	shards, err := audit.Shards(logs)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if u.db, err = open(u.dir, true); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, u.db.Close()) }()
	known, err := readShards(u.ctx, u.db)
	if err != nil {
		return err
	}
	kept := map[int64]bool{}
	for _, sh := range shards {
		if err := u.shard(sh, known, kept); err != nil {
			return err
		}
	}
	for _, k := range known {
		if !kept[k.id] {
			if err := u.drop(k.id); err != nil {
				return err
			}
		}
	}
	return nil
}

// shardRow is what the index knows of one piece of a log.
type shardRow struct {
	id         int64
	daemon     string
	head, tail []byte
	done       int64 // the byte up to which it is indexed: the end of a line
	lines      int64
}

// asker is a database, or a transaction in one.
type asker interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func readShards(ctx context.Context, db asker) ([]shardRow, error) {
	rows, err := db.QueryContext(ctx, `SELECT id, daemon, head, tail, done, lines FROM shard`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []shardRow
	for rows.Next() {
		var r shardRow
		if err := rows.Scan(&r.id, &r.daemon, &r.head, &r.tail, &r.done, &r.lines); err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, rows.Err()
}

// headOf is what a piece of a log is known by, whatever its name is: its first line. It is nil while there is none.
func headOf(f io.ReaderAt) ([]byte, error) {
	in := bufio.NewReaderSize(io.NewSectionReader(f, 0, maxLine), 4096)
	line, err := in.ReadBytes('\n')
	if errors.Is(err, io.EOF) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(line)
	return sum[:], nil
}

// tailOf is what the bytes before a place are known by.
func tailOf(f io.ReaderAt, done int64) ([]byte, error) {
	buf := make([]byte, min(done, tailBytes))
	if _, err := f.ReadAt(buf, done-int64(len(buf))); err != nil {
		return nil, err
	}
	sum := sha256.Sum256(buf)
	return sum[:], nil
}

// find returns what is known of a log that is open now. What is known of one that was replaced, cut or written over is
// not known of this one.
func find(known []shardRow, sh audit.Shard, f io.ReaderAt, kept map[int64]bool) (row shardRow, head []byte, ok bool, err error) {
	if head, err = headOf(f); err != nil || head == nil {
		return row, head, false, err
	}
	for _, k := range known {
		if k.daemon != sh.Daemon || !bytes.Equal(k.head, head) || kept[k.id] {
			continue
		}
		tail, err := tailOf(f, k.done)
		if err == nil && bytes.Equal(tail, k.tail) {
			return k, head, true, nil
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return k, head, false, err
		}
	}
	return row, head, false, nil
}

func (u *updater) shard(sh audit.Shard, known []shardRow, kept map[int64]bool) error {
	if sh.Sealed {
		return nil
	}
	f, err := os.Open(sh.Path)
	if errors.Is(err, fs.ErrNotExist) { // closed or gone meanwhile: the next time
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close() // only read
	row, head, ok, err := find(known, sh, f, kept)
	if err != nil || head == nil {
		return err
	}
	if !ok {
		if slices.ContainsFunc(known, func(k shardRow) bool { return kept[k.id] && k.daemon == sh.Daemon && bytes.Equal(k.head, head) }) {
			return nil // a copy of a log that is indexed: searches read it
		}
		if row, err = u.newShard(sh, head, known); err != nil {
			return err
		}
	}
	kept[row.id] = true
	return u.grow(f, row)
}

// newShard begins with a log, and forgets one that had its first line.
func (u *updater) newShard(sh audit.Shard, head []byte, known []shardRow) (shardRow, error) {
	for _, k := range known {
		if k.daemon == sh.Daemon && bytes.Equal(k.head, head) {
			if err := u.drop(k.id); err != nil {
				return shardRow{}, err
			}
		}
	}
	none := sha256.Sum256(nil)
	row := shardRow{daemon: sh.Daemon, head: head, tail: none[:]}
	res, err := u.db.ExecContext(u.ctx, `INSERT INTO shard (daemon, head, done, tail, lines) VALUES (?, ?, 0, ?, 0)`, row.daemon, row.head, row.tail)
	if err != nil {
		return row, err
	}
	row.id, err = res.LastInsertId()
	return row, err
}

func (u *updater) drop(id int64) error {
	u.Dropped++
	tx, err := u.db.BeginTx(u.ctx, nil)
	if err != nil {
		return err
	}
	for _, stmt := range []string{`DELETE FROM posting WHERE shard = ?`, `DELETE FROM stretch WHERE shard = ?`, `DELETE FROM shard WHERE id = ?`} {
		if _, err := tx.ExecContext(u.ctx, stmt, id); err != nil {
			return errors.Join(err, tx.Rollback())
		}
	}
	return tx.Commit()
}

// grow indexes what a log has got, one stretch after the other, each whole or not at all.
func (u *updater) grow(f *os.File, row shardRow) error {
	in := bufio.NewReaderSize(io.NewSectionReader(f, row.done, 1<<62-row.done), maxLine)
	for {
		s, err := gather(u.ctx, in, row.done)
		if err != nil {
			return fmt.Errorf("reading %s: %w", f.Name(), err)
		}
		if s.lines == 0 {
			return nil
		}
		tail, err := tailOf(f, s.ends)
		if err != nil {
			return fmt.Errorf("reading %s: %w", f.Name(), err)
		}
		if err := u.write(row.id, s, tail); err != nil {
			return err
		}
		row.done = s.ends
		u.Lines, u.Bytes = u.Lines+int64(s.lines), u.Bytes+s.ends-s.base
	}
}

// stretch is a run of lines of one log.
type stretch struct {
	base, ends  int64
	lines       int
	first, last int64 // times of its records, Unix nanoseconds
	terms       map[term]*posting
}

// gather reads the next stretch, which begins at base. A last line without an end is left for the next time.
func gather(ctx context.Context, in *bufio.Reader, base int64) (stretch, error) {
	s := stretch{base: base, ends: base, first: 1<<63 - 1, last: -1 << 63, terms: map[term]*posting{}}
	var f facts
	for s.lines < stretchLines && s.ends-base < stretchBytes {
		if s.lines&1023 == 0 && ctx.Err() != nil {
			return s, ctx.Err()
		}
		line, err := in.ReadSlice('\n')
		off, n, long := s.ends, int64(len(line)), false
		for errors.Is(err, bufio.ErrBufferFull) {
			long = true
			line, err = in.ReadSlice('\n')
			n += int64(len(line))
		}
		if errors.Is(err, io.EOF) {
			return s, nil
		}
		if err != nil {
			return s, err
		}
		s.ends += n
		s.lines++
		if long || !f.read(line[:len(line)-1]) {
			continue
		}
		at := clampNS(f.at)
		s.first, s.last = min(s.first, at), max(s.last, at)
		for i, t := range f.terms {
			if slices.Contains(f.terms[:i], t) {
				continue
			}
			p := s.terms[t]
			if p == nil {
				p = &posting{}
				s.terms[t] = p
			}
			p.add(base, off)
		}
	}
	return s, nil
}

func (u *updater) write(shard int64, s stretch, tail []byte) (err error) {
	tx, err := u.db.BeginTx(u.ctx, nil)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, tx.Rollback())
		}
	}()
	insert, err := tx.PrepareContext(u.ctx, `INSERT OR REPLACE INTO posting (term, shard, base, places) VALUES (?, ?, ?, ?)`)
	if err != nil {
		return err
	}
	defer insert.Close()
	terms := make([]term, 0, len(s.terms))
	for t := range s.terms {
		terms = append(terms, t)
	}
	slices.Sort(terms) // in the table's order
	for _, t := range terms {
		if _, err := insert.ExecContext(u.ctx, int64(t), shard, s.base, sealed(s.terms[t].places)); err != nil {
			return err
		}
	}
	if _, err := tx.ExecContext(u.ctx, `INSERT OR REPLACE INTO stretch (shard, base, contents) VALUES (?, ?, ?)`, shard, s.base, s.encode(terms)); err != nil {
		return err
	}
	if _, err := tx.ExecContext(u.ctx, `UPDATE shard SET done = ?, tail = ?, lines = lines + ? WHERE id = ?`, s.ends, tail, s.lines, shard); err != nil {
		return err
	}
	return tx.Commit()
}
