package execsocket

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync"

	"github.com/coder/websocket"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// maxFrame bounds a message of the daemon.
const maxFrame = 1 << 20

// ErrLeft is the end of a connection whose command goes on.
var ErrLeft = errors.New("the command goes on without its caller")

// ErrCut is the end of a connection that nobody had announced.
var ErrCut = errors.New("the connection ended before the command did")

// Client is the caller's end. Its Write is the command's input: it sends only what there is room for.
type Client struct {
	ws  *websocket.Conn
	ctx context.Context

	mu     sync.Mutex
	room   int           // guarded by mu; bytes of input that may be sent
	more   chan struct{} // of one: there is more room
	leaves bool          // guarded by mu
}

// Dial opens the route over the unix socket at path. Its errors are control's: *control.Error where the daemon refused,
// *control.Unanswered where it did not answer. The connection ends with ctx.
func Dial(ctx context.Context, path, route string) (*Client, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
	transport := &http.Transport{DialContext: dial, DisableCompression: true}
	ws, resp, err := websocket.Dial(ctx, "ws://tagout"+route, &websocket.DialOptions{
		HTTPClient: &http.Client{Transport: transport}, Subprotocols: []string{wire.ExecProtocol},
	})
	switch {
	case err != nil && resp != nil && resp.StatusCode >= http.StatusBadRequest:
		return nil, control.Refusal(resp)
	case err != nil:
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err
		}
		return nil, &control.Unanswered{Route: route, Socket: path, Err: err}
	case ws.Subprotocol() != wire.ExecProtocol:
		ws.CloseNow() // it is not what was asked for
		return nil, fmt.Errorf("sandboxd does not speak %s: is it older than this command?", wire.ExecProtocol)
	}
	ws.SetReadLimit(maxFrame)
	return &Client{ws: ws, ctx: ctx, room: wire.ExecWindow, more: make(chan struct{}, 1)}, nil
}

// Start sends what is to be run.
func (c *Client) Start(r wire.ExecRequest) error { return c.send(r) }

func (c *Client) send(v any) error {
	raw, err := json.Marshal(v)
	if err == nil {
		err = c.ws.Write(c.ctx, websocket.MessageText, raw)
	}
	if err != nil {
		return fmt.Errorf("sending to sandboxd: %w", err)
	}
	return nil
}

// Write implements io.Writer.
func (c *Client) Write(p []byte) (n int, err error) {
	for n < len(p) {
		room, err := c.wait()
		if err != nil {
			return n, err
		}
		piece := p[n:min(len(p), n+room, n+handed)]
		if err := c.send(wire.ExecInput{Stdin: piece}); err != nil {
			return n, err
		}
		c.take(len(piece))
		n += len(piece)
	}
	return n, nil
}

// wait returns how much may be sent, once it is more than nothing.
func (c *Client) wait() (int, error) {
	for {
		c.mu.Lock()
		room := c.room
		c.mu.Unlock()
		if room > 0 {
			return room, nil
		}
		select {
		case <-c.more:
		case <-c.ctx.Done():
			return 0, c.ctx.Err()
		}
	}
}

func (c *Client) take(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.room -= n
}

func (c *Client) taken(n int) {
	c.take(-n)
	select {
	case c.more <- struct{}{}:
	default: // it is known
	}
}

// Settle waits until all that was written has been taken, or ctx ends. Nobody may write meanwhile.
func (c *Client) Settle(ctx context.Context) error {
	for {
		c.mu.Lock()
		settled := c.room == wire.ExecWindow
		c.mu.Unlock()
		if settled {
			return nil
		}
		select {
		case <-c.more:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// EndInput says that no more input follows.
func (c *Client) EndInput() error { return c.send(wire.ExecInput{EOF: true}) }

// Resize gives the command's terminal another size.
func (c *Client) Resize(s wire.TermSize) error { return c.send(wire.ExecInput{Resize: &s}) }

// Detach asks to let the command run on without this caller.
func (c *Client) Detach() error {
	c.mu.Lock()
	c.leaves = true
	c.mu.Unlock()
	return c.send(wire.ExecInput{Detach: true})
}

// Each calls fn with each frame, as it came and decoded, until the command has ended, which is nil, or fn fails. A refusal
// is a *control.Error; see also ErrLeft and ErrCut.
func (c *Client) Each(fn func(line json.RawMessage, f wire.ExecFrame) error) error {
	for {
		_, raw, err := c.ws.Read(c.ctx)
		if err != nil {
			return c.over(err)
		}
		var f wire.ExecFrame
		if err := json.Unmarshal(raw, &f); err != nil {
			return fmt.Errorf("reading a frame: %w", err)
		}
		if f.Problem != nil {
			return &control.Error{Problem: *f.Problem}
		}
		if f.Taken > 0 {
			c.taken(f.Taken)
			continue
		}
		if err := fn(raw, f); err != nil {
			return err
		}
		if f.Exit != nil {
			return nil
		}
	}
}

func (c *Client) over(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.ctx.Err() != nil:
		return c.ctx.Err()
	case websocket.CloseStatus(err) == websocket.StatusNormalClosure && c.leaves:
		return ErrLeft
	}
	return ErrCut
}

// Close ends the connection, and with it the command unless it is detached.
func (c *Client) Close() { c.ws.CloseNow() } // whoever is at the other end learns it from the kernel
