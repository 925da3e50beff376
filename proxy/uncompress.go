package proxy

import (
	"compress/gzip"
	"io"
	"net/http"
	"strings"
)

// uncompress makes an answer readable that a server compressed although the request did not allow it, as some do
// with what they keep compressed: secrets in it could not be masked otherwise. It returns false where it cannot.
func uncompress(r *http.Request, resp *http.Response) bool {
	coding := strings.ToLower(strings.TrimSpace(strings.Join(resp.Header.Values("Content-Encoding"), ",")))
	switch {
	case coding == "" || coding == "identity":
		return true
	case r.Method == http.MethodHead || resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified:
		return true // there is no body
	case coding != "gzip" && coding != "x-gzip" || resp.StatusCode == http.StatusPartialContent:
		return false
	}
	resp.Header.Del("Content-Encoding")
	resp.Header.Del("Content-Length")
	resp.ContentLength, resp.Uncompressed = -1, true
	resp.Body = &gunzip{ReadCloser: resp.Body}
	return true
}

// gunzip reads a gzip stream (RFC 1952) as plain text. It waits for the first byte until it is read.
type gunzip struct {
	io.ReadCloser
	plain *gzip.Reader
	err   error // of the header
}

func (g *gunzip) Read(p []byte) (int, error) {
	if g.plain == nil && g.err == nil {
		g.plain, g.err = gzip.NewReader(g.ReadCloser)
	}
	if g.err != nil {
		return 0, g.err
	}
	return g.plain.Read(p)
}
