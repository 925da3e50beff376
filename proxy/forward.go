package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tagout/internal/reason"
)

// Bounds of the HTTP client.
const (
	upstreamHandshake = 10 * time.Second
	upstreamIdle      = 90 * time.Second
	maxResponseHead   = 256 << 10
)

// What an HTTP/2 connection may keep in memory for bodies that somebody is slow to take.
const (
	h2Stream     = 512 << 10 // per stream and direction
	h2FromKid    = 1 << 20   // per connection
	h2FromServer = 2 << 20
)

// newClient returns an HTTP client for one connection and one rule. Nothing is shared between connections: an
// upstream socket carries one session's mark, and is counted for one connection and one rule. Servers are
// offered HTTP/2 where the kid speaks it: an HTTP/1.1 request may ask for an upgrade that HTTP/2 has not.
// Buffers of one that carries secrets keep what they held: it is closed soon.
func (p *Proxy) newClient(c *conn, h2, secret bool) *http.Transport {
	idle := upstreamIdle
	if secret {
		idle = secretIdle
	}
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dialFor(ctx) },
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			nc, err := c.dialFor(ctx)
			if err != nil {
				return nil, err
			}
			return c.secure(ctx, nc, h2)
		},
		DisableCompression: true, MaxIdleConnsPerHost: 1, MaxIdleConns: 4, IdleConnTimeout: idle,
		ExpectContinueTimeout: time.Second, MaxResponseHeaderBytes: maxResponseHead,
		Protocols: new(http.Protocols),
	}
	t.Protocols.SetHTTP1(true)
	if h2 {
		t.Protocols.SetHTTP2(true)
		t.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: h2Stream, MaxReceiveBufferPerConnection: h2FromServer}
		if secret {
			t.HTTP2.MaxEncoderHeaderTableSize = 1 // no fields are kept for later requests
		}
	}
	return t
}

// dialFor connects to the target of the exchange that ctx belongs to.
func (c *conn) dialFor(ctx context.Context) (*countedConn, error) {
	x, ok := ctx.Value(exchangeKey{}).(*exchange)
	if !ok {
		return nil, refusal{code: reason.Internal, detail: "a connection that no request asked for"}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	u, err := c.dial(ctx, x.target, x.rule, x.mark())
	if err != nil {
		return nil, err
	}
	return &countedConn{Conn: u.tcp, c: c, u: u}, nil
}

// secure speaks TLS to the server and makes sure that it is who it should be.
func (c *conn) secure(ctx context.Context, nc *countedConn, h2 bool) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, upstreamHandshake)
	defer cancel()
	tc := tls.Client(nc, &tls.Config{
		ServerName: nc.u.target.name, RootCAs: c.p.cfg.Roots, MinVersion: tls.VersionTLS12, NextProtos: protocols(h2),
	})
	if err := tc.HandshakeContext(ctx); err != nil {
		nc.Close() // already failing
		code := reason.UpstreamTLS
		if lost(err) {
			code = reason.DialFailed
		}
		return nil, refusal{code, oneLine(err), nc.u.rule}
	}
	return tc, nil
}

// lost says whether a handshake ended because the connection did, which says nothing about the server's certificate.
func lost(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout() || errors.As(err, new(syscall.Errno)) || errors.Is(err, io.EOF)
}

// protocols is what is offered by ALPN (RFC 7301).
func protocols(h2 bool) []string {
	if h2 {
		return []string{"h2", "http/1.1"}
	}
	return []string{"http/1.1"}
}

// send sends a judged request upstream. A failure becomes a response too, so that the kid learns why.
func (x *exchange) send(r *http.Request) *http.Response {
	m := newMask(x.swapped)
	resp, err := x.roundTrip(r)
	if err != nil {
		why := asRefusal(err)
		if cause := x.cause(); cause != nil {
			why = *cause
		} else if !errors.As(err, new(refusal)) {
			why.detail = "the upstream server did not answer: " + why.detail
		}
		why.detail = m.text(why.detail) // it may quote the server
		return x.refuse(why)
	}
	if why := x.fault(); why != nil { // the server has answered what it got of a request that is none
		resp.Body.Close() // refused
		return x.refuse(*why)
	}
	m.header(resp.Header)
	m.header(resp.Trailer) // the names that are announced
	if resp.StatusCode == http.StatusSwitchingProtocols {
		if !x.head.tunnel {
			resp.Body.Close() // refused
			return x.refuse(refusal{reason.AmbiguousHTTP, "the server switches protocols without being asked", x.rule})
		}
		return x.upgraded(resp, m)
	}
	dropHopFields(resp.Header)
	if m != nil {
		if why := x.uncompress(r, resp); why != nil {
			resp.Body.Close() // refused
			return x.refuse(*why)
		}
	}
	resp.Body = &answerBody{ReadCloser: resp.Body, x: x, mask: m, resp: resp}
	return resp
}

// dropHopFields takes out what a server says about its own connection (RFC 9110, 7.6.1): HTTP/2 has no place
// for it, and goproxy would take an answer that merely looks like an upgrade for one.
func dropHopFields(h http.Header) {
	for _, line := range h["Connection"] {
		for option := range strings.SplitSeq(line, ",") {
			h.Del(strings.TrimSpace(option))
		}
	}
	for _, name := range []string{"Connection", "Keep-Alive", "Proxy-Connection", "Transfer-Encoding", "Upgrade"} {
		h.Del(name)
	}
}

// answerBody counts an answer's body, masks secrets that come back in it, and notices when it ends early.
type answerBody struct {
	io.ReadCloser
	x    *exchange
	mask *mask
	resp *http.Response // its trailer is there when the body has ended
}

func (b *answerBody) Read(p []byte) (int, error) {
	n, err := b.mask.read(b.ReadCloser, p)
	b.x.down.Add(int64(n))
	switch {
	case errors.Is(err, io.EOF):
		b.mask.header(b.resp.Trailer)
	case err != nil:
		b.x.broken = err
	}
	return n, err
}

// responder passes an answer on as it comes: an answer of unknown length is flushed after every piece, so
// that events and progress lines reach the kid at once. Bodies are never collected.
type responder struct {
	http.ResponseWriter
	x        *exchange
	stream   bool
	hijacked bool
	begun    atomic.Bool
}

// WriteHeader implements http.ResponseWriter.
func (w *responder) WriteHeader(status int) {
	w.x.status = status
	w.begun.Store(true)
	h := w.Header()
	if w.x.head.tunnel && status != http.StatusSwitchingProtocols {
		h.Set("Connection", "close") // what follows on the connection was never judged
	}
	if _, ok := h["Content-Type"]; !ok {
		h["Content-Type"] = nil // no guessing
	}
	w.stream = status >= http.StatusOK && h.Get("Content-Length") == ""
	w.ResponseWriter.WriteHeader(status)
	if w.stream {
		w.Flush()
	}
}

// Write implements http.ResponseWriter.
func (w *responder) Write(p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	if err == nil && w.stream {
		w.Flush()
	}
	return n, err
}

// Flush implements http.Flusher.
func (w *responder) Flush() {
	if f, ok := w.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}

var copyBufs = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// ReadFrom implements io.ReaderFrom, with a buffer that is used again.
func (w *responder) ReadFrom(r io.Reader) (int64, error) {
	buf := copyBufs.Get().(*[32 << 10]byte)
	defer copyBufs.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, buf[:])
}

// Hijack implements http.Hijacker: for goproxy, after a server agreed to a WebSocket.
func (w *responder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	nc, rw, err := w.ResponseWriter.(http.Hijacker).Hijack()
	w.hijacked = err == nil
	return nc, rw, err
}
