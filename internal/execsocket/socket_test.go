package execsocket

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// serve serves h as a command's end on a unix socket and returns its path.
func serve(t *testing.T, cfg Config, h func(s *Server)) (path string) {
	t.Helper()
	if cfg.Origin == nil {
		cfg.Origin = SameOrigin
	}
	path = filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s, ok := Accept(w, r, cfg); ok {
			h(s)
		}
	})}
	go srv.Serve(l)
	t.Cleanup(func() { srv.Close() })
	return path
}

// cat sends its input back until it ends.
func cat(s *Server) {
	s.Follow(func(wire.TermSize) {}, func() {})
	for {
		select {
		case in := <-s.Input():
			if in.EOF {
				s.Send(wire.ExecFrame{Exit: &wire.ExecExit{Result: "exited"}})
				s.End(nil)
				return
			}
			s.Send(wire.ExecFrame{Stdout: in.Stdin})
		case <-s.Context().Done():
			s.End(nil)
			return
		}
	}
}

// idle takes nothing until its caller is gone or left.
func idle(s *Server) {
	s.Follow(func(wire.TermSize) {}, func() {})
	<-s.Context().Done()
	s.End(nil)
}

func dial(t *testing.T, path string) *Client {
	t.Helper()
	c, err := Dial(t.Context(), path, "/x")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// raw is a caller that does as it likes.
func raw(t *testing.T, path string, header http.Header, protocols ...string) (*websocket.Conn, *http.Response, error) {
	t.Helper()
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}
	ws, resp, err := websocket.Dial(t.Context(), "ws://tagout/x", &websocket.DialOptions{HTTPClient: &http.Client{Transport: tr}, HTTPHeader: header, Subprotocols: protocols})
	if err == nil {
		t.Cleanup(func() { ws.CloseNow() })
	}
	return ws, resp, err
}

// TestEveryByteComesBack: more than any window, in both directions at once.
func TestEveryByteComesBack(t *testing.T) {
	c := dial(t, serve(t, Config{}, cat))
	want := make([]byte, 8<<20)
	rand.NewChaCha8([32]byte{5}).Read(want)
	go func() {
		if _, err := c.Write(want); err != nil {
			t.Error(err)
		}
		c.EndInput() // the end shows it
	}()
	var got bytes.Buffer
	if err := c.Each(func(_ json.RawMessage, f wire.ExecFrame) error { got.Write(f.Stdout); return nil }); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), want) {
		t.Errorf("%d bytes came back, and they are others", got.Len())
	}
}

// TestControlsOvertakeInput: what a command has not read holds up neither a size, nor leaving, nor that the caller is gone.
func TestControlsOvertakeInput(t *testing.T) {
	sizes, left, gone := make(chan wire.TermSize, 1), make(chan struct{}, 1), make(chan struct{})
	path := serve(t, Config{}, func(s *Server) {
		s.Follow(func(z wire.TermSize) { sizes <- z }, func() { left <- struct{}{} })
		<-s.Context().Done()
		s.End(nil)
		close(gone)
	})
	c := dial(t, path)
	if _, err := c.Write(make([]byte, wire.ExecWindow)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Resize(wire.TermSize{Rows: 3, Cols: 4}), c.Detach()); err != nil {
		t.Fatal(err)
	}
	if z := <-sizes; z.Rows != 3 || z.Cols != 4 {
		t.Errorf("size %+v", z)
	}
	<-left
	c.Close()
	<-gone
}

// TestWhoSendsNonsenseIsLeft, and is told why.
func TestWhoSendsNonsenseIsLeft(t *testing.T) {
	piece := func(n int) string {
		raw, _ := json.Marshal(wire.ExecInput{Stdin: make([]byte, n)})
		return string(raw)
	}
	flood := make([]string, 0, wire.ExecWindow/wire.ExecMaxPiece+1)
	for range cap(flood) {
		flood = append(flood, piece(wire.ExecMaxPiece))
	}
	path := serve(t, Config{}, idle)
	for name, tt := range map[string]struct {
		send []string
		want string
	}{
		"no JSON":           {[]string{"hello"}, "invalid character"},
		"two values":        {[]string{`{"eof":true}{"eof":true}`}, "more than one"},
		"unknown field":     {[]string{`{"signal":9}`}, "unknown field"},
		"nothing":           {[]string{`{}`}, "0 of"},
		"two at once":       {[]string{`{"eof":true,"detach":true}`}, "2 of"},
		"a size that is no": {[]string{`{"resize":{"rows":-1,"cols":3}}`}, "rows"},
		"a piece too large": {[]string{piece(wire.ExecMaxPiece + 1)}, "at most"},
		"input after EOF":   {[]string{`{"eof":true}`, piece(1)}, "after its end"},
		"EOF twice":         {[]string{`{"eof":true}`, `{"eof":true}`}, "after its end"},
		"past the window":   {flood, "wait already"},
	} {
		t.Run(name, func(t *testing.T) {
			ws, _, err := raw(t, path, nil, wire.ExecProtocol)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range tt.send {
				if err := ws.Write(t.Context(), websocket.MessageText, []byte(m)); err != nil {
					t.Fatal(err)
				}
			}
			f := frame(t, ws)
			if f.Problem == nil || f.Problem.Status != http.StatusBadRequest || f.Problem.Reason != reason.Malformed || !strings.Contains(f.Problem.Detail, tt.want) {
				t.Errorf("got %+v %+v", f, f.Problem)
			}
			if _, _, err := ws.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusPolicyViolation {
				t.Errorf("ended with %v", err)
			}
		})
	}
	t.Run("control", func(t *testing.T) { // the same window, taken
		c := dial(t, serve(t, Config{}, cat))
		go func() { c.Write(make([]byte, wire.ExecWindow+wire.ExecMaxPiece)); c.EndInput() }() // the end shows it
		if err := c.Each(func(json.RawMessage, wire.ExecFrame) error { return nil }); err != nil {
			t.Error(err)
		}
	})
	t.Run("binary", func(t *testing.T) {
		ws, _, err := raw(t, path, nil, wire.ExecProtocol)
		if err != nil {
			t.Fatal(err)
		}
		ws.Write(t.Context(), websocket.MessageBinary, []byte(`{"eof":true}`)) // the answer shows it
		if f := frame(t, ws); f.Problem == nil {
			t.Errorf("got %+v", f)
		}
	})
	t.Run("too long", func(t *testing.T) {
		ws, _, err := raw(t, path, nil, wire.ExecProtocol)
		if err != nil {
			t.Fatal(err)
		}
		ws.Write(t.Context(), websocket.MessageText, make([]byte, maxInput+1)) // as above
		if _, _, err := ws.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusMessageTooBig {
			t.Errorf("ended with %v", err)
		}
	})
}

func frame(t *testing.T, ws *websocket.Conn) (f wire.ExecFrame) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, raw, err := ws.Read(ctx)
	if err == nil {
		err = json.Unmarshal(raw, &f)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestWebPagesOfOthersAreRefused; with the check off they are not.
func TestWebPagesOfOthersAreRefused(t *testing.T) {
	on, off := serve(t, Config{}, idle), serve(t, Config{Origin: func(*http.Request) bool { return true }}, idle)
	for origin, ok := range map[string]bool{
		"": true, "http://tagout": true, "http://TAGOUT": true,
		"https://tagout": false, "http://tagout:81": false, "http://evil.test": false, "http://tagout.evil.test": false, "null": false, "file://": false,
	} {
		header := http.Header{}
		if origin != "" {
			header.Set("Origin", origin)
		}
		_, resp, err := raw(t, on, header, wire.ExecProtocol)
		if ok != (err == nil) {
			t.Errorf("%q: %v", origin, err)
		}
		if !ok {
			if e := control.Refusal(resp); e.Problem.Status != http.StatusForbidden || e.Problem.Reason != reason.CrossOrigin {
				t.Errorf("%q: %+v", origin, e.Problem)
			}
		}
		if _, _, err := raw(t, off, header, wire.ExecProtocol); err != nil {
			t.Errorf("control, the check off, %q: %v", origin, err)
		}
	}
	if _, _, err := raw(t, on, http.Header{"Origin": {""}}, wire.ExecProtocol); err == nil {
		t.Error("an empty origin is none")
	}
}

func TestOtherProtocolsAreRefused(t *testing.T) {
	path := serve(t, Config{}, idle)
	for _, protocols := range [][]string{nil, {"tagout.exec.v2"}} {
		_, resp, err := raw(t, path, nil, protocols...)
		if err == nil {
			t.Fatalf("%v is spoken", protocols)
		}
		if e := control.Refusal(resp); e.Problem.Status != http.StatusBadRequest || !strings.Contains(e.Error(), wire.ExecProtocol) {
			t.Errorf("%v: %+v", protocols, e.Problem)
		}
	}
	err := control.NewClient(path).Call(t.Context(), http.MethodGet, "/x", nil, nil)
	if control.Status(err) != http.StatusUpgradeRequired {
		t.Errorf("no WebSocket at all: %v", err)
	}
}

// TestTheFirstMessageIsStrict and bounded.
func TestTheFirstMessageIsStrict(t *testing.T) {
	got := make(chan error, 1)
	path := serve(t, Config{}, func(s *Server) {
		var r wire.ExecRequest
		err := s.First(&r, 4096)
		got <- err
		if err == nil && r.Shell != "x" {
			t.Errorf("request %+v", r)
		}
		s.End(nil)
	})
	for message, ok := range map[string]bool{`{"shell":"x","input":true}`: true, `{"shel":"x"}`: false, `{"shell":"x"}1`: false, `{"shell":"` + strings.Repeat("x", 4096) + `"}`: false} {
		ws, _, err := raw(t, path, nil, wire.ExecProtocol)
		if err != nil {
			t.Fatal(err)
		}
		ws.Write(t.Context(), websocket.MessageText, []byte(message)) // what comes of it shows it
		go io.Copy(io.Discard, websocket.NetConn(t.Context(), ws, websocket.MessageText))
		if err := <-got; (err == nil) != ok {
			t.Errorf("%.40s: %v", message, err)
		}
	}
}

// TestWhoIsSilentIsGone where the kernel cannot tell; who is on this machine is only slow.
func TestWhoIsSilentIsGone(t *testing.T) {
	over := make(chan struct{}, 2)
	until := func(s *Server) { idle(s); over <- struct{}{} }
	quick := Config{Remote: true, every: 10 * time.Millisecond, patience: 50 * time.Millisecond}
	if _, _, err := raw(t, serve(t, quick, until), nil, wire.ExecProtocol); err != nil { // nothing reads, so nothing answers
		t.Fatal(err)
	}
	<-over
	asked := make(chan struct{})
	local := Config{every: time.Millisecond, patience: time.Millisecond, Counts: count(asked, 50)}
	if _, _, err := raw(t, serve(t, local, until), nil, wire.ExecProtocol); err != nil {
		t.Fatal(err)
	}
	<-asked
	select {
	case <-over:
		t.Error("a caller on this machine who is slow was left")
	default:
	}
	answers := quick
	answers.Counts = count(asked, 20)
	ws, _, err := raw(t, serve(t, answers, until), nil, wire.ExecProtocol)
	if err != nil {
		t.Fatal(err)
	}
	ws.CloseRead(t.Context())
	<-asked
	select {
	case <-over:
		t.Error("a caller who answers was left")
	default:
	}
}

// count closes nothing and says nothing for n calls, and then tells.
func count(tell chan<- struct{}, n int) func() error {
	return func() error {
		if n--; n == 0 {
			go func() { tell <- struct{}{} }()
		}
		return nil
	}
}

// TestWhoCountsNoMoreIsLeft, and everybody when the daemon ends.
func TestWhoCountsNoMoreIsLeft(t *testing.T) {
	ending := make(chan struct{})
	close(ending)
	for name, tt := range map[string]struct {
		cfg    Config
		status int
	}{
		"key removed": {Config{every: time.Millisecond, Counts: func() error { return errors.New("the key counts no more") }}, http.StatusUnauthorized},
		"daemon ends": {Config{Ending: ending}, http.StatusServiceUnavailable},
	} {
		c := dial(t, serve(t, tt.cfg, idle))
		err := c.Each(func(json.RawMessage, wire.ExecFrame) error { return nil })
		if control.Status(err) != tt.status {
			t.Errorf("%s: %v, want %d", name, err, tt.status)
		}
	}
}

// TestEndsAreToldApart by the caller's end.
func TestEndsAreToldApart(t *testing.T) {
	var end func(s *Server)
	path := serve(t, Config{}, func(s *Server) { s.Follow(func(wire.TermSize) {}, func() {}); end(s) })
	none := func(json.RawMessage, wire.ExecFrame) error { return nil }
	end = func(s *Server) { s.End(nil) }
	c := dial(t, path)
	if err := c.Each(none); !errors.Is(err, ErrCut) {
		t.Errorf("nothing was said: %v", err)
	}
	c = dial(t, path)
	c.Detach() // the end shows it
	if err := c.Each(none); !errors.Is(err, ErrLeft) {
		t.Errorf("left: %v", err)
	}
	end = func(s *Server) { s.End(&wire.Problem{Title: "t", Status: http.StatusLocked, Reason: reason.Tagged}) }
	if err := dial(t, path).Each(none); control.Status(err) != http.StatusLocked {
		t.Errorf("refused: %v", err)
	}
	var u *control.Unanswered
	if _, err := Dial(t.Context(), path+"-none", "/x"); !errors.As(err, &u) {
		t.Errorf("nobody there: %v", err)
	}
}
