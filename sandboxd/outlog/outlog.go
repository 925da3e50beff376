// Package outlog keeps the last bytes of a command's output in a file of a bounded size, for readers who come later
// and at their own pace. The writer never waits for them: what a reader was too slow for is counted and gone.
package outlog

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
)

// Streams.
const (
	Stdout = 1
	Stderr = 2
)

const (
	maxChunks = 4096     // however small they are: they are kept track of in memory
	maxChunk  = 32 << 10 // bytes that a reader gets at once
)

// chunk is a piece of one stream. Offsets count all bytes that were ever written.
type chunk struct {
	from, to int64
	stream   int
}

// Log is one command's output. Safe for concurrent use.
type Log struct {
	file *os.File
	size int64

	mu     sync.Mutex
	chunks []chunk       // guarded by mu; what is kept, in order
	end    int64         // guarded by mu
	ended  bool          // guarded by mu; nothing more comes
	more   chan struct{} // guarded by mu; closed at the next change
}

// Create makes a log in a new file at path, which holds size bytes at most.
func Create(path string, size int64) (*Log, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("keeping a command's output: %w", err)
	}
	return &Log{file: f, size: size, more: make(chan struct{})}, nil
}

// Write adds p to the stream. It drops the oldest bytes where there is no room.
func (l *Log) Write(stream int, p []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(p) > 0 {
		n := min(int64(len(p)), maxChunk, l.size)
		l.makeRoom(n)
		if err := l.put(p[:n]); err != nil {
			return fmt.Errorf("keeping a command's output: %w", err)
		}
		if last := len(l.chunks) - 1; last >= 0 && l.chunks[last].stream == stream && l.chunks[last].to == l.end && l.end+n-l.chunks[last].from <= maxChunk {
			l.chunks[last].to += n
		} else {
			l.chunks = append(l.chunks, chunk{from: l.end, to: l.end + n, stream: stream})
		}
		l.end += n
		p = p[n:]
	}
	l.changed()
	return nil
}

// makeRoom drops what n more bytes would overwrite. Call it with mu held.
func (l *Log) makeRoom(n int64) {
	drop := 0
	for drop < len(l.chunks) && (l.end+n-l.chunks[drop].from > l.size || len(l.chunks)-drop >= maxChunks) {
		drop++
	}
	l.chunks = append(l.chunks[:0], l.chunks[drop:]...)
}

// put writes p behind the last byte; the file is a ring. Call it with mu held.
func (l *Log) put(p []byte) error {
	at := l.end % l.size
	first := min(int64(len(p)), l.size-at)
	_, err := l.file.WriteAt(p[:first], at)
	if err == nil && first < int64(len(p)) {
		_, err = l.file.WriteAt(p[first:], 0)
	}
	return err
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

// Close closes the file; readers get an error.
func (l *Log) Close() error { return l.file.Close() }

// Piece is what a reader gets: bytes of one stream, after Lost bytes of both that are gone.
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
		if err != nil || len(p.Data) > 0 {
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
		err := l.get(p.Data, pos)
		return p, c.to, nil, err
	}
	if l.ended {
		return p, pos, nil, ErrEnded
	}
	return p, pos, l.more, nil
}

func (l *Log) get(p []byte, pos int64) error {
	at := pos % l.size
	first := min(int64(len(p)), l.size-at)
	_, err := l.file.ReadAt(p[:first], at)
	if err == nil && first < int64(len(p)) {
		_, err = l.file.ReadAt(p[first:], 0)
	}
	if err != nil {
		return fmt.Errorf("reading a command's output: %w", err)
	}
	return nil
}
