package proxy

import (
	"crypto/tls"
	"encoding/binary"
	"net"
	"sync"

	"golang.org/x/net/http2"
)

// h2Tap is what the HTTP server reads as HTTP/2: what is inside a TLS connection. It counts what the client asks
// for and what the server says to that: the server refuses malformed frames and heads by itself, and tells nobody
// (invariant 7).
type h2Tap struct {
	net.Conn // a *replayConn of the *tls.Conn: it begins with the preface, which was read already
	layer    *layer

	mu     sync.Mutex
	in     frames // guarded by mu: from the client
	out    frames // guarded by mu: from the server
	newest uint32 // guarded by mu: stream that the client opened
	opened int64  // guarded by mu: streams
	full   int64  // guarded by mu: streams that the server had no room for
	away   bool   // guarded by mu: the server has said that it closes the connection
	fault  string // guarded by mu: the error for which; "" where there is none
}

func newH2Tap(tc *tls.Conn, l *layer) *h2Tap {
	preface := &replayConn{Conn: tc, first: []byte(http2.ClientPreface)}
	return &h2Tap{Conn: preface, layer: l, in: frames{skip: len(http2.ClientPreface)}}
}

// Read implements net.Conn.
func (t *h2Tap) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.in.feed(p[:n], t.asked)
	return n, err
}

// Write implements net.Conn.
func (t *h2Tap) Write(p []byte) (int, error) {
	t.mu.Lock()
	t.out.feed(p, t.answered)
	t.mu.Unlock()
	return t.Conn.Write(p)
}

// Close tells that the HTTP server is done. The socket belongs to the conn, which closes it.
func (t *h2Tap) Close() error { return t.layer.Close() }

// asked takes a frame of the client. t.mu is held.
func (t *h2Tap) asked(kind http2.FrameType, stream uint32, _ []byte) {
	if kind == http2.FrameHeaders && stream > t.newest { // an older one: trailers
		t.newest = stream
		t.opened++
	}
}

// answered takes a frame of the server. t.mu is held.
func (t *h2Tap) answered(kind http2.FrameType, _ uint32, begin []byte) {
	switch {
	case kind == http2.FrameRSTStream && len(begin) >= 4:
		if http2.ErrCode(binary.BigEndian.Uint32(begin)) == http2.ErrCodeRefusedStream {
			t.full++
		}
	case kind == http2.FrameGoAway && len(begin) >= 8:
		t.away = true
		if code := http2.ErrCode(binary.BigEndian.Uint32(begin[4:])); code != http2.ErrCodeNo {
			t.fault = code.String()
		}
	}
}

// seen returns how many streams the client opened, how many of them the server had no room for, and the error
// for which it gave the connection up, "" where it did not.
func (t *h2Tap) seen() (opened, full int64, fault string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.opened, t.full, t.fault
}

// leaving says whether the server was closing the connection.
func (t *h2Tap) leaving() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.away
}

// Layout of a frame (RFC 9113, 4.1), and how much of a payload is looked at: the codes of RST_STREAM and GOAWAY.
const (
	frameHead  = 9
	frameBegin = 8
)

// frames reads a stream of HTTP/2 frames in whatever pieces it comes. It keeps a few bytes of each.
type frames struct {
	skip int // bytes before the next frame begins
	want int // of head: what has to come together
	head []byte
}

// feed calls on for every frame in the next bytes, with the beginning of its payload. A HEADERS frame counts
// as soon as its head is there.
func (f *frames) feed(p []byte, on func(kind http2.FrameType, stream uint32, begin []byte)) {
	for len(p) > 0 {
		if f.skip > 0 {
			n := min(f.skip, len(p))
			f.skip -= n
			p = p[n:]
			continue
		}
		if len(f.head) == 0 {
			f.want = frameHead
		}
		n := min(f.want-len(f.head), len(p))
		f.head = append(f.head, p[:n]...)
		p = p[n:]
		if len(f.head) < f.want {
			return
		}
		length, kind := int(binary.BigEndian.Uint32(f.head)>>8), http2.FrameType(f.head[3])
		more := 0
		if kind == http2.FrameRSTStream || kind == http2.FrameGoAway {
			more = min(length, frameBegin)
		}
		if f.want = frameHead + more; len(f.head) < f.want {
			continue
		}
		on(kind, binary.BigEndian.Uint32(f.head[5:])&(1<<31-1), f.head[frameHead:])
		f.skip, f.head = length-more, f.head[:0]
	}
}
