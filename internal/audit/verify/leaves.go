package verify

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"runtime"

	"tagout/internal/audit"
)

// piece is one shard with the leaves of its lines.
type piece struct {
	audit.Shard
	name   string // below the daemon's directory
	leaves []audit.Hash
	ends   []int64 // offset behind each line's end
	tail   int64   // bytes behind the last whole line
	absent bool    // encrypted, and there is no identity: what it holds is known by the kept hashes
	count  uint64  // lines; of an absent one as far as the next piece says
}

// offset is where a line begins.
func (p *piece) offset(i int) int64 {
	if i == 0 || len(p.ends) == 0 {
		return 0
	}
	return p.ends[i-1]
}

// chunk is a part of a file that holds whole lines.
type chunk struct {
	lines  []byte
	base   int64
	leaves []audit.Hash
	ends   []int64
	done   chan struct{}
}

const chunkBytes = 1 << 20

// hashLines computes the leaves of all lines of r, with as many goroutines as there are processors. each is called with
// the chunks in order; an error of its ends the reading.
func hashLines(r io.Reader, p *piece, each func(*chunk) error) error {
	work := make(chan *chunk, runtime.NumCPU())
	order := make(chan *chunk, 2*runtime.NumCPU())
	for range runtime.NumCPU() {
		go func() {
			var h audit.LeafHasher
			for c := range work {
				c.hash(&h)
				close(c.done)
			}
		}()
	}
	failed := make(chan error, 1)
	go func() {
		defer close(order)
		defer close(work)
		failed <- split(r, p, func(c *chunk) { order <- c; work <- c })
	}()
	var err error
	for c := range order {
		<-c.done
		p.count += uint64(len(c.leaves))
		if err == nil {
			err = each(c)
		}
	}
	return errors.Join(err, <-failed)
}

// split reads r in chunks of whole lines.
func split(r io.Reader, p *piece, each func(*chunk)) error {
	base, rest := int64(0), []byte(nil)
	for {
		buf := make([]byte, len(rest)+chunkBytes)
		n := copy(buf, rest)
		k, err := io.ReadFull(r, buf[n:])
		buf = buf[:n+k]
		whole := bytes.LastIndexByte(buf, '\n') + 1
		if whole > 0 {
			each(&chunk{lines: buf[:whole], base: base, done: make(chan struct{})})
			base += int64(whole)
		}
		rest = buf[whole:]
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			p.tail = int64(len(rest))
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading %s: %w", p.Path, err)
		}
	}
}

func (c *chunk) hash(h *audit.LeafHasher) {
	guess := len(c.lines) / 256
	c.leaves, c.ends = make([]audit.Hash, 0, guess), make([]int64, 0, guess)
	for begin := 0; begin < len(c.lines); {
		end := begin + bytes.IndexByte(c.lines[begin:], '\n')
		c.leaves = append(c.leaves, h.Line(c.lines[begin:end]))
		c.ends = append(c.ends, c.base+int64(end)+1)
		begin = end + 1
	}
}
