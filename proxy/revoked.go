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
	conns map[*conn][]string // guarded by mu: ids of the tokens
}

type connKey struct{}

// Resolve implements Tokens. Where nobody tells of revocations at the moment, nothing is asked for.
func (t *carrying) Resolve(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
	if c, ok := ctx.Value(connKey{}).(*conn); ok && !req.None {
		t.note(c, wire.TokenID(req.Token))
	}
	if t.watched && !t.live.Load() { // after the note: a stream that ends now cuts what was noted
		return wire.ResolveReply{}, fmt.Errorf("credd does not say which tokens are revoked: is it running?")
	}
	return t.Tokens.Resolve(ctx, req)
}

func (t *carrying) note(c *conn, id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.Contains(t.conns[c], id) {
		t.conns[c] = append(t.conns[c], id)
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
	for c, ids := range t.conns {
		if r.All || slices.Contains(r.Marks, c.sess.doc.Mark) || slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(r.Tokens, id) }) {
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
