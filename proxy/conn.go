package proxy

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// Ways in.
const (
	viaTransparent = "transparent"
	viaExplicit    = "explicit"
)

// target is where a connection goes, in the policy's words.
type target struct {
	name string
	port uint16
}

// conn is one connection of a kid, with everything that was opened for it.
type conn struct {
	p      *Proxy
	id     string // ULID, joins its records
	via    string
	client *net.TCPConn
	kid    netip.AddrPort
	sess   *entry // nil for an unknown sender
	ctx    context.Context
	cancel context.CancelFunc
	start  time.Time

	up, down atomic.Int64 // bytes to and from upstream sockets

	mu        sync.Mutex
	orig      netip.AddrPort         // guarded by mu: what the kid dialled; zero for explicit connections
	target    target                 // guarded by mu: what it was last judged for
	rule      *policy.Rule           // guarded by mu: the rule that allowed that
	upstreams map[*upstream]struct{} // guarded by mu: open now
	real      netip.Addr             // guarded by mu: the last upstream address
	opened    bool                   // guarded by mu: conn.opened with outcome allow is written
	wasCut    bool                   // guarded by mu, as why:
	cutCode   reason.Code
	cutDetail string
	note      string       // guarded by mu: what the record of the end should say
	tunnel    *net.TCPConn // guarded by mu: the upstream end of a relay

	askOnce  sync.Once
	process  *audit.Process // written once, under askOnce
	pending  bool           // a CONNECT that is not answered yet; owned by the connection's goroutine
	progress time.Time      // owned by the reaper
}

// upstream is a socket to a server, opened for one connection and one target.
type upstream struct {
	tcp    *net.TCPConn
	target target
	rule   *policy.Rule
	addr   netip.Addr
}

func (p *Proxy) newConn(tc *net.TCPConn, via string) *conn {
	kid := tc.RemoteAddr().(*net.TCPAddr).AddrPort()
	now := time.Now()
	c := &conn{
		p: p, id: ulid.Make().String(), via: via, client: tc, start: now, progress: now,
		kid: netip.AddrPortFrom(kid.Addr().Unmap(), kid.Port()), upstreams: map[*upstream]struct{}{},
	}
	c.ctx, c.cancel = context.WithCancel(p.ctx)
	return c
}

// aim judges the connection for a destination by the policy in force and remembers both, so that a later
// policy can be held against them. Judging under the lock leaves no gap between the two.
func (c *conn) aim(t target) policy.Decision {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.target, c.rule = t, nil
	r := c.sess.current()
	if r == nil {
		return policy.Decision{Reason: reason.PolicyNotLoaded}
	}
	d := r.policy.Connect(t.name, t.port)
	c.rule = d.Rule
	return d
}

// stillAllowed holds the connection against a new policy.
func (c *conn) stillAllowed(r *rules) (reason.Code, string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.target.name == "" {
		return reason.OK, "" // not judged yet: it will be judged by the new policy
	}
	if r == nil {
		return reason.PolicyNotLoaded, ""
	}
	d := r.policy.Connect(c.target.name, c.target.port)
	if d.Verdict != policy.Allow {
		return d.Reason, "the policy has changed: " + d.Detail
	}
	if c.rule != nil && (c.rule.Protocol != d.Rule.Protocol || c.rule.Inspect != d.Rule.Inspect) {
		return reason.NameNotAllowed, "the policy has changed: the rule now wants another protocol"
	}
	for u := range c.upstreams {
		if d := u.judge(r); d.Verdict != policy.Allow {
			return d.Reason, "the policy has changed: " + d.Detail
		}
	}
	return reason.OK, ""
}

// cut resets both sides at once; whatever waits on the connection fails. Only the first reason counts.
func (c *conn) cut(code reason.Code, detail string) {
	c.mu.Lock()
	if !c.wasCut {
		c.wasCut, c.cutCode, c.cutDetail = true, code, detail
	}
	ups := make([]*upstream, 0, len(c.upstreams))
	for u := range c.upstreams {
		ups = append(ups, u)
	}
	c.mu.Unlock()
	c.cancel()
	reset(c.client)
	for _, u := range ups {
		reset(u.tcp)
	}
}

// reset closes with a RST: nothing that is still queued in the kernel is sent.
func reset(tc *net.TCPConn) {
	tc.SetLinger(0) //nolint:errcheck // closed already
	tc.Close()      //nolint:errcheck // closed already
}

// attach makes an upstream socket the connection's. It closes it where the connection was cut meanwhile, or
// where a policy that came into force since the dial does not allow it; the error is a refusal.
func (c *conn) attach(u *upstream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.wasCut {
		reset(u.tcp)
		return refusal{c.cutCode, c.cutDetail, u.rule}
	}
	if d := u.judge(c.sess.current()); d.Verdict != policy.Allow {
		reset(u.tcp)
		return refuseBy(d)
	}
	c.upstreams[u] = struct{}{}
	c.real = u.addr
	return nil
}

// judge asks a policy about the socket's name, port and address.
func (u *upstream) judge(r *rules) policy.Decision {
	if r == nil {
		return policy.Decision{Reason: reason.PolicyNotLoaded}
	}
	d := r.policy.Connect(u.target.name, u.target.port)
	if d.Verdict == policy.Allow {
		d = r.policy.Upstream(d.Rule, u.addr, u.target.port)
	}
	return d
}

func (c *conn) detach(u *upstream) {
	c.mu.Lock()
	delete(c.upstreams, u)
	c.mu.Unlock()
}

// sockets returns the upstream sockets that are open now.
func (c *conn) sockets() []*net.TCPConn {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]*net.TCPConn, 0, len(c.upstreams))
	for u := range c.upstreams {
		out = append(out, u.tcp)
	}
	return out
}

// say keeps what the record of the connection's end should explain.
func (c *conn) say(note string) {
	c.mu.Lock()
	if c.note == "" {
		c.note = note
	}
	c.mu.Unlock()
}

func (c *conn) count(up, down int64) {
	c.up.Add(up)
	c.down.Add(down)
	c.p.cfg.Metrics.Bytes(up, down)
}

// How long a client may take to read a refusal and to hang up.
const (
	lingerTime  = 500 * time.Millisecond
	lingerBytes = 256 << 10
)

// hangUp closes the client's side so that it still reads what was written last: closing a socket that has
// unread bytes would send a RST that overtakes them.
func (c *conn) hangUp() {
	deadline := time.Now().Add(lingerTime)
	if c.client.CloseWrite() == nil && c.client.SetDeadline(deadline) == nil {
		drain(c.client, lingerBytes)
	}
	c.client.Close() //nolint:errcheck // nothing is lost
}

func drain(r interface{ Read([]byte) (int, error) }, limit int) {
	buf := make([]byte, 4<<10)
	for limit > 0 {
		n, err := r.Read(buf)
		limit -= n
		if err != nil {
			return
		}
	}
}
