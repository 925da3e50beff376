// Package logtail follows the audit logs of an instance's daemons: what is added to them, and what should never
// happen to a log, such as that it gets shorter.
package logtail

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"syscall"
)

// Chunk is how much of a log is read at a time. No record is longer.
const Chunk = 1 << 20

// Mark is how far a log was read.
type Mark struct {
	Inode uint64 `json:"ino"` // 0: unknown
	Pos   int64  `json:"pos"`
}

// Handler takes what a Tail finds. Only Line is needed.
type Handler struct {
	// Line gets each new line that holds one of the texts asked for, without its end; it is valid during the call.
	Line func(line []byte, log string, off int64)
	// Moved is told that a log was replaced by another file (read from its start), or got shorter (read on from
	// its end, which is size).
	Moved func(log string, size int64, replaced bool)
	// Rolled is told that a log goes on in another file, read from its start, and that all of the one before was read.
	Rolled func(log string)
	// Gone is told once that a log which was followed is not there any more.
	Gone func(log string)
}

// Tail reads what is added to the logs. Only one goroutine may use it.
type Tail struct {
	Marks map[string]Mark // log -> how far it was read; the caller may read it between polls

	dir  string
	want [][]byte
	gone map[string]bool
	buf  []byte
}

// New returns a tail of the logs in dir, a directory a daemon with .jsonl files in it, that goes on from marks.
func New(dir string, marks map[string]Mark, want ...[]byte) *Tail {
	t := &Tail{Marks: map[string]Mark{}, dir: dir, want: want, gone: map[string]bool{}, buf: make([]byte, Chunk)}
	maps.Copy(t.Marks, marks)
	return t
}

// Ends returns the marks of logs in dir that were read to their ends: for who has no use for their past.
func Ends(dir string) map[string]Mark {
	marks := map[string]Mark{}
	logs, err := filepath.Glob(filepath.Join(dir, "*", "*.jsonl"))
	if err != nil {
		return marks // the pattern is right
	}
	for _, log := range logs {
		if info, err := os.Stat(log); err == nil {
			marks[log] = Mark{Inode: inode(info), Pos: info.Size()}
		}
	}
	return marks
}

// Poll reads what was added since the last time. The errors are of the logs that could not be read; each is tried
// again at the next poll.
func (t *Tail) Poll(ctx context.Context, h Handler) map[string]error {
	failed := map[string]error{}
	// Not filepath.Glob: it keeps to itself what it may not read.
	daemons, err := os.ReadDir(t.dir)
	if err != nil {
		failed[t.dir] = err
		return failed
	}
	seen := map[string]bool{}
	for _, d := range daemons {
		files, err := os.ReadDir(filepath.Join(t.dir, d.Name()))
		if err != nil && d.IsDir() {
			failed[filepath.Join(t.dir, d.Name())] = err
		}
		for _, f := range files {
			if filepath.Ext(f.Name()) != ".jsonl" {
				continue
			}
			log := filepath.Join(t.dir, d.Name(), f.Name())
			seen[log] = true
			if err := t.read(ctx, log, h); err != nil {
				failed[log] = err
			}
		}
	}
	t.missed(seen, h)
	return failed
}

// missed tells of the logs that vanished. Their marks stay: one that comes back is another file.
func (t *Tail) missed(seen map[string]bool, h Handler) {
	for log := range t.Marks {
		missing := !seen[log] && !isClosed(log, t.Marks[log].Inode) // its successor is being made
		if missing && !t.gone[log] && h.Gone != nil {
			h.Gone(log)
		}
		t.gone[log] = missing
	}
}

func (t *Tail) read(ctx context.Context, log string, h Handler) error {
	file, err := os.Open(log)
	if err != nil {
		return err
	}
	defer file.Close() // only read
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if err := t.finish(ctx, log, inode(info), h); err != nil {
		return err
	}
	t.check(info, log, h)
	return t.rest(ctx, file, log, h)
}

// rest reads a file from its log's mark.
func (t *Tail) rest(ctx context.Context, file *os.File, log string, h Handler) error {
	for ctx.Err() == nil {
		m := t.Marks[log]
		n, err := file.ReadAt(t.buf, m.Pos)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		whole := bytes.LastIndexByte(t.buf[:n], '\n') + 1
		var long error
		if whole == 0 && n == len(t.buf) {
			whole = n // no record of ours
			long = fmt.Errorf("a line that is longer than a record can be begins at byte %d", m.Pos)
		}
		t.lines(t.buf[:whole], m.Pos, log, h)
		m.Pos += int64(whole)
		t.Marks[log] = m
		if n < len(t.buf) || long != nil {
			return long
		}
	}
	return ctx.Err()
}

// finish reads what is left of the closed pieces of a log whose live file is now another one.
func (t *Tail) finish(ctx context.Context, log string, live uint64, h Handler) error {
	m := t.Marks[log]
	if m.Inode == 0 || m.Inode == live {
		return nil
	}
	for _, path := range closedFrom(log, m.Inode) {
		if err := t.finishOne(ctx, path, log, h); err != nil {
			return err
		}
	}
	return nil
}

func (t *Tail) finishOne(ctx context.Context, path, log string, h Handler) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close() // only read
	info, err := file.Stat()
	if err != nil {
		return err
	}
	t.check(info, log, h)
	if err := t.rest(ctx, file, log, h); err != nil {
		return err
	}
	t.Marks[log] = Mark{} // the next file is read from its start, and is no surprise
	if h.Rolled != nil {
		h.Rolled(log)
	}
	return nil
}

// shards is the directory of a log's closed pieces (package audit), beside it.
func shards(log string) string { return filepath.Join(filepath.Dir(log), "shards") }

// closedFrom returns the closed pieces of a log, from the one with that inode on, in order.
func closedFrom(log string, ino uint64) []string {
	entries, err := os.ReadDir(shards(log)) // sorted: names begin with sequence numbers
	if err != nil {
		return nil // there are none
	}
	var out []string
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || filepath.Ext(e.Name()) != ".jsonl" {
			continue
		}
		if len(out) > 0 || inode(info) == ino {
			out = append(out, filepath.Join(shards(log), e.Name()))
		}
	}
	return out
}

func isClosed(log string, ino uint64) bool { return ino != 0 && len(closedFrom(log, ino)) > 0 }

// check sees to it that the mark is in the file. A log that got shorter was cut (the logger takes back what a
// full disk took half of) and is read on from its end; another file is read from its start.
func (t *Tail) check(info os.FileInfo, log string, h Handler) {
	m := t.Marks[log]
	now := inode(info)
	switch {
	case m.Inode != 0 && m.Inode != now:
		m.Pos = 0
		h.moved(log, 0, true)
	case info.Size() < m.Pos:
		m.Pos = info.Size()
		h.moved(log, m.Pos, false)
	}
	m.Inode = now
	t.Marks[log] = m
}

func (h Handler) moved(log string, size int64, replaced bool) {
	if h.Moved != nil {
		h.Moved(log, size, replaced)
	}
}

// inode returns 0 where it is not known.
func inode(info os.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Ino
	}
	return 0
}

// lines hands on the lines of part, which begins at off and holds whole lines, that hold what was asked for.
func (t *Tail) lines(part []byte, off int64, log string, h Handler) {
	for len(part) > 0 {
		line, rest, _ := bytes.Cut(part, []byte{'\n'})
		for _, w := range t.want {
			if bytes.Contains(line, w) {
				h.Line(line, log, off)
				break
			}
		}
		off += int64(len(line)) + 1
		part = rest
	}
}
