package auditview

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"runtime"
	"sync"

	"tagout/internal/audit"
)

// maxLine bounds one record; a longer line is no record.
const maxLine = 1 << 20

// Stats says what a search went through.
type Stats struct {
	Unreadable int // lines that are no records
	Sealed     int // encrypted shards that were left out, because nobody named an identity
}

func (s *Stats) add(o Stats) { s.Unreadable += o.Unreadable; s.Sealed += o.Sealed }

// Finder finds records.
type Finder interface {
	// Find calls each with every record that is wanted, in no order and from one goroutine at a time.
	Find(ctx context.Context, q Query, each func(Line) error) (Stats, error)
}

// Scanner finds records by reading the logs from end to end.
type Scanner struct {
	Dir    string // inst.AuditDir()
	Unseal []audit.Unseal
}

// Find implements Finder.
func (s Scanner) Find(ctx context.Context, q Query, each func(Line) error) (Stats, error) {
	shards, err := s.Shards(q)
	if err != nil {
		return Stats{}, err
	}
	return s.FindIn(ctx, shards, q, each)
}

// ErrNoLogs is the error of searching where there are no logs.
var ErrNoLogs = errors.New("there are no audit logs")

// Shards returns the shards that may hold what is wanted.
func (s Scanner) Shards(q Query) ([]audit.Shard, error) {
	all, err := audit.Shards(s.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("reading the audit logs: %w in %s: is this the right instance?", ErrNoLogs, s.Dir)
	}
	var out []audit.Shard
	for _, sh := range all {
		if q.Daemon == "" || sh.Daemon == q.Daemon {
			out = append(out, sh)
		}
	}
	return out, nil
}

// FindIn searches these shards, several at a time.
func (s Scanner) FindIn(ctx context.Context, shards []audit.Shard, q Query, each func(Line) error) (stats Stats, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex // guards each, stats and err
	var wg sync.WaitGroup
	slots := make(chan struct{}, max(1, runtime.GOMAXPROCS(0)))
	for _, sh := range shards {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			found, failed := s.ScanShard(ctx, sh, 0, q, func(l Line) error {
				mu.Lock()
				defer mu.Unlock()
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return each(l)
			})
			mu.Lock()
			defer mu.Unlock()
			stats.add(found)
			if failed != nil && err == nil {
				err = failed
				cancel()
			}
		})
	}
	wg.Wait()
	return stats, err
}

// ScanShard searches one shard from the byte at which a line begins.
func (s Scanner) ScanShard(ctx context.Context, sh audit.Shard, from int64, q Query, each func(Line) error) (stats Stats, err error) {
	if sh.Sealed && len(s.Unseal) == 0 {
		return Stats{Sealed: 1}, nil
	}
	f, err := sh.Open(s.Unseal...)
	if errors.Is(err, fs.ErrNotExist) { // its retention ended, or it was closed, while we looked
		return Stats{}, nil
	}
	if err != nil {
		return Stats{}, err
	}
	defer f.Close() // only read
	if err := skip(f, from); err != nil {
		return Stats{}, fmt.Errorf("reading the audit log %s: %w", sh.Path, err)
	}
	return s.ScanPart(ctx, sh, f, from, q, each)
}

// ScanPart searches what r has of a shard, from the byte off on, at which a line begins.
func (s Scanner) ScanPart(ctx context.Context, sh audit.Shard, r io.Reader, from int64, q Query, each func(Line) error) (stats Stats, err error) {
	needles := q.needles()
	seq := sh.First
	err = eachLine(ctx, r, from, func(line []byte, off int64, long bool) error {
		number := seq
		seq++
		switch {
		case long:
			stats.Unreadable++
			return nil
		case len(line) == 0 || !holdsOne(line, needles):
			return nil
		}
		l, ok := Decode(line)
		if !ok {
			stats.Unreadable++
			return nil
		}
		if !q.Match(&l) {
			return nil
		}
		l.Log, l.Off, l.Seq, l.Numbered = sh.Path, off, number, from == 0
		return each(l)
	})
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("reading the audit log %s: %w", sh.Path, err)
	}
	return stats, err
}

func holdsOne(line []byte, needles [][]byte) bool {
	for _, n := range needles {
		if bytes.Contains(line, n) {
			return true
		}
	}
	return len(needles) == 0
}

func skip(r io.Reader, n int64) error {
	if n == 0 {
		return nil
	}
	if s, ok := r.(io.Seeker); ok {
		_, err := s.Seek(n, io.SeekStart)
		return err
	}
	_, err := io.CopyN(io.Discard, r, n)
	return err
}

// eachLine calls fn with every line that ends, without its end; it is valid during the call. A last line without an end
// is being written and is left out. Of one that is too long nothing is handed on but that it is.
func eachLine(ctx context.Context, r io.Reader, off int64, fn func(line []byte, off int64, long bool) error) error {
	in := bufio.NewReaderSize(r, maxLine)
	for n := 0; ; n++ {
		if n&1023 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		line, err := in.ReadSlice('\n')
		began, long := off, false
		off += int64(len(line))
		for errors.Is(err, bufio.ErrBufferFull) {
			long = true
			line, err = in.ReadSlice('\n')
			off += int64(len(line))
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := fn(line[:len(line)-1], began, long); err != nil {
			return err
		}
	}
}
