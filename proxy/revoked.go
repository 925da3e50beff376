package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// watchAgain is how long the proxy waits before it asks credd for its revocations again.
const watchAgain = 50 * time.Millisecond

// revokedDetail is what records say of a connection that was cut for it.
const revokedDetail = "the credential that it carried was revoked, or has expired"

// RevocationsOver returns what credd, at the other end of c, says about revocations: fn gets each one, in order, of
// which the first says that the stream has begun, until ctx ends or the stream does.
func RevocationsOver(c *control.Client) func(ctx context.Context, fn func(wire.Revoked)) error {
	return func(ctx context.Context, fn func(wire.Revoked)) error {
		return c.Each(ctx, http.MethodGet, "/v1/revocations", nil, func(raw json.RawMessage) error {
			var r wire.Revoked
			if err := json.Unmarshal(raw, &r); err != nil {
				return fmt.Errorf("reading a revocation: %w", err)
			}
			fn(r)
			return nil
		})
	}
}

// carrying knows which connections have shown which tokens, from before credd was asked: whichever comes first, credd's
// answer to a use or its word that the token is revoked, no request goes on with what a revoked token stood for.
//
// A connection is cut whole. What else it carries goes to the same server for the same kid, and what the kernel has not
// sent yet of a stream cannot be told apart in the socket of the connection.
type carrying struct {
	Tokens
	watched bool        // somebody tells of revocations; set once
	live    atomic.Bool // and does so now

	mu    sync.Mutex
	conns map[*conn]map[string]*showing // guarded by mu: by the tokens' ids
}

// showing is one token on one connection. What credd refuses is forgotten: a kid can make up as many as it likes.
type showing struct {
	asked    int // questions that credd has not answered yet
	accepted bool
}

type connKey struct{}

// Resolve implements Tokens. Where nobody tells of revocations at the moment, nothing is asked for.
func (t *carrying) Resolve(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
	done := func(bool) {}
	if c, ok := ctx.Value(connKey{}).(*conn); ok && !req.None {
		done = t.note(c, wire.TokenID(req.Token))
	}
	reply, err := t.ask(ctx, req)
	done(err == nil)
	return reply, err
}

func (t *carrying) ask(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
	if t.watched && !t.live.Load() { // after the note: a stream that ends now cuts what was noted
		return wire.ResolveReply{}, fmt.Errorf("credd does not say which tokens are revoked: is it running?")
	}
	return t.Tokens.Resolve(ctx, req)
}

// note remembers that the connection shows the token, as long as nobody says by done that it was refused.
func (t *carrying) note(c *conn, id string) (done func(accepted bool)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conns[c] == nil {
		t.conns[c] = map[string]*showing{}
	}
	s := t.conns[c][id]
	if s == nil {
		s = &showing{}
		t.conns[c][id] = s
	}
	s.asked++
	return func(accepted bool) {
		t.mu.Lock()
		defer t.mu.Unlock()
		s.asked--
		s.accepted = s.accepted || accepted
		if s.accepted || s.asked > 0 {
			return
		}
		delete(t.conns[c], id)
		if len(t.conns[c]) == 0 {
			delete(t.conns, c)
		}
	}
}

func (t *carrying) forget(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, c)
}

// concerned returns the connections that have shown what is revoked.
func (t *carrying) concerned(r wire.Revoked) []*conn {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []*conn
	for c, shown := range t.conns {
		if r.All || slices.Contains(r.Marks, c.sess.doc.Mark) || slices.ContainsFunc(r.Tokens, func(id string) bool { return shown[id] != nil }) {
			out = append(out, c)
		}
	}
	return out
}

// watch cuts what carries revoked credentials, until ctx ends. A stream that ends is a credd that ended, and with it all
// tokens.
func (t *carrying) watch(ctx context.Context, revocations func(context.Context, func(wire.Revoked)) error) {
	for ctx.Err() == nil {
		revocations(ctx, func(r wire.Revoked) { // whatever the error is, it is over
			t.live.Store(true)
			t.cut(r)
		})
		t.live.Store(false)
		if ctx.Err() != nil {
			return // it is this proxy that ends
		}
		t.cut(wire.Revoked{All: true})
		select {
		case <-time.After(watchAgain):
		case <-ctx.Done():
		}
	}
}

func (t *carrying) cut(r wire.Revoked) {
	for _, c := range t.concerned(r) {
		c.cut(reason.TokenUnknown, revokedDetail)
	}
}
