package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/wire"
)

// Client talks to one daemon's unix socket. Safe for concurrent use.
type Client struct {
	path   string
	http   *http.Client
	header http.Header // of every request; may be nil
}

// With returns a client that also sends the header. Both share their connections.
func (c *Client) With(name, value string) *Client {
	out := *c
	out.header = c.header.Clone()
	if out.header == nil {
		out.header = http.Header{}
	}
	out.header.Set(name, value)
	return &out
}

// NewClient returns a client for the socket at path. Nothing is dialled yet.
func NewClient(path string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
	return &Client{path: path, http: &http.Client{Transport: &http.Transport{
		DialContext: dial, MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Minute, DisableCompression: true,
	}}}
}

// NewClientOver returns a client that sends its calls through rt.
func NewClientOver(rt http.RoundTripper) *Client {
	return &Client{path: "this process", http: &http.Client{Transport: rt}}
}

// Error is a refusal that the daemon put into words.
type Error struct{ Problem wire.Problem }

func (e *Error) Error() string {
	if e.Problem.Detail != "" {
		return e.Problem.Detail
	}
	return e.Problem.Title
}

// Unanswered is a call that got no answer: nobody listens, whoever does is silent, or the caller gave up.
type Unanswered struct {
	Route, Socket string
	Err           error // never nil
}

func (e *Unanswered) Error() string {
	call := "calling " + e.Route + " over " + e.Socket + ": "
	switch {
	case errors.Is(e.Err, unix.ENOENT), errors.Is(e.Err, unix.ECONNREFUSED):
		return call + "nobody serves it: is the daemon running?"
	case errors.Is(e.Err, unix.EACCES):
		return call + "permission denied"
	case errors.Is(e.Err, context.DeadlineExceeded):
		return call + "no answer in time"
	case errors.Is(e.Err, io.EOF), errors.Is(e.Err, unix.ECONNRESET), errors.Is(e.Err, unix.EPIPE):
		return call + "the daemon ended before it answered"
	}
	return call + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Unanswered) Unwrap() error { return e.Err }

// cause takes off what net/http puts around an error: the method and an address that nobody knows.
func cause(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

// Status returns the HTTP status of a refusal, 0 where err is none.
func Status(err error) int {
	var e *Error
	if errors.As(err, &e) {
		return e.Problem.Status
	}
	return 0
}

// Call sends in as JSON (nil: no body) and decodes the answer into out (nil: ignored). A refusal is an
// *Error. The deadline is ctx's.
func (c *Client) Call(ctx context.Context, method, route string, in, out any) error {
	resp, err := c.send(ctx, method, route, in)
	if err != nil {
		return err
	}
	return c.decode(resp, method, route, out)
}

// decode reads the answer to its end.
func (c *Client) decode(resp *http.Response, method, route string, out any) (err error) {
	defer resp.Body.Close() // read to the end below
	if out != nil {
		err = json.NewDecoder(resp.Body).Decode(out)
	}
	io.Copy(io.Discard, resp.Body) // lets the connection be used again
	if err != nil {
		return fmt.Errorf("reading the answer of %s %s: %w", method, route, err)
	}
	return nil
}

// Form posts a form and decodes the answer into out. It fails as Call does.
func (c *Client) Form(ctx context.Context, route string, form url.Values, out any) error {
	resp, err := c.do(ctx, http.MethodPost, route, strings.NewReader(form.Encode()), "application/x-www-form-urlencoded")
	if err != nil {
		return err
	}
	return c.decode(resp, http.MethodPost, route, out)
}

// Each sends in and calls fn with every JSON line of the answer until it ends or fn fails.
func (c *Client) Each(ctx context.Context, method, route string, in any, fn func(json.RawMessage) error) error {
	resp, err := c.send(ctx, method, route, in)
	if err != nil {
		return err
	}
	defer resp.Body.Close() // the stream may be cut short on purpose
	dec := json.NewDecoder(resp.Body)
	for {
		var line json.RawMessage
		if err := dec.Decode(&line); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("reading the answer of %s %s: %w", method, route, err)
		}
		if err := fn(line); err != nil {
			return err
		}
	}
}

// Do sends body, which may be nil, and returns the answer; the caller closes its body. A refusal is an *Error.
func (c *Client) Do(ctx context.Context, method, route string, body io.Reader, kind string) (*http.Response, error) {
	return c.do(ctx, method, route, body, kind)
}

// CloseIdle closes connections that are kept open for the next call.
func (c *Client) CloseIdle() { c.http.CloseIdleConnections() }

func (c *Client) send(ctx context.Context, method, route string, in any) (*http.Response, error) {
	var body io.Reader
	if in != nil {
		raw, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("calling %s %s: %w", method, route, err)
		}
		body = bytes.NewReader(raw)
	}
	return c.do(ctx, method, route, body, "application/json")
}

// do sends body, which may be nil. An answer that is a refusal is an *Error.
func (c *Client) do(ctx context.Context, method, route string, body io.Reader, kind string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://tagout"+route, body)
	if err != nil {
		return nil, fmt.Errorf("calling %s %s: %w", method, route, err)
	}
	for name, values := range c.header {
		req.Header[name] = values
	}
	if body != nil {
		req.Header.Set("Content-Type", kind)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, &Unanswered{Route: route, Socket: c.path, Err: cause(err)}
	}
	if resp.StatusCode >= http.StatusBadRequest {
		return nil, Refusal(resp)
	}
	return resp, nil
}

// Refusal reads an answer that is a refusal, and closes its body.
func Refusal(resp *http.Response) *Error {
	defer resp.Body.Close() // read below
	e := &Error{Problem: wire.Problem{Title: resp.Status, Status: resp.StatusCode}}
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, MaxBody)) // the status alone will do
	var p wire.Problem
	if json.Unmarshal(raw, &p) == nil && p.Status != 0 {
		e.Problem = p
	}
	return e
}
