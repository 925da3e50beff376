package mcp

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"tagout/internal/control"
	"tagout/sandboxd/api"
)

// Handler serves MCP's streamable HTTP for callers whom somebody else has recognised (api.WithCaller). Each request
// stands alone, as its own caller: there is no session that somebody else could go on with.
func Handler(routes http.Handler, version string) http.Handler {
	return sdk.NewStreamableHTTPHandler(func(r *http.Request) *sdk.Server {
		caller := api.CallerOf(r.Context())
		if caller.Agent == "" {
			caller.Agent = "mcp"
		}
		return New(control.NewClientOver(within{control.Bounded(routes), caller}), version)
	}, &sdk.StreamableHTTPOptions{Stateless: true, JSONResponse: true})
}

// within calls a handler of this process as the caller.
type within struct {
	handler http.Handler
	caller  api.Caller
}

// RoundTrip implements http.RoundTripper.
func (t within) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(api.WithCaller(req.Context(), t.caller))
	r, w := io.Pipe()
	out := &answer{header: http.Header{}, body: w, begun: make(chan int, 1)}
	in := req.Clone(ctx)
	in.RequestURI, in.RemoteAddr = req.URL.RequestURI(), "mcp"
	if in.Body == nil {
		in.Body = http.NoBody
	}
	go func() {
		defer cancel()
		defer func() {
			if recover() != nil { // the handler broke its answer off
				out.begin(http.StatusInternalServerError)
				w.CloseWithError(io.ErrUnexpectedEOF)
			}
		}()
		t.handler.ServeHTTP(out, in)
		out.begin(http.StatusOK)
		w.Close()
	}()
	select {
	case code := <-out.begun:
		return &http.Response{Status: http.StatusText(code), StatusCode: code, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
			Header: out.sent, Body: &read{r, cancel}, ContentLength: length(out.sent), Request: req}, nil
	case <-req.Context().Done():
		r.CloseWithError(context.Canceled)
		return nil, req.Context().Err()
	}
}

// read is an answer's body. Closing it ends the call.
type read struct {
	*io.PipeReader
	cancel func()
}

func (r *read) Close() error {
	r.cancel()
	return r.PipeReader.CloseWithError(errors.New("the answer is not read any more"))
}

// answer is an http.ResponseWriter whose body is a pipe. Only the handler's goroutine uses it.
type answer struct {
	header, sent http.Header
	body         *io.PipeWriter
	begun        chan int // gets the status once
	code         int
}

func (a *answer) Header() http.Header { return a.header }

func (a *answer) WriteHeader(code int) { a.begin(code) }

func (a *answer) begin(code int) {
	if a.code == 0 && code >= http.StatusOK {
		a.code, a.sent = code, a.header.Clone()
		a.begun <- code
	}
}

func (a *answer) Write(p []byte) (int, error) {
	a.begin(http.StatusOK)
	return a.body.Write(p)
}

// Flush has nothing to do: nothing is kept back.
func (a *answer) Flush() { a.begin(http.StatusOK) }

// length is what the answer says of its body's length, -1 where it says nothing.
func length(h http.Header) int64 {
	if n, err := strconv.ParseInt(h.Get("Content-Length"), 10, 64); err == nil {
		return n
	}
	return -1
}
