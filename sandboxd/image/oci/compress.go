package oci

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
)

// maxWindow bounds what a zstd stream may make its reader keep in memory.
const maxWindow = 128 << 20

// decompress returns the plain content of a stream that is gzip, zstd or plain already, by its first bytes.
func decompress(from io.Reader) (io.ReadCloser, error) {
	in := bufio.NewReaderSize(from, 64<<10)
	head, err := in.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		return gzip.NewReader(in)
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, fmt.Errorf("reading a zstd stream: %w", err)
		}
		return z.IOReadCloser(), nil
	case bytes.HasPrefix(head, []byte("BZh")), bytes.HasPrefix(head, []byte("\xfd7zXZ")):
		return nil, errors.New("it is compressed with bzip2 or xz: unpack it first, or use gzip or zstd")
	}
	return io.NopCloser(in), nil
}
