package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// teller is a credd that tells of revocations. Closing it ends a stream; another may begin.
type teller struct {
	say   chan wire.Revoked
	begun chan struct{}
}

func newTeller() *teller { return &teller{make(chan wire.Revoked), make(chan struct{}, 16)} }

func (t *teller) revocations(ctx context.Context, fn func(wire.Revoked)) error {
	fn(wire.Revoked{})
	t.begun <- struct{}{}
	for {
		select {
		case r, ok := <-t.say:
			if !ok {
				return io.EOF
			}
			fn(r)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// drip is a body that goes on for as long as somebody takes it.
type drip struct {
	ctx  context.Context
	head string
}

func (d *drip) Read(p []byte) (int, error) {
	if d.head != "" {
		n := copy(p, d.head)
		d.head = d.head[n:]
		return n, nil
	}
	select {
	case <-d.ctx.Done():
		return 0, d.ctx.Err()
	case <-time.After(time.Millisecond):
		return copy(p, "more "), nil
	}
}

// streams are the ways in which a request with a credential can be under way.
var streams = map[string]func(ctx context.Context, at string) (*http.Request, error){
	"upload": func(ctx context.Context, at string) (*http.Request, error) {
		return http.NewRequestWithContext(ctx, "POST", at+"/up", &drip{ctx, "first "})
	},
	"download": func(ctx context.Context, at string) (*http.Request, error) {
		return http.NewRequestWithContext(ctx, "GET", at+"/down", nil)
	},
}

// streaming starts a stream that carries the token's secret, and returns once the server has some of it. served ends when
// the server's side does.
func streaming(t *testing.T, w *world, h2 bool, kind string) (served <-chan struct{}) {
	t.Helper()
	begun, over := make(chan struct{}, 1), make(chan struct{})
	at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		defer close(over)
		if r.Header.Get("X-Api-Key") != realValue {
			t.Errorf("the server got %q", r.Header)
		}
		if r.URL.Path == "/up" {
			io.ReadFull(r.Body, make([]byte, 6))
			begun <- struct{}{}
			io.Copy(io.Discard, r.Body)
			return
		}
		begun <- struct{}{}
		for r.Context().Err() == nil {
			if _, err := io.WriteString(rw, "more "); err != nil {
				return
			}
			http.NewResponseController(rw).Flush()
			time.Sleep(time.Millisecond) // the pace of the stream, not a wait
		}
	}))
	w.allowInspected(at, func(r *policy.Rule) { r.Credential, r.Methods = "api", nil })
	client := w.h2client(at)
	client.Timeout = 0
	client.Transport.(*http.Transport).Protocols.SetHTTP1(!h2)
	client.Transport.(*http.Transport).Protocols.SetHTTP2(h2)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	r, err := streams[kind](ctx, urlOf(at, ""))
	must(t, err)
	r.Header.Set("X-Api-Key", token)
	go func() {
		if resp, err := client.Do(r); err == nil {
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}()
	select {
	case <-begun:
	case <-time.After(patience):
		t.Fatal("the stream did not begin")
	}
	return over
}

func isOver(served <-chan struct{}) bool {
	select {
	case <-served:
		return true
	default:
		return false
	}
}

// TestWhatCarriesARevokedCredentialIsCut: a body that is under way with the credential ends when its token, its session or
// everything is revoked, and when credd ends; the record says why. The controls are another token's and another session's
// revocation, and a proxy that nobody tells.
func TestWhatCarriesARevokedCredentialIsCut(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		for kind := range streams {
			for name, r := range map[string]wire.Revoked{
				"token": {Tokens: []string{"000000000000", wire.TokenID(token)}}, "session": {Marks: []uint32{kidMark + 1, kidMark}}, "all": {All: true}, "credd": {},
			} {
				t.Run(fmt.Sprintf("h2 %v %s %s", h2, kind, name), func(t *testing.T) {
					t.Parallel()
					told := newTeller()
					w := newWorld(t, func(c *Config) { c.Revocations = told.revocations })
					w.tokens.resolve = credd
					<-told.begun
					served := streaming(t, w, h2, kind)
					told.say <- wire.Revoked{Tokens: []string{wire.TokenID(otherToken)}, Marks: []uint32{kidMark + 1}}
					told.say <- wire.Revoked{Tokens: []string{"none"}} // the one before has been dealt with
					if isOver(served) {
						t.Fatal("cut for another session's revocation")
					}
					from := time.Now()
					if name == "credd" {
						close(told.say)
					} else {
						told.say <- r
					}
					select {
					case <-served:
					case <-time.After(patience):
						t.Fatal("the stream goes on")
					}
					if took := time.Since(from); took > 2*time.Second {
						t.Errorf("it was cut after %v", took)
					}
					w.records.wait(t, "the record of the cut", func(r audit.Record) bool {
						return r.Reason == reason.TokenUnknown && strings.Contains(r.Detail, revokedDetail)
					})
				})
			}
		}
	}
}

// TestNobodyToldNothingCut is the control: without the stream of revocations the body goes on.
func TestNobodyToldNothingCut(t *testing.T) {
	w := newWorld(t)
	w.tokens.resolve = credd
	served := streaming(t, w, false, "upload")
	w.tokens.resolve = func(context.Context, wire.ResolveRequest) (wire.ResolveReply, error) {
		return wire.ResolveReply{}, &control.Error{Problem: wire.Problem{Status: 403, Reason: reason.TokenUnknown}}
	}
	select {
	case <-served:
		t.Error("it was cut all the same: the test of the cut shows nothing")
	case <-time.After(300 * time.Millisecond): // a hundred times what a cut takes
	}
}

// TestARevocationThatCreddsAnswerOvertakes: the proxy hears of it before credd's answer to a use that was accepted just
// before, and sends nothing.
func TestARevocationThatCreddsAnswerOvertakes(t *testing.T) {
	told := newTeller()
	w := newWorld(t, func(c *Config) { c.Revocations = told.revocations })
	<-told.begun
	w.tokens.resolve = func(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
		told.say <- wire.Revoked{Tokens: []string{wire.TokenID(token)}}
		told.say <- wire.Revoked{} // the one before has been dealt with
		return credd(ctx, req)
	}
	reached := make(chan struct{}, 1)
	c, _ := w.judged(true, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached <- struct{}{} }),
		func(r *policy.Rule) { r.Credential = "api" })
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+apiHost+"\r\nX-Api-Key: "+token+"\r\n\r\n")
	if got, _ := io.ReadAll(c); bytes.Contains(got, []byte("200 OK")) {
		t.Errorf("answered %q", got)
	}
	select {
	case <-reached:
		t.Error("the secret reached the server")
	default:
	}
}

// TestRefusedTokensAreForgotten: a kid that makes up tokens makes the proxy remember none of them.
func TestRefusedTokensAreForgotten(t *testing.T) {
	told := newTeller()
	w := newWorld(t, func(c *Config) { c.Revocations = told.revocations })
	<-told.begun
	w.tokens.resolve = credd
	c, _ := w.judged(true, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), func(r *policy.Rule) { r.Credential = "api" })
	var raw string
	for i := range 20 {
		made := fmt.Sprintf("tgo_%032s", strings.Repeat("a", i)+"b")
		raw += "GET / HTTP/1.1\r\nHost: " + apiHost + "\r\nX-Api-Key: " + strings.ReplaceAll(made, " ", "c") + "\r\n\r\n"
	}
	raw += "GET / HTTP/1.1\r\nHost: " + apiHost + "\r\nX-Api-Key: " + token + "\r\n\r\n"
	ask(t, c, raw, 21)
	w.proxy.carrying.mu.Lock()
	defer w.proxy.carrying.mu.Unlock()
	for _, shown := range w.proxy.carrying.conns {
		if len(shown) != 1 || shown[wire.TokenID(token)] == nil {
			t.Errorf("%d tokens are remembered", len(shown))
		}
	}
	if len(w.proxy.carrying.conns) != 1 {
		t.Errorf("%d connections are remembered", len(w.proxy.carrying.conns))
	}
}

// TestWithoutAStreamNothingIsSwapped (invariant 1): a proxy that would not hear of a revocation asks for no secret, and
// does again once it would.
func TestWithoutAStreamNothingIsSwapped(t *testing.T) {
	told := newTeller()
	begin := make(chan struct{})
	w := newWorld(t, func(c *Config) {
		c.Revocations = func(ctx context.Context, fn func(wire.Revoked)) error {
			select {
			case <-begin:
				return told.revocations(ctx, fn)
			default:
				return errors.New("connection refused")
			}
		}
	})
	w.tokens.resolve = func(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
		if !w.proxy.carrying.live.Load() {
			t.Error("credd was asked")
		}
		return credd(ctx, req)
	}
	c, _ := w.judged(true, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), func(r *policy.Rule) { r.Credential = "api" })
	use := "GET / HTTP/1.1\r\nHost: " + apiHost + "\r\nX-Api-Key: " + token + "\r\n\r\n"
	if p := problemOf(t, ask(t, c, use, 1)[0]); p.Reason != reason.CreddDown {
		t.Errorf("refused with %v", p.Reason)
	}
	close(begin)
	<-told.begun
	c, _ = w.judged(true, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), func(r *policy.Rule) { r.Credential = "api" })
	if resp := ask(t, c, use, 1)[0]; resp.StatusCode != http.StatusOK {
		t.Errorf("answered %d once credd tells", resp.StatusCode)
	}
	if n := len(w.proxy.carrying.concerned(wire.Revoked{All: true})); n == 0 {
		t.Error("the connection is not known to carry anything")
	}
	w.stop()
	if n := len(w.proxy.carrying.concerned(wire.Revoked{All: true})); n != 0 {
		t.Errorf("%d connections are remembered after their end", n)
	}
}
