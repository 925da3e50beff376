// Package outlog keeps the last bytes of a command's output in files of a bounded size, for readers who come later
// and at their own pace. The writer never waits for them: what a reader was too slow for is counted and gone.
//
// It outlives its writer: whoever opens the files of one that was killed finds every byte that Splice had taken from a
// pipe, each under its stream, and goes on behind them. Bytes move from the pipe to the file inside of one system call,
// and the file's length is the count of them; what stream they are of is written down before.
package outlog

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Streams.
const (
	Stdout = 1
	Stderr = 2
)

const (
	maxChunks = 4096      // however small they are: they are kept track of in memory
	maxChunk  = 32 << 10  // bytes that a reader gets at once
	punchStep = 256 << 10 // bytes that have been dropped and still take room, at most
	page      = 4096      // of a file system: less is not given back
)

// chunk is a piece of one stream. Offsets count all bytes that were ever written.
type chunk struct {
	number   uint64 // of all chunks, from 1
	from, to int64
	stream   int
}

// Log is one command's output. Safe for concurrent use.
type Log struct {
	file  *os.File // as long as all bytes that were ever written; those that are not kept are a hole
	index *os.File // where chunks begin, see index.go
	size  int64

	mu      sync.Mutex
	chunks  []chunk       // guarded by mu; what is kept, in order; the last may be empty
	end     int64         // guarded by mu
	punched int64         // guarded by mu; the bytes before it take no room
	ended   bool          // guarded by mu; nothing more comes
	more    chan struct{} // guarded by mu; closed at the next change
}

// Create makes a log in a new file at path, and one beside it, which holds size bytes and some at most.
func Create(path string, size int64) (*Log, error) {
	return open(path, size, os.O_CREATE|os.O_EXCL)
}

// Open opens a log that Create made, to go on with it. Nobody else may write to it.
func Open(path string, size int64) (*Log, error) {
	l, err := open(path, size, 0)
	if err != nil {
		return nil, err
	}
	if err := l.load(); err != nil {
		l.Close() // nothing was written
		return nil, fmt.Errorf("opening a command's output: %w", err)
	}
	return l, nil
}

func open(path string, size int64, flags int) (*Log, error) {
	f, err := os.OpenFile(path, os.O_RDWR|flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("keeping a command's output: %w", err)
	}
	index, err := os.OpenFile(path+indexSuffix, os.O_RDWR|flags, 0o600)
	if err != nil {
		f.Close() // nothing was written
		return nil, fmt.Errorf("keeping a command's output: %w", err)
	}
	return &Log{file: f, index: index, size: size, more: make(chan struct{})}, nil
}

// Remove removes the files of the log at path; one that is not there is no error.
func Remove(path string) error {
	var errs []error
	for _, p := range []string{path, path + indexSuffix} {
		if err := os.Remove(p); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Write adds p to the stream. It drops the oldest bytes where there is no room.
func (l *Log) Write(stream int, p []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(p) > 0 {
		room, err := l.begin(stream)
		if err != nil {
			return fmt.Errorf("keeping a command's output: %w", err)
		}
		n, err := l.file.WriteAt(p[:min(int64(len(p)), room)], l.end)
		l.grown(int64(n))
		if err != nil {
			return fmt.Errorf("keeping a command's output: %w", err)
		}
		p = p[n:]
	}
	return nil
}

// Splice adds what lies in a pipe to the stream without reading it: a process that is killed in the middle has taken
// from the pipe what it has kept, and nothing else. It does not wait: it returns EAGAIN where there is nothing, and 0
// where there never will be.
func (l *Log) Splice(stream, pipe int) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	room, err := l.begin(stream)
	if err != nil {
		return 0, fmt.Errorf("keeping a command's output: %w", err)
	}
	to, err := l.file.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("keeping a command's output: %w", err)
	}
	at, n := l.end, int64(0)
	var spliceErr error
	err = to.Control(func(fd uintptr) {
		n, spliceErr = unix.Splice(pipe, nil, int(fd), &at, int(room), unix.SPLICE_F_NONBLOCK)
	})
	if n > 0 {
		l.grown(n)
	}
	if err := errors.Join(err, spliceErr); err != nil {
		return 0, fmt.Errorf("keeping a command's output: %w", err)
	}
	return int(n), nil
}

// begin makes sure that what is written next is of the stream, and says how much of it there may be. Call it with mu
// held.
func (l *Log) begin(stream int) (room int64, err error) {
	most := min(maxChunk, l.size)
	last := len(l.chunks) - 1
	switch {
	case last < 0:
		l.chunks = append(l.chunks, chunk{number: 1, stream: stream, from: l.end, to: l.end})
	case l.chunks[last].from == l.end: // nothing came
		if l.chunks[last].stream == stream {
			return most, l.makeRoom(most)
		}
		l.chunks[last].stream = stream
	case l.chunks[last].stream == stream && l.chunks[last].to-l.chunks[last].from < most:
		room = most - (l.chunks[last].to - l.chunks[last].from)
		return room, l.makeRoom(room)
	default:
		l.chunks = append(l.chunks, chunk{number: l.chunks[last].number + 1, stream: stream, from: l.end, to: l.end})
	}
	if err := l.note(l.chunks[len(l.chunks)-1]); err != nil {
		return 0, err
	}
	return most, l.makeRoom(most)
}

// makeRoom drops what is too much when n more bytes have come. Call it with mu held.
func (l *Log) makeRoom(n int64) error {
	drop := 0
	for drop < len(l.chunks)-1 && (l.end+n-l.chunks[drop].from > l.size || len(l.chunks)-drop > maxChunks) {
		drop++
	}
	l.chunks = append(l.chunks[:0], l.chunks[drop:]...)
	whole := l.chunks[0].from / page * page
	if whole-l.punched < punchStep {
		return nil
	}
	to, err := l.file.SyscallConn()
	if err != nil {
		return err
	}
	var punchErr error
	err = to.Control(func(fd uintptr) {
		punchErr = unix.Fallocate(int(fd), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, l.punched, whole-l.punched)
	})
	if err := errors.Join(err, punchErr); err != nil {
		return fmt.Errorf("giving back the room of old output: %w", err)
	}
	l.punched = whole
	return nil
}

// grown notes that n bytes have come. Call it with mu held.
func (l *Log) grown(n int64) {
	l.chunks[len(l.chunks)-1].to += n
	l.end += n
	l.changed()
}

func (l *Log) changed() {
	close(l.more)
	l.more = make(chan struct{})
}

// End says that nothing more comes.
func (l *Log) End() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	l.changed()
}

// Written is how many bytes were ever written: the place behind the last.
func (l *Log) Written() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.end
}

// Close closes the files; readers get an error.
func (l *Log) Close() error { return errors.Join(l.file.Close(), l.index.Close()) }

// Piece is what a reader gets: bytes of one stream, after Lost bytes of both that are gone. Where the last bytes of all
// are gone there are none.
type Piece struct {
	Stream int
	Data   []byte
	Lost   int64
}

// ErrEnded says that there is no more.
var ErrEnded = errors.New("the output has ended")

// Next waits for what follows pos, which is 0 for the first byte of all, and returns the place behind it. It returns
// ErrEnded behind the last.
func (l *Log) Next(ctx context.Context, pos int64) (Piece, int64, error) {
	for {
		p, next, more, err := l.after(pos)
		if err != nil || next > pos {
			return p, next, err
		}
		select {
		case <-more:
		case <-ctx.Done():
			return Piece{}, pos, ctx.Err()
		}
	}
}

func (l *Log) after(pos int64) (p Piece, next int64, more <-chan struct{}, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.chunks {
		if c.to <= pos {
			continue
		}
		if c.from > pos {
			p.Lost, pos = c.from-pos, c.from
		}
		p.Stream, p.Data = c.stream, make([]byte, c.to-pos)
		if _, err := l.file.ReadAt(p.Data, pos); err != nil {
			return p, pos, nil, fmt.Errorf("reading a command's output: %w", err)
		}
		return p, c.to, nil, nil
	}
	switch {
	case !l.ended:
		return p, pos, l.more, nil
	case pos < l.end:
		return Piece{Lost: l.end - pos}, l.end, nil, nil
	}
	return p, pos, nil, ErrEnded
}
