package control

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// NewForgetfulClient returns a client whose calls leave nothing of their answers behind that is reachable: connections are
// kept, buffers are not. It is for answers with secrets in them.
func NewForgetfulClient(path string) *Client {
	return &Client{path: path, http: &http.Client{Transport: &forgetful{path: path}}}
}

// forgetful carries one HTTP/1.1 request at a time over each of its connections to a unix socket. The answers are small
// and their lengths are given.
type forgetful struct {
	path string

	mu   sync.Mutex
	idle []net.Conn // guarded by mu: nothing was read from them beyond an answer
}

// maxForgetful is how many connections are kept.
const maxForgetful = 16

// errExtra is an answer with something behind it.
var errExtra = errors.New("the daemon sent more than an answer")

// RoundTrip implements http.RoundTripper.
func (f *forgetful) RoundTrip(r *http.Request) (*http.Response, error) {
	for {
		nc, used, err := f.take(r.Context())
		if err != nil {
			return nil, err
		}
		resp, begun, err := f.ask(nc, r)
		if err == nil {
			return resp, nil
		}
		nc.Close() // already failing
		switch {
		case r.Context().Err() != nil:
			return nil, r.Context().Err()
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, context.DeadlineExceeded
		case !used || begun || r.Body != nil && r.GetBody == nil:
			return nil, err
		case r.Body != nil: // a connection that the daemon closed meanwhile: once more on a new one
			if r.Body, err = r.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

// take returns a connection; used says that it has carried a request before.
func (f *forgetful) take(ctx context.Context) (nc net.Conn, used bool, err error) {
	f.mu.Lock()
	if n := len(f.idle); n > 0 {
		nc, f.idle = f.idle[n-1], f.idle[:n-1]
	}
	f.mu.Unlock()
	if nc != nil {
		return nc, true, nil
	}
	var d net.Dialer
	nc, err = d.DialContext(ctx, "unix", f.path)
	return nc, false, err
}

// ask sends r and reads the whole answer. begun says whether any of it came.
func (f *forgetful) ask(nc net.Conn, r *http.Request) (resp *http.Response, begun bool, err error) {
	deadline, _ := r.Context().Deadline() // zero: none
	if err := nc.SetDeadline(deadline); err != nil {
		return nil, false, err
	}
	stop := context.AfterFunc(r.Context(), func() { nc.SetDeadline(time.Unix(1, 0)) }) // closed: nobody waits any more
	defer stop()
	bw := bufio.NewWriter(nc)
	if err = r.Write(bw); err == nil {
		err = bw.Flush()
	}
	if err != nil {
		return nil, false, err
	}
	br := bufio.NewReader(nc)
	if _, err := br.Peek(1); err != nil {
		return nil, false, err
	}
	if resp, err = http.ReadResponse(br, r); err != nil {
		return nil, true, err
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, MaxBody+1))
	resp.Body.Close() // read
	switch {
	case err != nil:
		return nil, true, err
	case len(body) > MaxBody || br.Buffered() > 0:
		return nil, true, errExtra
	}
	resp.Body = &wiped{rest: body, all: body}
	if resp.Close || !stop() {
		nc.Close() // nothing is lost
	} else {
		f.put(nc)
	}
	return resp, true, nil
}

func (f *forgetful) put(nc net.Conn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.idle) < maxForgetful {
		f.idle = append(f.idle, nc)
	} else {
		nc.Close() // nothing is lost
	}
}

// CloseIdleConnections is called by http.Client.
func (f *forgetful) CloseIdleConnections() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, nc := range f.idle {
		nc.Close() // nothing is lost
	}
	f.idle = nil
}

// wiped is an answer's body that is overwritten once it is closed.
type wiped struct{ rest, all []byte }

// Read implements io.Reader.
func (w *wiped) Read(p []byte) (int, error) {
	if len(w.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, w.rest)
	w.rest = w.rest[n:]
	return n, nil
}

// Close implements io.Closer.
func (w *wiped) Close() error {
	clear(w.all)
	w.rest = nil
	return nil
}
