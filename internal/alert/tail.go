package alert

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"

	"tagout/internal/audit"
)

// readChunk is how much of a log is read at a time. No record is longer.
const readChunk = 1 << 20

// One of these is in every line that matters: the logger writes no spaces, and quotes within a text are escaped.
var (
	denied = []byte(`"outcome":"` + audit.OutcomeDeny + `"`)
	gap    = []byte(`"event":"` + audit.EventGap + `"`)
)

// mark is how far a log was read.
type mark struct {
	Inode uint64 `json:"ino"` // 0: unknown
	Pos   int64  `json:"pos"`
}

// tail reads what is added to the logs. Only the follower's goroutine uses it.
type tail struct {
	dir    string
	marks  map[string]mark // log -> how far it was read
	broken map[string]bool // logs whose trouble was told
	buf    []byte
}

func newTail(dir string, marks map[string]mark) *tail {
	t := &tail{dir: dir, marks: map[string]mark{}, broken: map[string]bool{}, buf: make([]byte, readChunk)}
	for log, m := range marks {
		t.marks[log] = m
	}
	return t
}

// poll calls take for each denied attempt and each gap that was added, and moved for each log that was cut or replaced. A
// log that cannot be read is tried again the next time. The record is take's only during the call.
func (t *tail) poll(ctx context.Context, take func(*audit.Record, place), moved func(string, int64, bool), logger *slog.Logger) error {
	logs, err := filepath.Glob(filepath.Join(t.dir, "*", "*.jsonl"))
	if err != nil {
		return err
	}
	for _, log := range logs {
		err := t.read(ctx, log, take, moved)
		if err != nil && !t.broken[log] {
			logger.Error("following an audit log; trying again", "log", log, "error", err)
		}
		t.broken[log] = err != nil
	}
	return nil
}

// inode returns 0 where it is not known.
func inode(info os.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Ino
	}
	return 0
}

func (t *tail) read(ctx context.Context, log string, take func(*audit.Record, place), moved func(string, int64, bool)) error {
	file, err := os.Open(log)
	if err != nil {
		return err
	}
	defer file.Close() // only read
	if err := t.check(file, log, moved); err != nil {
		return err
	}
	for ctx.Err() == nil {
		m := t.marks[log]
		n, err := file.ReadAt(t.buf, m.Pos)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		whole := bytes.LastIndexByte(t.buf[:n], '\n') + 1
		if whole == 0 && n == len(t.buf) {
			whole = n // no record of ours
			err = fmt.Errorf("a line that is longer than a record can be begins at byte %d", m.Pos)
		}
		lines(t.buf[:whole], m.Pos, log, take)
		m.Pos += int64(whole)
		t.marks[log] = m
		if n < len(t.buf) || err != nil && !errors.Is(err, io.EOF) {
			return noEOF(err)
		}
	}
	return nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// check sees to it that the mark is in the file. A log that got shorter was cut (the logger takes back what a
// full disk took half of) and is read on from its end; another file is read from its start.
func (t *tail) check(file *os.File, log string, moved func(string, int64, bool)) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	m := t.marks[log]
	now := inode(info)
	switch {
	case m.Inode != 0 && m.Inode != now:
		m.Pos = 0
		moved(log, 0, true)
	case info.Size() < m.Pos:
		m.Pos = info.Size()
		moved(log, m.Pos, false)
	}
	m.Inode = now
	t.marks[log] = m
	return nil
}

// lines calls take for each denied attempt and each gap in chunk, which begins at off and holds whole lines.
func lines(chunk []byte, off int64, log string, take func(*audit.Record, place)) {
	for len(chunk) > 0 {
		line, rest, _ := bytes.Cut(chunk, []byte{'\n'})
		var r audit.Record
		matters := bytes.Contains(line, denied) || bytes.Contains(line, gap)
		if matters && json.Unmarshal(line, &r) == nil && (r.Outcome == audit.OutcomeDeny || r.Event == audit.EventGap) {
			take(&r, place{log, off})
		}
		off += int64(len(line)) + 1
		chunk = rest
	}
}
