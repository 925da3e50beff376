package proxy

import (
	"bufio"
	"compress/gzip"
	"compress/zlib"
	"io"
	"net/http"
	"strings"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/zstd"

	"tagout/internal/reason"
)

// decoder reads a content coding. It holds nothing but memory.
type decoder struct {
	open func(io.Reader) (io.Reader, error)
	room int // bytes that it may take, roughly: its window
}

// decoders read the content codings that are registered for HTTP (RFC 9110, 8.4.1; RFC 7932; RFC 8878), in the calling
// goroutine.
var decoders = map[string]decoder{
	"gzip":    {func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }, 64 << 10},
	"x-gzip":  {func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }, 64 << 10},
	"deflate": {inflate, 64 << 10},
	"br":      {func(r io.Reader) (io.Reader, error) { return brotli.NewReader(r), nil }, 16 << 20},
	"zstd": {func(r io.Reader) (io.Reader, error) {
		return zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
	}, maxWindow + 1<<20},
}

// maxWindow is the largest window that RFC 8878 wants receivers to support, and RFC 9659 senders to keep to.
const maxWindow = 8 << 20

// inflate reads what is meant by deflate, with the frame of RFC 1950, or without it as some send it.
func inflate(r io.Reader) (io.Reader, error) {
	br := bufio.NewReader(r)
	head, err := br.Peek(2)
	if err == nil && head[0]&0x0f == 8 && (uint(head[0])<<8|uint(head[1]))%31 == 0 {
		return zlib.NewReader(br)
	}
	return flate.NewReader(br), nil
}

// uncompress makes an answer readable that a server compressed although the request did not allow it, as some do
// with what they keep compressed: secrets in it could not be masked otherwise. The refusal says why it cannot.
func (x *exchange) uncompress(r *http.Request, resp *http.Response) *refusal {
	coding := strings.ToLower(strings.TrimSpace(strings.Join(resp.Header.Values("Content-Encoding"), ",")))
	decode, known := decoders[coding]
	switch {
	case coding == "" || coding == "identity":
		return nil
	case r.Method == http.MethodHead || resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified:
		return nil // there is no body
	case !known || resp.StatusCode == http.StatusPartialContent:
		return &refusal{reason.DialFailed, "the server compressed an answer to a request that carried a secret, in a way in which the answer cannot be looked through: send the request without Range, or ask the service for plain answers", x.rule}
	case !x.hold(decode.room):
		return x.crowded()
	}
	resp.Header.Del("Content-Encoding")
	resp.Header.Del("Content-Length")
	resp.ContentLength, resp.Uncompressed = -1, true
	packed := resp.Body
	resp.Body = &plainBody{packed: packed, lazyReader: lazyReader{open: func() (io.Reader, error) { return decode.open(packed) }}}
	return nil
}

// plainBody reads a compressed body as plain text. It waits for the first byte until it is read.
type plainBody struct {
	lazyReader
	packed io.Closer
}

// Close implements io.Closer.
func (b *plainBody) Close() error { return b.packed.Close() }
