package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"tagout/internal/control"
	"tagout/internal/execsocket"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

// commands are Commands of one kid, k.
type commands struct {
	Commands // nil: panics on an unexpected call
	resized  chan wire.TermSize
	detached chan string
}

func (c commands) ExecInput(ctx context.Context, name, actor string, r wire.ExecRequest, input <-chan wire.ExecInput, send func(wire.ExecFrame) error) error {
	if name != "k" || actor != "uid:0" || !r.Input {
		return refusal(kids.NotFound, reason.UnknownSession)
	}
	send(wire.ExecFrame{ID: "1"})
	return c.follow(ctx, input, send)
}

func (c commands) Attach(ctx context.Context, name, id, actor string, input <-chan wire.ExecInput, send func(wire.ExecFrame) error) error {
	if name != "k" || id != "1" || actor != "uid:0" {
		return refusal(kids.Tagged, reason.Tagged)
	}
	send(wire.ExecFrame{ID: "1"})
	return c.follow(ctx, input, send)
}

// follow is a command that sends its input back.
func (c commands) follow(ctx context.Context, input <-chan wire.ExecInput, send func(wire.ExecFrame) error) error {
	for {
		select {
		case in := <-input:
			if in.EOF {
				return send(wire.ExecFrame{Exit: &wire.ExecExit{Result: "exited", Code: 7}})
			}
			if err := send(wire.ExecFrame{Stderr: in.Stdin}); err != nil {
				return nil
			}
		case <-c.detached:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

func (c commands) ResizeExec(name, id string, size wire.TermSize) error {
	if name != "k" || id != "1" {
		return errors.New("another command")
	}
	c.resized <- size
	return nil
}

func (c commands) DetachExec(name, id string) error {
	c.detached <- name + " " + id
	return nil
}

// TestExecSockets: both routes pass everything on to their own command, and refusals have their status.
func TestExecSockets(t *testing.T) {
	k := commands{resized: make(chan wire.TermSize, 1), detached: make(chan string)}
	path := socketOf(t, fakeKids{Commands: k})
	for route, first := range map[string]*wire.ExecRequest{"/v1/kids/k/exec": {Argv: []string{"cat"}, Input: true}, "/v1/kids/k/execs/1/attach": nil} {
		begin := func() *execsocket.Client {
			c, err := execsocket.Dial(t.Context(), path, route)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(c.Close)
			if first != nil {
				if err := c.Start(*first); err != nil {
					t.Fatal(err)
				}
			}
			return c
		}
		c := begin()
		if _, err := c.Write([]byte("a\xff\x00")); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(c.Resize(wire.TermSize{Rows: 5, Cols: 6}), c.EndInput()); err != nil {
			t.Fatal(err)
		}
		var got string
		var exit *wire.ExecExit
		err := c.Each(func(_ json.RawMessage, f wire.ExecFrame) error { got += string(f.Stderr); exit = f.Exit; return nil })
		if err != nil || got != "a\xff\x00" || exit == nil || exit.Code != 7 {
			t.Errorf("%s: %q %+v %v", route, got, exit, err)
		}
		if z := <-k.resized; z.Rows != 5 {
			t.Errorf("%s: size %+v", route, z)
		}
		c = begin()
		if err := c.Detach(); err != nil {
			t.Fatal(err)
		}
		if err := c.Each(func(json.RawMessage, wire.ExecFrame) error { return nil }); !errors.Is(err, execsocket.ErrLeft) {
			t.Errorf("%s: left with %v", route, err)
		}
	}
	for route, want := range map[string]int{"/v1/kids/other/exec": http.StatusNotFound, "/v1/kids/k/execs/2/attach": http.StatusLocked} {
		c, err := execsocket.Dial(t.Context(), path, route)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if want == http.StatusNotFound {
			c.Start(wire.ExecRequest{Input: true}) // the answer shows it
		}
		if err := c.Each(func(json.RawMessage, wire.ExecFrame) error { return nil }); control.Status(err) != want {
			t.Errorf("%s: %v, want %d", route, err, want)
		}
	}
}

// TestExecSocketsNeedTheRole, before anything is upgraded.
func TestExecSocketsNeedTheRole(t *testing.T) {
	a := New(Config{Kids: fakeKids{}})
	for _, route := range []string{"/v1/kids/k/exec", "/v1/kids/k/execs/1/attach"} {
		for _, roles := range [][]Role{nil, {RoleRead, RoleSpawn, RoleFiles, RoleDestroy, RoleGrant}} {
			w := httptest.NewRecorder()
			r := httptest.NewRequestWithContext(WithCaller(t.Context(), Caller{Name: "key:x", Roles: roles}), http.MethodGet, route, nil)
			a.ServeHTTP(w, r)
			if w.Code != http.StatusForbidden {
				t.Errorf("%s with %v: %d", route, roles, w.Code)
			}
		}
	}
}

// socketOf serves k and returns the socket's path.
func socketOf(t *testing.T, k Kids) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "socket")
	serveAt(t, path, k, nil)
	return path
}
