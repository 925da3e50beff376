package auditindex

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	sqlite "modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"tagout/internal/audit"
	"tagout/internal/auditview"
)

// damaged says whether an error means that the index cannot be used any more.
func damaged(err error) bool {
	var e *sqlite.Error
	if errors.As(err, &e) {
		switch e.Code() & 0xff {
		case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_MISMATCH:
			return true
		}
	}
	return errors.Is(err, errDamaged)
}

// Index finds records through the index in Dir, and reads through what the index does not know.
type Index struct {
	Dir     string // the index's own directory
	Scanner auditview.Scanner
	// Trouble is told why the index could not be used, where that was so. It may be nil.
	Trouble func(error)
}

func (x Index) trouble(err error) {
	if x.Trouble != nil && !errors.Is(err, os.ErrNotExist) {
		x.Trouble(err)
	}
}

// Find implements auditview.Finder.
func (x Index) Find(ctx context.Context, q auditview.Query, each func(auditview.Line) error) (stats auditview.Stats, err error) {
	shards, err := x.Scanner.Shards(q)
	if err != nil {
		return stats, err
	}
	plans, err := x.plan(ctx, shards, q)
	if err != nil {
		if ctx.Err() != nil {
			return stats, ctx.Err()
		}
		x.trouble(err)
		return x.Scanner.FindIn(ctx, shards, q, each)
	}
	var unknown []audit.Shard
	for _, p := range plans {
		if !p.known {
			unknown = append(unknown, p.shard)
			continue
		}
		found, err := x.read(ctx, p, q, each)
		stats.Unreadable += found.Unreadable
		if err != nil {
			return stats, err
		}
	}
	found, err := x.Scanner.FindIn(ctx, unknown, q, each)
	stats.Unreadable, stats.Sealed = stats.Unreadable+found.Unreadable, stats.Sealed+found.Sealed
	return stats, err
}

// plan is what is to be read of one piece of a log.
type plan struct {
	shard  audit.Shard
	known  bool
	file   *os.File
	places []int64 // at which lines begin, in their order
	rest   int64   // from here on everything is read
	spans  []span  // everything in these is read
}

type span struct{ from, to int64 }

// plan opens the logs that the index knows and says where in them the lines are. The files are closed by read; with an
// error none is left open.
func (x Index) plan(ctx context.Context, shards []audit.Shard, q auditview.Query) (plans []plan, err error) {
	if _, err := os.Stat(File(x.Dir)); err != nil {
		return nil, err
	}
	db, err := open(x.Dir, false)
	if err != nil {
		return nil, err
	}
	defer db.Close()                                           // only read
	tx, err := db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true}) // one state of the index for all
	if err != nil {
		return nil, err
	}
	defer tx.Rollback() // likewise
	known, err := readShards(ctx, tx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			for _, p := range plans {
				p.close()
			}
			plans = nil
		}
	}()
	groups := termsOf(q)
	kept := map[int64]bool{}
	for _, sh := range shards {
		p := plan{shard: sh}
		row, ok, err := x.recognise(&p, sh, known, kept)
		if err != nil {
			return plans, err
		}
		plans = append(plans, p)
		if !ok {
			continue
		}
		last := &plans[len(plans)-1]
		last.rest = row.done
		held, err := stretches(ctx, tx, row, q)
		if err != nil {
			return plans, err
		}
		if len(groups) == 0 {
			last.spans = spansOf(held)
			continue
		}
		if last.places, err = lookUp(ctx, tx, row.id, held, groups); err != nil {
			return plans, err
		}
	}
	return plans, nil
}

// recognise opens a log where the index knows it.
func (x Index) recognise(p *plan, sh audit.Shard, known []shardRow, kept map[int64]bool) (row shardRow, ok bool, err error) {
	if sh.Sealed {
		return row, false, nil
	}
	f, err := os.Open(sh.Path)
	if err != nil {
		return row, false, nil // whoever reads it through says why not
	}
	row, _, ok, err = find(known, sh, f, kept)
	if err != nil || !ok {
		f.Close() // only read
		return row, false, nil
	}
	kept[row.id] = true
	p.file, p.known = f, true
	return row, true, nil
}

func (p *plan) close() {
	if p.file != nil {
		p.file.Close() // only read
	}
}

// termsOf returns what a wanted line has in the index: one of each group. Of what the index does not know there is none.
func termsOf(q auditview.Query) (groups [][]term) {
	if q.Who != "" {
		groups = append(groups, []term{of(fieldKid, q.Who), of(fieldSession, q.Who), of(fieldStop, q.Who)})
	}
	one := func(field byte, value string) {
		if value != "" {
			groups = append(groups, []term{of(field, value)})
		}
	}
	one(fieldKid, q.Kid)
	one(fieldSession, q.Session)
	one(fieldStop, q.Stop)
	one(fieldCard, q.Card)
	one(fieldReason, q.Reason)
	one(fieldOutcome, q.Outcome)
	one(fieldActor, q.Actor)
	if !strings.HasPrefix(q.Host, "*.") {
		one(fieldHost, strings.ToLower(strings.TrimSuffix(q.Host, ".")))
	}
	if !strings.HasSuffix(q.Path, "*") {
		one(fieldPath, q.Path)
	}
	if events := eventTerms(q.Events); len(events) > 0 {
		groups = append(groups, events)
	}
	return groups
}

// eventTerms is empty where one of the patterns is none that the index knows.
func eventTerms(patterns []string) []term {
	var out []term
	for _, e := range patterns {
		begin, star := strings.CutSuffix(e, "*")
		noun, dot := strings.CutSuffix(begin, ".")
		switch {
		case !star:
			out = append(out, of(fieldEvent, e))
		case dot && noun != "" && !strings.Contains(noun, "."):
			out = append(out, of(fieldNoun, noun))
		default:
			return nil
		}
	}
	return out
}

const (
	fewPlaces  = 256     // so few are read without narrowing them down any further
	manyPlaces = 1 << 22 // so many are not looked at to narrow others down
)

// lookUp returns the places of the lines that have one term of each group, or of more lines than that.
func lookUp(ctx context.Context, tx *sql.Tx, shard int64, held []contents, groups [][]term) ([]int64, error) {
	type sized struct {
		terms []term
		n     int
	}
	var all []sized
	for _, g := range groups {
		s := sized{terms: g}
		for _, t := range g {
			for i := range held {
				s.n += held[i].lines(t)
			}
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b sized) int { return cmp.Compare(a.n, b.n) })
	var found []int64
	for i, s := range all {
		if i > 0 && (len(found) <= fewPlaces || s.n > manyPlaces) {
			break
		}
		these, err := placesOf(ctx, tx, shard, held, s.terms)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			found = these
		} else {
			found = both(found, these)
		}
	}
	return found, nil
}

func placesOf(ctx context.Context, tx *sql.Tx, shard int64, held []contents, terms []term) ([]int64, error) {
	get, err := tx.PrepareContext(ctx, `SELECT places FROM posting WHERE shard = ? AND base = ? AND term = ?`)
	if err != nil {
		return nil, err
	}
	defer get.Close()
	var out []int64
	for _, t := range terms {
		for i := range held {
			n := held[i].lines(t)
			if n == 0 {
				continue
			}
			var raw []byte
			err := get.QueryRowContext(ctx, shard, held[i].base, int64(t)).Scan(&raw)
			if errors.Is(err, sql.ErrNoRows) {
				err = errDamaged
			}
			if err == nil {
				out, err = places(held[i].base, n, raw, out)
			}
			if err != nil {
				return nil, err
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// both returns what is in both sorted lists.
func both(a, b []int64) []int64 {
	out := a[:0]
	for j := 0; len(a) > 0 && j < len(b); {
		switch {
		case a[0] < b[j]:
			a = a[1:]
		case a[0] > b[j]:
			j++
		default:
			out = append(out, a[0])
			a, j = a[1:], j+1
		}
	}
	return out
}

// stretches returns what the index knows of a log, of the time that is asked for. All of what is indexed must be there.
func stretches(ctx context.Context, tx *sql.Tx, row shardRow, q auditview.Query) ([]contents, error) {
	from, to := int64(-1<<63), int64(1<<63-1)
	if !q.Since.IsZero() {
		from = clampNS(q.Since)
	}
	if !q.Until.IsZero() {
		to = clampNS(q.Until)
	}
	rows, err := tx.QueryContext(ctx, `SELECT base, contents FROM stretch WHERE shard = ? ORDER BY base`, row.id)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []contents
	end := int64(0)
	for rows.Next() {
		var base int64
		var raw []byte
		if err := rows.Scan(&base, &raw); err != nil {
			return nil, err
		}
		c, err := decodeContents(raw)
		if err != nil || c.base != base || base != end {
			return nil, errDamaged
		}
		end = c.ends
		if c.last >= from && c.first <= to {
			out = append(out, c)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if end != row.done {
		return nil, errDamaged
	}
	return out, nil
}

// spansOf joins stretches that follow each other.
func spansOf(held []contents) []span {
	var out []span
	for _, c := range held {
		if n := len(out); n > 0 && out[n-1].to == c.base {
			out[n-1].to = c.ends
			continue
		}
		out = append(out, span{c.base, c.ends})
	}
	return out
}

// errMisled is met where the index leads to no line.
var errMisled = errors.New("the index leads to a place where no record begins")

// read reads the lines from the log itself. Where the index turns out to be wrong about it, it is read through.
func (x Index) read(ctx context.Context, p plan, q auditview.Query, each func(auditview.Line) error) (auditview.Stats, error) {
	defer p.close()
	lines, err := readPlaces(ctx, p, q)
	if errors.Is(err, errMisled) {
		x.trouble(fmt.Errorf("%w in %s: run `tagout audit index --rebuild`", err, p.shard.Path))
		return x.Scanner.ScanShard(ctx, p.shard, 0, q, each)
	}
	if err != nil {
		return auditview.Stats{}, err
	}
	for _, l := range lines {
		if err := each(l); err != nil {
			return auditview.Stats{}, err
		}
	}
	var stats auditview.Stats
	for _, s := range p.spans {
		found, err := x.Scanner.ScanPart(ctx, p.shard, io.NewSectionReader(p.file, s.from, s.to-s.from), s.from, q, each)
		stats.Unreadable += found.Unreadable
		if err != nil {
			return stats, err
		}
	}
	found, err := x.Scanner.ScanPart(ctx, p.shard, io.NewSectionReader(p.file, p.rest, 1<<62-p.rest), p.rest, q, each)
	stats.Unreadable += found.Unreadable
	return stats, err
}

// readPlaces returns the wanted lines among those that begin at the plan's places.
func readPlaces(ctx context.Context, p plan, q auditview.Query) ([]auditview.Line, error) {
	var out []auditview.Line
	w := window{file: p.file, ends: p.rest}
	for i, off := range p.places {
		if i&1023 == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		next := int64(1<<62 - 1)
		if i+1 < len(p.places) {
			next = p.places[i+1]
		}
		raw, err := w.line(off, next)
		if err != nil {
			return nil, err
		}
		l, ok := auditview.Decode(raw)
		if !ok {
			return nil, errMisled
		}
		if q.Match(&l) {
			l.Log, l.Off = p.shard.Path, off
			out = append(out, l)
		}
	}
	return out, nil
}

// window is a part of a log that is in memory.
type window struct {
	file *os.File
	ends int64 // of what is indexed: no line goes beyond it
	from int64
	buf  []byte
}

const (
	near = 16 << 10 // lines that are no farther apart are read together
	wide = 256 << 10
	slim = 2 << 10
)

// line returns the line that begins at off; it is valid until the next call. next is where the next one will be asked for.
func (w *window) line(off, next int64) ([]byte, error) {
	for size := int64(slim); ; size *= 8 {
		if next-off < near {
			size = max(size, wide)
		}
		before := int64(1)
		if off == 0 {
			before = 0
		}
		if off-before >= w.from && off < w.from+int64(len(w.buf)) {
			part := w.buf[off-before-w.from:]
			if before == 1 && part[0] != '\n' {
				return nil, errMisled
			}
			part = part[before:]
			if n := bytes.IndexByte(part, '\n'); n >= 0 {
				return part[:n], nil
			}
		}
		if size > 64*maxLine {
			return nil, errMisled
		}
		if err := w.fill(off-before, min(size, w.ends-off+before)); err != nil {
			return nil, err
		}
	}
}

func (w *window) fill(from, size int64) error {
	if size <= 0 {
		return errMisled
	}
	if int64(cap(w.buf)) < size {
		w.buf = make([]byte, size)
	}
	w.buf = w.buf[:size]
	n, err := w.file.ReadAt(w.buf, from)
	w.from, w.buf = from, w.buf[:n]
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("reading the audit log: %w", err)
	}
	if n == 0 {
		return errMisled
	}
	return nil
}
