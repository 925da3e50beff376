package control

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/reason"
)

func serve(t *testing.T, h http.Handler) *Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path, os.Getgid())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, h, time.Second) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return NewClient(path)
}

func TestPeerIsJudgedByTheKernelsWord(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /me", Admit(func(w http.ResponseWriter, r *http.Request) {
		p, _ := PeerOf(r.Context())
		Reply(w, p)
	}, os.Getuid()))
	mux.HandleFunc("GET /other", Admit(func(http.ResponseWriter, *http.Request) {
		t.Error("a peer that is not admitted reached the handler")
	}, os.Getuid()+1))
	mux.HandleFunc("GET /nobody", Admit(func(http.ResponseWriter, *http.Request) {
		t.Error("a handler that admits nobody was reached")
	}))
	c := serve(t, mux)
	var p Peer
	if err := c.Call(t.Context(), http.MethodGet, "/me", nil, &p); err != nil || int(p.PID) != os.Getpid() {
		t.Fatalf("peer %+v, %v", p, err)
	}
	for _, route := range []string{"/other", "/nobody"} {
		if err := c.Call(t.Context(), http.MethodGet, route, nil, nil); Status(err) != http.StatusForbidden {
			t.Errorf("%s: %v, want 403", route, err)
		}
	}
}

// TestUnanswered: a call that got no answer says in one line what is wrong, without what net/http puts around it.
func TestUnanswered(t *testing.T) {
	silent := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /silent", func(_ http.ResponseWriter, r *http.Request) { <-silent })
	mux.HandleFunc("GET /dies", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	c := serve(t, mux)
	t.Cleanup(func() { close(silent) })
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	for want, err := range map[string]error{
		"nobody serves it":         NewClient(filepath.Join(t.TempDir(), "none")).Call(t.Context(), http.MethodGet, "/x", nil, nil),
		"no answer in time":        c.Call(short, http.MethodGet, "/silent", nil, nil),
		"ended before it answered": c.Call(t.Context(), http.MethodGet, "/dies", nil, nil),
	} {
		var u *Unanswered
		if !errors.As(err, &u) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "http://") {
			t.Errorf("%q instead of %q", err, want)
		}
	}
}

func TestAdmitWithoutAPeerRefuses(t *testing.T) {
	w := &recorder{header: http.Header{}}
	r, _ := http.NewRequest(http.MethodGet, "/", nil)
	Admit(func(http.ResponseWriter, *http.Request) { t.Error("reached") }, 0)(w, r)
	if w.status != http.StatusForbidden {
		t.Fatalf("status %d", w.status)
	}
}

type recorder struct {
	header http.Header
	status int
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(s int)           { r.status = s }
func (r *recorder) Write(p []byte) (int, error) { return len(p), nil }

func TestBadBodies(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /x", func(w http.ResponseWriter, r *http.Request) {
		var v struct{ A int }
		if Read(w, r, &v) {
			Reply(w, v)
		}
	})
	c := serve(t, mux)
	for name, body := range map[string]json.RawMessage{
		"unknown field": json.RawMessage(`{"A":1,"B":2}`),
		"wrong type":    json.RawMessage(`{"A":"x"}`),
	} {
		if err := c.Call(t.Context(), http.MethodPost, "/x", body, nil); Status(err) != http.StatusBadRequest {
			t.Errorf("%s: %v, want 400", name, err)
		}
	}
	if err := c.Call(t.Context(), http.MethodPost, "/x", json.RawMessage(`{"A":1}`), nil); err != nil {
		t.Error(err)
	}
}

func TestStreamArrivesLineByLine(t *testing.T) {
	next := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("POST /s", func(w http.ResponseWriter, r *http.Request) {
		s := NewStream(w)
		for i := range 3 {
			if s.Send(i) != nil {
				return
			}
			<-next // the client has seen the line before the next one is made
		}
	})
	c := serve(t, mux)
	var seen []string
	err := c.Each(t.Context(), http.MethodPost, "/s", nil, func(line json.RawMessage) error {
		seen = append(seen, string(line))
		next <- struct{}{}
		return nil
	})
	if err != nil || strings.Join(seen, "") != "012" {
		t.Fatalf("%v %v", seen, err)
	}
}

func TestRefusalsCarryTheReason(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /t", func(w http.ResponseWriter, _ *http.Request) {
		Refuse(w, http.StatusLocked, reason.Tagged, "Ada stopped it")
	})
	err := serve(t, mux).Call(t.Context(), http.MethodGet, "/t", nil, nil)
	e, ok := err.(*Error)
	if !ok || e.Problem.Reason != reason.Tagged || e.Error() != "Ada stopped it" || Status(err) != http.StatusLocked {
		t.Fatalf("got %#v", err)
	}
}

func TestSocketOfALivingDaemonIsNotTaken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path, os.Getgid())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path, os.Getgid()); err == nil || !strings.Contains(err.Error(), "stop that one first") {
		t.Fatalf("got %v", err)
	}
	l.Close()
	// What a dead daemon left behind is replaced.
	os.WriteFile(path, nil, 0o600)
	again, err := Listen(path, os.Getgid())
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o660 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
}
