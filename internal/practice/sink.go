package practice

import (
	"bufio"
	"encoding/hex"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

// maxLine bounds a line of the tick protocol.
const maxLine = 4096

// Stream is what one TCP connection brought to the sink. Times are CLOCK_MONOTONIC, 0 where not yet.
//
// The sender's first line is "ticks TAG [TOKEN]", the token as it is or in hex, "bulk TAG [VIA]" or "slow TAG [VIA]".
// After "ticks", each line is "NUMBER [EAGAIN [WORK]]": a number one higher than the last, how often the sender was refused a new process,
// and how much work of its own it has done. After "bulk" and "slow" anything goes; of "slow" the sink reads
// little, so that the rest waits at the sender, and counts what its kernel received. The sink never answers.
type Stream struct {
	Kind      string // "ticks", "bulk", "slow" or "" where the first line is none of them
	Tag       string
	Token     string // of ticks
	Via       string // of bulk and slow: how the sender says that it came
	Opened    time.Duration
	LastByte  time.Duration
	Closed    time.Duration
	Bytes     int64
	Ticks     int64 // lines with a number
	LastTick  int64 // the highest number
	Missing   int64 // numbers that were skipped
	Refusals  int64 // the highest EAGAIN
	Work      int64 // the highest WORK
	Malformed int64
}

// Sink is the TCP server at ticks.vendor.test:7000.
type Sink struct {
	mu      sync.Mutex
	streams []*Stream         // guarded by mu, as are the streams
	conns   map[net.Conn]bool // guarded by mu
	closed  bool              // guarded by mu
}

func (n *Internet) startSink() error {
	l, err := n.listen(n.TicksAddr(), PortTicks)
	if err != nil {
		return err
	}
	n.Sink = &Sink{conns: map[net.Conn]bool{}}
	n.undo = append(n.undo, n.Sink.close, closing(l))
	go accept(l, n.Sink.take)
	return nil
}

// Streams returns copies of the streams with the tag, in the order in which they were opened.
func (s *Sink) Streams(tag string) []Stream {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Stream
	for _, st := range s.streams {
		if st.Tag == tag {
			out = append(out, *st)
		}
	}
	return out
}

// LastByte is when the last byte of any stream with the tag arrived, 0 where none did.
func (s *Sink) LastByte(tag string) time.Duration {
	var last time.Duration
	for _, st := range s.Streams(tag) {
		last = max(last, st.LastByte)
	}
	return last
}

// Token is the token that an agent with the tag gave away, "" where none did.
func (s *Sink) Token(tag string) string {
	for _, st := range s.Streams(tag) {
		if st.Token != "" {
			return st.Token
		}
	}
	return ""
}

// take registers and reads a connection; it reports false after close.
func (s *Sink) take(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	st := &Stream{Opened: Now()}
	s.streams = append(s.streams, st)
	s.conns[c] = true
	go func() {
		s.read(st, c)
		s.mu.Lock()
		defer s.mu.Unlock()
		st.Closed = Now()
		delete(s.conns, c)
		c.Close() // at its end
	}()
	return true
}

func (s *Sink) read(st *Stream, c net.Conn) {
	br := bufio.NewReaderSize(stamped{s, st, c}, 256<<10)
	hello, err := line(br)
	if err != nil {
		return
	}
	kind := s.greet(st, strings.Fields(hello))
	switch kind {
	case "slow":
		s.readSlowly(st, c)
		return
	case "", "bulk":
		io.Copy(io.Discard, br) // counted by the reader
		return
	}
	for {
		text, err := line(br)
		if err != nil {
			return
		}
		s.tick(st, strings.Fields(text))
	}
}

// greet takes a first line and returns the kind of stream that it opens, "" where it opens none.
func (s *Sink) greet(st *Stream, f []string) string {
	if len(f) < 2 || f[0] != "ticks" && f[0] != "bulk" && f[0] != "slow" {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Kind, st.Tag = f[0], f[1]
	switch {
	case len(f) > 2 && st.Kind == "ticks":
		st.Token = f[2]
		if raw, err := hex.DecodeString(f[2]); err == nil { // a thief hides it
			st.Token = string(raw)
		}
	case len(f) > 2:
		st.Via = f[2]
	}
	return st.Kind
}

func (s *Sink) tick(st *Stream, f []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var v [3]int64 // number, refusals, work
	var err error
	for i := 0; i < min(len(f), len(v)) && err == nil; i++ {
		v[i], err = strconv.ParseInt(f[i], 10, 64)
	}
	if len(f) == 0 || err != nil {
		st.Malformed++
		return
	}
	n, refusals := v[0], v[1]
	if st.Ticks > 0 && n > st.LastTick+1 {
		st.Missing += n - st.LastTick - 1
	}
	st.Ticks++
	st.LastTick = max(st.LastTick, n)
	st.Refusals = max(st.Refusals, refusals)
	st.Work = max(st.Work, v[2])
}

func (s *Sink) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for c := range s.conns {
		c.Close() // at its end
	}
	return nil
}

// stamped notes bytes and time of each read.
type stamped struct {
	s  *Sink
	st *Stream
	c  net.Conn
}

func (r stamped) Read(p []byte) (int, error) {
	n, err := r.c.Read(p)
	if n > 0 {
		r.s.mu.Lock()
		r.st.LastByte = Now()
		r.st.Bytes += int64(n)
		r.s.mu.Unlock()
	}
	return n, err
}

// line reads one line of at most maxLine bytes, without its end.
func line(br *bufio.Reader) (string, error) {
	var out []byte
	for {
		b, err := br.ReadByte()
		if err != nil {
			return "", err
		}
		if b == '\n' {
			return string(out), nil
		}
		if len(out) == maxLine {
			return "", bufio.ErrTooLong
		}
		out = append(out, b)
	}
}

// accept hands every connection of l to take until l is closed or take refuses.
func accept(l net.Listener, take func(net.Conn) bool) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		if !take(c) {
			c.Close() // shutting down
			return
		}
	}
}
