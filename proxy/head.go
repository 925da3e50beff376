package proxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"tagout/internal/reason"
)

// Bounds of what a client may make us hold before it is judged.
const (
	maxHead      = 64 << 10
	maxChunkLine = 1 << 10
	maxTrailer   = 8 << 10
)

// head is what the checker read of one request, in the client's own words, or why it refused it.
type head struct {
	method, target, host string
	authority            string // of an absolute-form target
	tunnel               bool   // CONNECT or a WebSocket: no request follows on this connection
	code                 reason.Code
	detail               string
}

type headState uint8

const (
	inHead headState = iota
	inBody
	inChunkLine
	inChunkData
	inChunkEnd
	inTrailer
	unjudged // behind CONNECT or an upgrade: bytes pass as they are
	refused  // nothing passes any more
)

// standIn goes to the HTTP server in place of a head that was refused, so that it answers in its turn, after
// the requests before it. The server never sees the refused bytes.
const standIn = "GET / HTTP/1.1\r\nHost: refused.invalid\r\nConnection: close\r\n\r\n"

// headConn stands between a client and an HTTP/1.1 server and lets only requests pass that can be read in
// one way (RFC 9112; the strict side wherever it leaves a choice). It hands over one head or body at a time,
// and keeps what each head said for the judge: take returns them in order.
type headConn struct {
	net.Conn

	// Owned by the goroutine that calls Read; the HTTP server has one at a time.
	state   headState
	in      []byte // received, not looked at yet, or a head that is not complete
	out     []byte // checked, not read yet
	scanned int    // how much of in was found harmless
	left    int64  // bytes of the body or chunk that are still to come
	size    int    // of the trailer so far
	buf     []byte

	mu      sync.Mutex
	waiting *sync.Cond
	heads   []head // guarded by mu: passed to the server, not taken yet
	open    int    // guarded by mu: requests passed and not finished
	aborted bool   // guarded by mu: the read deadline lies in the past
	closed  bool   // guarded by mu
	fault   *head  // guarded by mu: why a body was refused in its middle
}

func newHeadConn(c net.Conn, prefix []byte) *headConn {
	h := &headConn{Conn: c, in: bytes.Clone(prefix)}
	h.waiting = sync.NewCond(&h.mu)
	return h
}

// take returns the facts of the oldest request that was passed to the server.
func (h *headConn) take() (head, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.heads) == 0 {
		return head{}, false
	}
	first := h.heads[0]
	h.heads = h.heads[1:]
	return first, true
}

// finish tells that the oldest request was answered.
func (h *headConn) finish() {
	h.mu.Lock()
	h.open--
	h.mu.Unlock()
	h.waiting.Broadcast()
}

// rest returns what was received and not read, for whoever takes the connection over.
func (h *headConn) rest() []byte { return append(h.out, h.in...) }

// Read implements net.Conn.
func (h *headConn) Read(p []byte) (int, error) {
	for {
		switch {
		case len(p) == 0:
			return 0, nil
		case len(h.out) > 0:
			n := copy(p, h.out)
			h.out = h.out[n:]
			return n, nil
		case h.state == refused:
			return 0, io.EOF
		case h.state == unjudged && len(h.in) > 0:
			h.out, h.in = h.in, nil
			continue
		case h.state == unjudged:
			return h.Conn.Read(p)
		case (h.state == inBody || h.state == inChunkData) && len(h.in) == 0:
			n, err := h.Conn.Read(p[:min(int64(len(p)), h.left)])
			h.pass(int64(n))
			return n, err
		}
		if h.step() {
			continue
		}
		if err := h.fill(); err != nil {
			return 0, err
		}
	}
}

// fill waits for more bytes. The end of a stream whose last request is still being answered is held back:
// the server would take it for a client that has gone, but a client may well close its half early.
func (h *headConn) fill() error {
	if h.buf == nil {
		h.buf = make([]byte, 4<<10)
	}
	n, err := h.Conn.Read(h.buf)
	h.in = append(h.in, h.buf[:n]...)
	switch {
	case n > 0:
		return nil
	case errors.Is(err, io.EOF) && h.state == inHead && len(h.in) == 0:
		return h.hold()
	}
	return err
}

func (h *headConn) hold() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.open > 0 && !h.aborted && !h.closed {
		h.waiting.Wait()
	}
	if h.aborted {
		return os.ErrDeadlineExceeded
	}
	return io.EOF
}

// SetReadDeadline implements net.Conn.
func (h *headConn) SetReadDeadline(t time.Time) error {
	h.mu.Lock()
	h.aborted = !t.IsZero() && !t.After(time.Now())
	h.mu.Unlock()
	h.waiting.Broadcast()
	return h.Conn.SetReadDeadline(t)
}

// SetDeadline implements net.Conn.
func (h *headConn) SetDeadline(t time.Time) error {
	return errors.Join(h.SetReadDeadline(t), h.SetWriteDeadline(t))
}

// wake ends a Read that holds the end of the stream back.
func (h *headConn) wake() {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.waiting.Broadcast()
}

// step looks at what is in h.in. It returns false where more bytes are needed.
func (h *headConn) step() bool {
	switch h.state {
	case inHead:
		return h.stepHead()
	case inBody, inChunkData:
		n := min(int64(len(h.in)), h.left)
		h.release(int(n))
		h.pass(n)
		return true
	case inChunkEnd:
		if len(h.in) < 2 {
			return false
		}
		if string(h.in[:2]) != "\r\n" {
			return h.refuse(reason.AmbiguousHTTP, "a chunk that is longer than its size")
		}
		h.release(2)
		h.state = inChunkLine
		return true
	case inChunkLine:
		return h.stepChunkLine()
	case inTrailer:
		return h.stepTrailer()
	}
	return false
}

// release hands the next n bytes of in to the server.
func (h *headConn) release(n int) {
	h.out = append(h.out[:0:0], h.in[:n]...)
	h.in = h.in[n:]
	h.scanned = 0
	if len(h.in) == 0 {
		h.in = nil
	}
}

// pass counts n bytes of a body.
func (h *headConn) pass(n int64) {
	h.left -= n
	if h.left > 0 {
		return
	}
	if h.state == inChunkData {
		h.state = inChunkEnd
	} else {
		h.state = inHead
	}
}

// refuse ends the stream. In the middle of a body the body just ends, and the server sees that it is
// incomplete.
func (h *headConn) refuse(code reason.Code, detail string) bool {
	if h.state == inHead {
		return h.refuseHead(head{code: code, detail: detail})
	}
	h.mu.Lock()
	h.fault = &head{code: code, detail: detail}
	h.mu.Unlock()
	h.state, h.in = refused, nil
	return true
}

// bodyFault says why the body that is read now, the last one of the connection, was refused; nil where it was
// not.
func (h *headConn) bodyFault() *refusal {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fault == nil {
		return nil
	}
	return &refusal{code: h.fault.code, detail: h.fault.detail}
}

// refuseHead ends the stream in front of a request: the server gets a stand-in, so that the refusal is
// answered in order.
func (h *headConn) refuseHead(f head) bool {
	h.push(f)
	h.out = []byte(standIn)
	h.state, h.in = refused, nil
	return true
}

func (h *headConn) push(f head) {
	h.mu.Lock()
	h.heads = append(h.heads, f)
	h.open++
	h.mu.Unlock()
}

// stepHead waits for the whole head, refusing as soon as a byte cannot belong to one.
func (h *headConn) stepHead() bool {
	end := h.scanHead()
	switch {
	case h.state == refused:
		return true
	case len(h.in) > 0 && !couldBeMethod(h.in):
		return h.refuse(reason.NotHTTP, "no request method at the beginning")
	case end > maxHead || end < 0 && len(h.in) > maxHead:
		return h.refuse(reason.AmbiguousHTTP, "a head of more than 64 KiB")
	case end < 0:
		return false
	}
	f, fr, err := parseHead(string(h.in[:end]))
	if err != nil {
		f.code, f.detail = err.code, err.detail
		return h.refuseHead(f)
	}
	h.release(end + 4)
	h.push(f)
	h.frame(fr)
	return true
}

// scanHead returns where the head's last two line ends begin, -1 while they are not there. It refuses the
// head at the first byte that none contains. Every byte is looked at once.
func (h *headConn) scanHead() int {
	for ; h.scanned < len(h.in); h.scanned++ {
		i, c, prev := h.scanned, h.in[h.scanned], byte(0)
		if i > 0 {
			prev = h.in[i-1]
		}
		if (c == '\n') != (prev == '\r') || c < 0x20 && c != '\t' && c != '\r' && c != '\n' || c == 0x7f {
			h.refuseBytes(i)
			return -1
		}
		if c == '\n' && i >= 3 && string(h.in[i-3:i]) == "\r\n\r" {
			return i - 3
		}
	}
	return -1
}

func (h *headConn) frame(fr framing) {
	switch {
	case fr.tunnel:
		h.state = unjudged
	case fr.chunked:
		h.state = inChunkLine
	case fr.length > 0:
		h.state, h.left = inBody, fr.length
	}
}

// refuseBytes refuses a head for the byte at i: as ambiguous where a request line stands before it, as no
// HTTP otherwise.
func (h *headConn) refuseBytes(i int) bool {
	line := string(h.in[:i])
	if end := strings.IndexAny(line, "\r\n"); end >= 0 {
		line = line[:end]
	}
	if _, _, err := parseRequestLine(line); err != nil {
		return h.refuse(reason.NotHTTP, "a byte that no HTTP head contains")
	}
	return h.refuse(reason.AmbiguousHTTP, "a bare line end or a control byte in the head")
}

func couldBeMethod(b []byte) bool {
	for i, c := range b {
		if c == ' ' {
			return i > 0
		}
		if i >= 32 || !tokenByte(c) {
			return false
		}
	}
	return true
}

func (h *headConn) stepChunkLine() bool {
	i := bytes.IndexByte(h.in, '\n')
	if i < 0 {
		if len(h.in) > maxChunkLine {
			return h.refuse(reason.AmbiguousHTTP, "a chunk size line of more than 1 KiB")
		}
		return false
	}
	size, err := chunkSize(h.in[:i+1])
	if err != nil {
		return h.refuse(reason.AmbiguousHTTP, err.Error())
	}
	h.release(i + 1)
	if size == 0 {
		h.state, h.size = inTrailer, 0
	} else {
		h.state, h.left = inChunkData, size
	}
	return true
}

// chunkSize reads a chunk's first line, CRLF included: 1 to 15 hexadecimal digits, then perhaps extensions.
func chunkSize(line []byte) (int64, error) {
	text, ok := strings.CutSuffix(string(line), "\r\n")
	if !ok || len(line) > maxChunkLine {
		return 0, errors.New("a chunk size line that ends in a bare line feed or is too long")
	}
	digits, _, _ := strings.Cut(text, ";")
	if len(digits) == 0 || len(digits) > 15 || strings.Trim(digits, "0123456789abcdefABCDEF") != "" {
		return 0, errors.New("a chunk size that is not a hexadecimal number")
	}
	for i := range len(text) {
		if text[i] < 0x20 && text[i] != '\t' || text[i] == 0x7f {
			return 0, errors.New("a control byte in a chunk size line")
		}
	}
	return strconv.ParseInt(digits, 16, 64)
}

func (h *headConn) stepTrailer() bool {
	i := bytes.IndexByte(h.in, '\n')
	if i < 0 {
		if len(h.in) > maxTrailer {
			return h.refuse(reason.AmbiguousHTTP, "a trailer of more than 8 KiB")
		}
		return false
	}
	h.size += i + 1
	line, ok := strings.CutSuffix(string(h.in[:i+1]), "\r\n")
	if !ok || h.size > maxTrailer {
		return h.refuse(reason.AmbiguousHTTP, "a trailer that ends in a bare line feed or is too long")
	}
	if line != "" {
		if _, _, err := parseField(line); err != nil {
			return h.refuse(err.code, err.detail)
		}
	}
	h.release(i + 1)
	if line == "" {
		h.state = inHead
	}
	return true
}
