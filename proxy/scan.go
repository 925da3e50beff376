package proxy

import (
	"bytes"
	"errors"
	"io"
	"strconv"

	"tagout/internal/reason"
	"tagout/internal/tokenshape"
	"tagout/internal/wire"
)

// tokenScan finds tokens in a stream that comes in pieces, as they are and, where escapes is set, as JSON and forms may
// write them. The zero value is ready.
type tokenScan struct {
	tail    []byte
	escapes *tokenScan // of the text without escapes; nil where there are none
	escape  []byte     // the beginning of one
}

// feed returns the first token that ends in p, "" where none does.
func (t *tokenScan) feed(p []byte) string {
	if t.escapes != nil {
		if token := t.escapes.feed(t.unescape(p)); token != "" {
			return token
		}
	}
	if len(t.tail) > 0 {
		edge := append(t.tail, p[:min(len(p), tokenshape.Len-1)]...)
		if token := tokenshape.First(edge); token != "" {
			return token
		}
		t.tail = edge
	}
	if len(p) >= tokenshape.Len-1 {
		if token := tokenshape.First(p); token != "" {
			return token
		}
		t.tail = append(t.tail[:0], p[len(p)-tokenshape.Len+1:]...)
		return ""
	}
	if len(t.tail) == 0 {
		t.tail = append(t.tail, p...)
	}
	if over := len(t.tail) - (tokenshape.Len - 1); over > 0 {
		t.tail = append(t.tail[:0], t.tail[over:]...)
	}
	return ""
}

// unescape decodes what writes one ASCII character as \u00XX or %XX, and leaves all else as it is.
func (t *tokenScan) unescape(p []byte) []byte {
	out := make([]byte, 0, len(t.escape)+len(p))
	for _, c := range p {
		if len(t.escape) > 0 && c != '\\' && c != '%' {
			t.escape = append(t.escape, c)
			switch decoded, done := unescapeOne(t.escape); {
			case !done:
			case decoded != 0:
				out, t.escape = append(out, decoded), t.escape[:0]
			default:
				out, t.escape = append(out, t.escape...), t.escape[:0]
			}
			continue
		}
		out, t.escape = append(out, t.escape...), t.escape[:0]
		if c == '\\' || c == '%' {
			t.escape = append(t.escape, c)
			continue
		}
		out = append(out, c)
	}
	return out
}

// unescapeOne reads an escape; done is false while it is not whole, decoded 0 where it is none.
func unescapeOne(b []byte) (decoded byte, done bool) {
	digits := b[1:]
	if b[0] == '\\' {
		lead := min(len(b), len(`\u00`))
		if string(b[:lead]) != `\u00`[:lead] {
			return 0, true
		}
		digits = b[lead:]
	}
	if n := len(digits); n < 2 {
		return 0, n > 0 && !isHex(digits[0])
	}
	if n, err := strconv.ParseUint(string(digits), 16, 7); err == nil {
		return byte(n), true
	}
	return 0, true
}

func isHex(c byte) bool { return '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'f' }

// scanBody has the rest of the request's body looked through on its way. begin is what was read of it already; about says
// what is special about it.
func (s *swap) scanBody(begin []byte, coding, about string) *refusal {
	b := &scannedBody{ReadCloser: s.r.Body, s: s, about: about}
	if formOf(s.r.Header.Get("Content-Type")) != nil {
		b.scan.escapes = &tokenScan{}
	}
	if len(begin) > 0 {
		b.ReadCloser = readCloser{io.MultiReader(bytes.NewReader(begin), s.r.Body), s.r.Body}
	}
	if decode, ok := decoders[coding]; ok {
		if !s.x.hold(decode.room + packedAhead) {
			return s.x.crowded()
		}
		b.about = " that is compressed"
		b.packed = &unpacker{raw: b.ReadCloser}
		b.packed.plain = &lazyReader{open: func() (io.Reader, error) { return decode.open(b.packed.tee()) }}
	}
	s.r.Body = b
	return nil
}

type readCloser struct {
	io.Reader
	io.Closer
}

// errMisplaced ends a body in which a token stands; the exchange knows the refusal.
var errMisplaced = errors.New("the body holds a token")

// scannedBody is a request's body that is looked through for tokens. The piece in which a token ends is not handed on.
type scannedBody struct {
	io.ReadCloser
	s      *swap
	about  string
	scan   tokenScan
	packed *unpacker // nil where the body is plain
}

// Read implements io.Reader.
func (b *scannedBody) Read(p []byte) (n int, err error) {
	if b.packed == nil {
		n, err = b.ReadCloser.Read(p)
		if token := b.scan.feed(p[:n]); token != "" {
			return 0, b.refuse(token)
		}
	} else {
		var token string
		n, token, err = b.packed.read(p, &b.scan)
		if token != "" {
			return 0, b.refuse(token)
		}
	}
	if errors.Is(err, io.EOF) {
		if why := b.s.trailers(); why != nil {
			return 0, b.s.x.misplaced(why)
		}
	}
	if bad := new(codingError); errors.As(err, &bad) {
		return 0, b.s.x.misplaced(&refusal{reason.Malformed, bad.Error(), b.s.x.rule})
	}
	return n, err
}

func (b *scannedBody) refuse(token string) error {
	x := b.s.x
	detail := "a token in a body" + b.about + ", where none is swapped"
	return x.misplaced(x.stray(token, wire.Presentation{As: wire.AsBody}, detail))
}

// misplaced notes why a request is refused whose head was let pass.
func (x *exchange) misplaced(why *refusal) error {
	x.leak.CompareAndSwap(nil, why)
	return errMisplaced
}

// unpacker reads a compressed body as it is, and looks through what is in it. It hands on only what was looked through:
// decoders read ahead, and so a part is always kept back until the end.
type unpacker struct {
	raw   io.Reader
	plain *lazyReader
	queue []byte // read by the decoder, not handed on
	in    int64  // bytes that came
	out   int64  // bytes that were in them
	done  error
}

// packedAhead is more than any of the decoders reads ahead of what it hands out.
const packedAhead = 192 << 10

// Bounds of what a compressed body may unpack to: looking through it costs that much.
const (
	packedFree  = 4 << 20
	packedRatio = 200
)

// codingError says why a compressed body is refused.
type codingError struct{ text string }

func (e *codingError) Error() string { return e.text }

// tee returns what the decoder reads from.
func (u *unpacker) tee() io.Reader {
	return io.TeeReader(u.raw, writerFunc(func(p []byte) (int, error) {
		u.in += int64(len(p))
		u.queue = append(u.queue, p...)
		return len(p), nil
	}))
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// read hands on raw bytes. token is one that was found in what they hold.
func (u *unpacker) read(p []byte, scan *tokenScan) (n int, token string, err error) {
	buf := copyBufs.Get().(*[32 << 10]byte)
	defer copyBufs.Put(buf)
	for u.done == nil && len(u.queue) <= packedAhead {
		n, err := u.plain.Read(buf[:])
		u.out += int64(n)
		if token := scan.feed(buf[:n]); token != "" {
			return 0, token, nil
		}
		if u.out > packedFree && u.out > packedRatio*u.in {
			return 0, "", &codingError{"a body that unpacks to too much to be looked through"}
		}
		if errors.Is(err, io.EOF) {
			u.done = u.finish()
		} else if err != nil {
			return 0, "", &codingError{"a body that is not compressed as it says: " + oneLine(err)}
		}
	}
	ready := u.queue
	if u.done == nil {
		ready = u.queue[:len(u.queue)-packedAhead]
	}
	n = copy(p, ready)
	u.queue = u.queue[n:]
	if n == 0 && len(p) > 0 {
		err = u.done
	}
	return n, "", err
}

// finish makes sure that nothing follows what was compressed.
func (u *unpacker) finish() error {
	if n, err := io.Copy(io.Discard, u.raw); err != nil {
		return err
	} else if n > 0 {
		return &codingError{"a body with more behind what is compressed"}
	}
	return io.EOF
}

// lazyReader opens a decoder when it is first read: some read at once.
type lazyReader struct {
	open func() (io.Reader, error)
	r    io.Reader
	err  error
}

// Read implements io.Reader.
func (l *lazyReader) Read(p []byte) (int, error) {
	if l.r == nil && l.err == nil {
		if l.r, l.err = l.open(); l.err != nil {
			l.r = nil // or a decoder that is none
		}
	}
	if l.err != nil {
		return 0, l.err
	}
	return l.r.Read(p)
}
