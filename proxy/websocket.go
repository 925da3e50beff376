package proxy

import (
	"encoding/binary"
	"errors"
	"io"
	"net/http"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

// upgraded makes a connection that a server agreed to make a WebSocket one whose frames are looked through on their way:
// tokens do not go out, and secrets that the request carried do not come back. goproxy relays it; the sockets count.
func (x *exchange) upgraded(resp *http.Response, m *mask) *http.Response {
	refuse := func(detail string) *http.Response {
		resp.Body.Close() // refused
		return x.refuse(refusal{reason.AmbiguousHTTP, detail, x.rule})
	}
	to, err := resp.Body.(io.ReadWriteCloser)
	switch {
	case !err || lowerASCII(resp.Header.Get("Upgrade")) != "websocket":
		return refuse("the server switches to another protocol than the one it was asked for")
	case resp.Header.Get("Sec-Websocket-Extensions") != "":
		return refuse("the server uses an extension of WebSocket that nobody offered")
	}
	ws := &webSocket{ReadWriteCloser: to, x: x, up: frameScan{}}
	if m != nil {
		ws.down = &frameMask{mask: m}
	}
	resp.Body = ws
	return resp
}

// webSocket is a server's end of a WebSocket. Reads and writes go on at the same time, each in one goroutine.
type webSocket struct {
	io.ReadWriteCloser
	x    *exchange
	up   frameScan
	down *frameMask // nil where no secret can come back
	err  error      // of the last read, once what came before it is handed out
}

// Write implements io.Writer. Nothing of a piece in which a token ends is sent.
func (w *webSocket) Write(p []byte) (int, error) {
	token, err := w.up.feed(p)
	switch {
	case token != "":
		detail := "a token in a message of a WebSocket, where none is swapped"
		return 0, w.x.misplaced(w.x.stray(token, wire.Presentation{As: wire.PlaceWebSocket}, detail))
	case err != nil:
		return 0, w.x.misplaced(&refusal{reason.AmbiguousHTTP, oneLine(err), w.x.rule})
	}
	n, err := w.ReadWriteCloser.Write(p)
	w.x.up.Add(int64(n))
	return n, err
}

// Read implements io.Reader.
func (w *webSocket) Read(p []byte) (n int, err error) {
	defer func() { w.x.down.Add(int64(n)) }()
	if w.down == nil {
		return w.ReadWriteCloser.Read(p)
	}
	for len(w.down.ready) == 0 {
		if w.err != nil {
			return 0, w.err
		}
		n, w.err = w.ReadWriteCloser.Read(p)
		if err := w.down.feed(p[:n]); err != nil && w.err == nil {
			w.err = err
		}
		if w.err != nil {
			w.down.end()
		}
	}
	n = copy(p, w.down.ready)
	w.down.ready = w.down.ready[n:]
	return n, nil
}

// Layout of a frame (RFC 6455, 5.2).
const (
	frameFinal    = 0x80
	frameReserved = 0x70
	frameControl  = 0x08
	frameMasked   = 0x80
	frameLength   = 0x7f
	maxFrameHead  = 14
	maxControl    = 125
)

// frame is what the head of a frame of a WebSocket says.
type frame struct {
	final, control, masked bool
	left                   uint64 // bytes of its payload that are still to come
	key                    [4]byte
	at                     int // position in key
}

var (
	errFrame       = errors.New("bytes that are no frame of a WebSocket, or one of an extension that nobody agreed on")
	errFrameMasked = errors.New("a frame of a WebSocket that a server has masked")
	errFrameCrowd  = errors.New("more frames between two parts of a message of a WebSocket than are kept")
	errFramePlain  = errors.New("a frame of a WebSocket that a client has not masked")
)

// readFrame reads the head of a frame. size is how many bytes it takes, of which b may have fewer.
func readFrame(b []byte) (f frame, size int, err error) {
	size = 2
	if len(b) < size {
		return f, size, nil
	}
	length := uint64(b[1] & frameLength)
	switch length {
	case 126:
		size += 2
	case 127:
		size += 8
	}
	keyAt := size
	if f.masked = b[1]&frameMasked != 0; f.masked {
		size += len(f.key)
	}
	f.final, f.control = b[0]&frameFinal != 0, b[0]&frameControl != 0
	kind := b[0] & 0x0f
	if b[0]&frameReserved != 0 || kind&^frameControl > 2 || f.control && (!f.final || length > maxControl) {
		return f, size, errFrame
	}
	if len(b) < size {
		return f, size, nil
	}
	switch length {
	case 126:
		length = uint64(binary.BigEndian.Uint16(b[2:]))
	case 127:
		length = binary.BigEndian.Uint64(b[2:])
	}
	if length >= 1<<63 {
		return f, size, errFrame
	}
	f.left = length
	copy(f.key[:], b[keyAt:])
	return f, size, nil
}

// frameScan finds tokens in the frames of a client. The zero value is ready.
type frameScan struct {
	head    []byte
	frame   frame
	inside  bool
	scratch []byte
	message tokenScan // of the message, whatever frames it comes in
	control tokenScan
}

// feed returns the first token that ends in the next bytes of the stream.
func (s *frameScan) feed(p []byte) (token string, err error) {
	for len(p) > 0 {
		if !s.inside {
			f, size, err := readFrame(s.head)
			for err == nil && len(s.head) < size && len(p) > 0 {
				n := min(size-len(s.head), len(p))
				s.head, p = append(s.head, p[:n]...), p[n:]
				f, size, err = readFrame(s.head)
			}
			switch {
			case err != nil:
				return "", err
			case len(s.head) < size:
				return "", nil
			case !f.masked:
				return "", errFramePlain
			}
			s.frame, s.inside, s.head = f, true, s.head[:0]
		}
		n := int(min(s.frame.left, uint64(len(p))))
		if token := s.payload(p[:n]); token != "" {
			return token, nil
		}
		p = p[n:]
	}
	return "", nil
}

// payload looks through the next bytes of a frame.
func (s *frameScan) payload(p []byte) string {
	f := &s.frame
	s.scratch = append(s.scratch[:0], p...)
	for i := range s.scratch {
		s.scratch[i] ^= f.key[(f.at+i)&3]
	}
	f.at, f.left = (f.at+len(p))&3, f.left-uint64(len(p))
	scan := &s.message
	if f.control {
		scan = &s.control
	}
	token := scan.feed(s.scratch)
	if f.left == 0 {
		s.inside = false
		if f.final {
			scan.tail = scan.tail[:0]
		}
	}
	return token
}

// frameMask blanks secrets in the frames of a server, in text, in binary data and in what a control frame says, also
// where a message comes in several frames. What may be the beginning of a secret is held back until the next frame of
// the message, and with it what stands between them. Messages are looked at one by one.
type frameMask struct {
	mask   *mask
	ready  []byte // to be handed out
	head   []byte
	frame  frame
	inside bool
	held   veil // payload that may be the beginning of a secret
	pinned []pin
	talk   []byte // payload of a control frame
}

// maxPinned is how many control frames and heads are kept while the next part of a message is waited for.
const maxPinned = 256

// pin is what stands in the stream before the byte of held that has the index at.
type pin struct {
	at  int
	raw []byte
}

// feed takes the next bytes of the stream.
func (m *frameMask) feed(p []byte) error {
	for len(p) > 0 {
		if !m.inside {
			f, size, err := readFrame(m.head)
			for err == nil && len(m.head) < size && len(p) > 0 {
				n := min(size-len(m.head), len(p))
				m.head, p = append(m.head, p[:n]...), p[n:]
				f, size, err = readFrame(m.head)
			}
			switch {
			case err != nil:
				return err
			case len(m.head) < size:
				return nil
			case f.masked:
				return errFrameMasked
			}
			if len(m.pinned) >= maxPinned {
				return errFrameCrowd
			}
			m.pin(m.head)
			m.frame, m.inside, m.head = f, true, nil
		}
		n := int(min(m.frame.left, uint64(len(p))))
		m.payload(p[:n])
		p = p[n:]
	}
	return nil
}

// payload takes the next bytes of a frame.
func (m *frameMask) payload(p []byte) {
	m.frame.left -= uint64(len(p))
	over := m.frame.left == 0
	if over {
		m.inside = false
	}
	if m.frame.control {
		m.talk = append(m.talk, p...)
		if over {
			m.pin([]byte(m.mask.text(string(m.talk))))
			m.talk = nil
		}
		return
	}
	m.held.add(p, m.mask.values)
	m.release(len(m.held.text) - m.held.undecided(m.mask.values, over && m.frame.final))
}

// pin puts bytes that are no payload of a message into the stream.
func (m *frameMask) pin(raw []byte) {
	if len(m.held.text) == 0 {
		m.ready = append(m.ready, raw...)
		return
	}
	m.pinned = append(m.pinned, pin{len(m.held.text), raw})
}

// release hands out the first n bytes that are held, and what stands between them.
func (m *frameMask) release(n int) {
	payload := m.held.take(n)
	done := 0
	for len(m.pinned) > 0 && m.pinned[0].at <= n {
		first := m.pinned[0]
		m.ready = append(append(m.ready, payload[done:first.at]...), first.raw...)
		done, m.pinned = first.at, m.pinned[1:]
	}
	m.ready = append(m.ready, payload[done:]...)
	for i := range m.pinned {
		m.pinned[i].at -= n
	}
}

// end hands out what is held: nothing follows.
func (m *frameMask) end() { m.release(len(m.held.text)) }
