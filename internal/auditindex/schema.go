// Package auditindex says where in the audit logs the records about something are. It is a helper and nothing more: what
// is found is read from the logs, by its place, and compared with what was asked for, and evidence is gathered without it.
// Whatever happens to the index (it is missing, locked, damaged, the disk is full), a search reads the logs instead, and
// the index can be made again from them at any time.
//
// It is a SQLite database with one row for each term, that is a field with a value, in each stretch of a log: the places
// of the lines that have it. Encrypted pieces of a log are not in it; when a piece is encrypted, what the index knew of it
// goes.
package auditindex

import (
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net/url"
	"os"
	"path/filepath"
	"sort"
	"time"

	"golang.org/x/sys/unix"
	_ "modernc.org/sqlite" // the driver
)

// version is part of the file's name: an index of another form is another file.
const version = 1

// File is the database in dir.
func File(dir string) string { return filepath.Join(dir, fmt.Sprintf("index-%d.db", version)) }

// dbFiles are all files of the database.
func dbFiles(dir string) []string {
	f := File(dir)
	return []string{f, f + "-wal", f + "-shm"}
}

const schema = `
CREATE TABLE IF NOT EXISTS shard (
  id INTEGER PRIMARY KEY, daemon TEXT NOT NULL, head BLOB NOT NULL, done INTEGER NOT NULL, tail BLOB NOT NULL, lines INTEGER NOT NULL,
  UNIQUE (daemon, head));
CREATE TABLE IF NOT EXISTS stretch (
  shard INTEGER NOT NULL, base INTEGER NOT NULL, contents BLOB NOT NULL,
  PRIMARY KEY (shard, base)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS posting (
  shard INTEGER NOT NULL, base INTEGER NOT NULL, term INTEGER NOT NULL, places BLOB NOT NULL,
  PRIMARY KEY (shard, base, term)) WITHOUT ROWID;
`

// ErrBusy is the error of writing an index that another process writes.
var ErrBusy = errors.New("the index is being written by another process")

func open(dir string, write bool) (*sql.DB, error) {
	mode := "ro"
	if write {
		mode = "rwc"
	}
	q := url.Values{"mode": {mode}, "_pragma": {"busy_timeout(2000)", "synchronous(NORMAL)", "cache_size(-65536)", "temp_store(MEMORY)"}}
	if write {
		q["_pragma"] = append([]string{"page_size(16384)", "journal_mode(WAL)"}, q["_pragma"]...)
	}
	u := url.URL{Scheme: "file", Path: File(dir), RawQuery: q.Encode()}
	db, err := sql.Open("sqlite", u.String())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	if write {
		_, err = db.Exec(schema)
	} else {
		var n int
		err = db.QueryRow(`SELECT count(*) FROM (SELECT 1 FROM shard LIMIT 1)`).Scan(&n)
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// lock makes this process the only writer.
func lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrBusy
	}
	if err != nil {
		f.Close() // nothing was written
		return nil, err
	}
	return func() { f.Close() }, nil // likewise
}

// posting is the places of the lines that have a term in one stretch of a log, being gathered.
type posting struct {
	n      int
	last   int64 // place of the last line
	places []byte
}

func (p *posting) add(base, off int64) {
	if p.n == 0 {
		p.last = base
	}
	p.places = binary.AppendUvarint(p.places, uint64(off-p.last))
	p.last = off
	p.n++
}

var errDamaged = errors.New("the index is damaged")

// sealed adds a checksum, which a damaged disk is found by.
func sealed(b []byte) []byte { return binary.LittleEndian.AppendUint32(b, crc32.ChecksumIEEE(b)) }

func unsealed(b []byte) ([]byte, error) {
	n := len(b) - 4
	if n < 0 || crc32.ChecksumIEEE(b[:n]) != binary.LittleEndian.Uint32(b[n:]) {
		return nil, errDamaged
	}
	return b[:n], nil
}

// places appends the places that a posting of so many has.
func places(base int64, n int, raw []byte, to []int64) ([]int64, error) {
	b, err := unsealed(raw)
	if err != nil {
		return to, err
	}
	at := base
	for range n {
		d, k := binary.Uvarint(b)
		if k <= 0 {
			return to, errDamaged
		}
		at += int64(d)
		to = append(to, at)
		b = b[k:]
	}
	if len(b) != 0 {
		return to, errDamaged
	}
	return to, nil
}

// contents is what a stretch holds: where it ends, when its records happened, and how many postings of how many lines it
// must have. A row that is lost or changed is missed by that.
type contents struct {
	base, ends  int64
	first, last int64 // Unix nanoseconds
	terms       []byte
}

const (
	contentsHead = 4 * 8
	termSize     = 8 + 4
)

// encode writes the terms, which are sorted, with the number of their lines.
func (s *stretch) encode(terms []term) []byte {
	b := make([]byte, 0, contentsHead+len(terms)*termSize+4)
	for _, v := range []int64{s.base, s.ends, s.first, s.last} {
		b = binary.LittleEndian.AppendUint64(b, uint64(v))
	}
	for _, t := range terms {
		b = binary.LittleEndian.AppendUint64(b, uint64(t))
		b = binary.LittleEndian.AppendUint32(b, uint32(s.terms[t].n))
	}
	return sealed(b)
}

func decodeContents(raw []byte) (c contents, err error) {
	b, err := unsealed(raw)
	if err != nil || len(b) < contentsHead || (len(b)-contentsHead)%termSize != 0 {
		return c, errDamaged
	}
	for i, v := range []*int64{&c.base, &c.ends, &c.first, &c.last} {
		*v = int64(binary.LittleEndian.Uint64(b[8*i:]))
	}
	c.terms = b[contentsHead:]
	return c, nil
}

// lines says how many lines of the stretch have a term.
func (c *contents) lines(t term) int {
	n := len(c.terms) / termSize
	i := sort.Search(n, func(i int) bool { return term(binary.LittleEndian.Uint64(c.terms[i*termSize:])) >= t })
	if i == n || term(binary.LittleEndian.Uint64(c.terms[i*termSize:])) != t {
		return 0
	}
	return int(binary.LittleEndian.Uint32(c.terms[i*termSize+8:]))
}

// clampNS is a time that a damaged clock may have given, as a number that fits.
func clampNS(t time.Time) int64 {
	const most = int64(1) << 62
	if t.Year() < 1700 {
		return -most
	}
	if t.Year() > 2200 {
		return most
	}
	return t.UnixNano()
}
