package control

import (
	"context"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/wire"
)

// TestForgetfulClient: it keeps connections, survives a daemon's restart, passes refusals on, gives up in time, and serves
// many callers at once.
func TestForgetfulClient(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	var conns atomic.Int64
	silent := make(chan struct{})
	serve := func() *http.Server {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		mux := http.NewServeMux()
		mux.HandleFunc("POST /echo", func(w http.ResponseWriter, r *http.Request) {
			var in wire.ResolveReply
			if Read(w, r, &in) {
				Reply(w, in)
			}
		})
		mux.HandleFunc("POST /refuse", func(w http.ResponseWriter, r *http.Request) { Refuse(w, http.StatusForbidden, 51, "no") })
		mux.HandleFunc("POST /silent", func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-silent:
			case <-r.Context().Done():
			}
		})
		srv := &http.Server{Handler: mux, ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateNew {
				conns.Add(1)
			}
		}}
		go srv.Serve(l)
		return srv
	}
	srv := serve()
	c := NewForgetfulClient(path)
	defer c.CloseIdle()
	echo := func() error {
		var out wire.ResolveReply
		err := c.Call(t.Context(), http.MethodPost, "/echo", wire.ResolveReply{Secret: "a", Value: "value"}, &out)
		if err == nil && out.Value != "value" {
			err = errors.New("another value")
		}
		return err
	}
	for range 5 {
		if err := echo(); err != nil {
			t.Fatal(err)
		}
	}
	var e *Error
	if err := c.Call(t.Context(), http.MethodPost, "/refuse", struct{}{}, nil); !errors.As(err, &e) || e.Problem.Reason != 51 {
		t.Errorf("a refusal: %v", err)
	}
	if n := conns.Load(); n != 1 {
		t.Errorf("%d connections for calls one after the other", n)
	}
	srv.Close()
	srv = serve()
	if err := echo(); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	var none *Unanswered
	if err := c.Call(ctx, http.MethodPost, "/silent", struct{}{}, nil); !errors.As(err, &none) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a daemon that is silent: %v", err)
	}
	close(silent)
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			for range 20 {
				if err := echo(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	srv.Close()
	if err := echo(); !errors.As(err, &none) {
		t.Errorf("nobody is there: %v", err)
	}
}
