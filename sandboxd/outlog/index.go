package outlog

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
)

// indexSuffix is the name of the second file: a ring of maxChunks places, each of which says where one chunk begins
// and of what stream it is. It ends where the next one begins, or the file ends.
const indexSuffix = ".index"

// placeSize is the size of a place: the chunk's number, where it begins, and its stream, in 8 bytes each. No place lies
// in two pages.
const placeSize = 32

// note writes a chunk's place: whole or not at all, where this process is killed meanwhile. Call it with mu held.
func (l *Log) note(c chunk) error {
	var b [placeSize]byte
	binary.LittleEndian.PutUint64(b[:], c.number)
	binary.LittleEndian.PutUint64(b[8:], uint64(c.from)) // not negative
	binary.LittleEndian.PutUint64(b[16:], uint64(c.stream))
	_, err := l.index.WriteAt(b[:], int64(c.number%maxChunks)*placeSize)
	return err
}

// load finds out what is kept. What the index does not say is counted as lost.
func (l *Log) load() error {
	info, err := l.file.Stat()
	if err != nil {
		return err
	}
	raw, err := io.ReadAll(io.LimitReader(l.index, maxChunks*placeSize))
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end = info.Size()
	var all []chunk
	for i := 0; i+placeSize <= len(raw); i += placeSize {
		c := chunk{number: binary.LittleEndian.Uint64(raw[i:]), stream: int(binary.LittleEndian.Uint64(raw[i+16:]) & 3)}
		from := binary.LittleEndian.Uint64(raw[i+8:])
		if c.number == 0 {
			continue // a place that was never used
		}
		if c.number%maxChunks != uint64(i/placeSize) || from > math.MaxInt64 || int64(from) > l.end || c.stream != Stdout && c.stream != Stderr {
			return fmt.Errorf("its index is damaged at %d", i)
		}
		c.from = int64(from)
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b chunk) int { return cmp.Compare(a.number, b.number) })
	to := l.end
	for i := len(all) - 1; i >= 0; i-- {
		all[i].to = to
		if all[i].from > to {
			return errors.New("its index is damaged")
		}
		to = all[i].from
	}
	for len(all) > 1 && l.end-all[0].from > l.size {
		all = all[1:]
	}
	l.chunks = all
	return nil
}
