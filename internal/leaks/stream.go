package leaks

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
)

// readBlock is how much of a stream is searched at once, in bytes; blocks overlap by what the longest key takes.
const readBlock = 256 << 10

var readBlocks = sync.Pool{New: func() any { return new([readBlock]byte) }}

// Found is the error of a guarded stream in which something looks like a key.
type Found struct{ Finding }

func (f *Found) Error() string {
	return fmt.Sprintf("line %d looks like a long-lived key (rule %s)", f.Line, f.Rule)
}

// Read returns what looks like a key in what r gives, up to its end. Offsets are into the whole stream.
func (d *Detector) Read(r io.Reader) ([]Finding, error) {
	var out []Finding
	_, err := io.Copy(io.Discard, d.Guard(r, func(f Finding) bool {
		out = append(out, f)
		return true
	}))
	return out, err
}

// Guard returns a reader of what r gives that hands nothing on before it was searched, as a key whole: a finding that
// pass, which may be nil, does not let pass ends it with a *Found, and nothing of that key was handed on. pass is asked
// once for each finding, by the goroutine that reads.
func (d *Detector) Guard(r io.Reader, pass func(Finding) bool) io.Reader {
	return &guarded{d: d, r: r, pass: pass}
}

// guarded holds back the end of what it has read, because a key may go on behind it.
type guarded struct {
	d    *Detector
	r    io.Reader
	pass func(Finding) bool

	begun, wide  bool // wide: UTF-16, as Windows writes it
	block        *[readBlock]byte
	buf          []byte // of block: what was read and not handed on; it begins at offset and line
	ready        int    // bytes of buf that may be handed on
	offset, line int
	told         []Finding // of buf, with offsets into the stream
	err          error     // io.EOF when buf is all that is left
}

func (g *guarded) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for g.ready == 0 {
		if g.err != nil {
			g.release()
			return 0, g.err
		}
		g.fill()
	}
	n := copy(p, g.buf[:g.ready])
	g.advance(n)
	return n, nil
}

// fill reads and searches the next block.
func (g *guarded) fill() {
	if g.block == nil {
		g.block = readBlocks.Get().(*[readBlock]byte)
	}
	kept := copy(g.block[:], g.buf)
	n, err := io.ReadFull(g.r, g.block[kept:])
	g.buf = g.block[:kept+n]
	for _, f := range g.find() {
		f.Line, f.Start, f.End = f.Line+g.line, f.Start+g.offset, f.End+g.offset
		if slices.ContainsFunc(g.told, func(o Finding) bool { return o.Rule == f.Rule && o.Start == f.Start }) {
			continue
		}
		g.told = append(g.told, f)
		if g.pass == nil || !g.pass(f) {
			g.buf, g.err = nil, &Found{f}
			return
		}
	}
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		g.ready, g.err = len(g.buf), io.EOF
	case err != nil:
		g.buf, g.err = nil, err
	default:
		g.ready = len(g.buf) - block
	}
}

// find searches what is there. UTF-16 is read as if it were ASCII: keys are.
func (g *guarded) find() []Finding {
	if !g.begun {
		g.begun = true
		g.wide = bytes.HasPrefix(g.buf, []byte{0xff, 0xfe}) || bytes.HasPrefix(g.buf, []byte{0xfe, 0xff})
	}
	if !g.wide {
		return g.d.Find(string(g.buf))
	}
	out := g.d.Find(string(bytes.ReplaceAll(g.buf, []byte{0}, nil)))
	for i := range out { // about where they are
		out[i].Start, out[i].End = 2*out[i].Start, min(2*out[i].End, len(g.buf))
	}
	return out
}

// advance notes that n bytes were handed on.
func (g *guarded) advance(n int) {
	g.offset, g.line = g.offset+n, g.line+bytes.Count(g.buf[:n], []byte{'\n'})
	g.buf, g.ready = g.buf[n:], g.ready-n
	g.told = slices.DeleteFunc(g.told, func(f Finding) bool { return f.End <= g.offset })
}

// release gives the block back, wiped.
func (g *guarded) release() {
	if g.block != nil {
		clear(g.block[:])
		readBlocks.Put(g.block)
		g.block, g.buf = nil, nil
	}
}
