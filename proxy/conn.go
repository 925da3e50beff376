package proxy

import (
	"context"
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
	client *sock
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
	bound     bool                   // guarded by mu: the whole connection goes there, not just one request
	upstreams map[*upstream]struct{} // guarded by mu: open now
	requests  map[*exchange]struct{} // guarded by mu: allowed and not over; nil until the first one
	real      netip.Addr             // guarded by mu: the last upstream address
	opened    bool                   // guarded by mu: conn.opened with outcome allow is written
	wasCut    bool                   // guarded by mu, as why:
	cutCode   reason.Code
	cutDetail string
	note      string      // guarded by mu: what the record of the end should say
	noteCode  reason.Code // guarded by mu: its reason, where the connection was not cut
	tunnel    *sock       // guarded by mu: the upstream end of a relay

	held int64 // guarded by sess.mu: bytes booked on the session

	askOnce  sync.Once
	process  *audit.Process // written once, under askOnce
	pending  bool           // a CONNECT that is not answered yet; owned by the connection's goroutine
	progress time.Time      // owned by the reaper
}

// upstream is a socket to a server, opened for one connection and one target.
type upstream struct {
	tcp    *sock
	target target
	rule   *policy.Rule
	addr   netip.Addr
	meter  *meter // counts towards the rule's limits
}

func (p *Proxy) newConn(tc *sock, via string) *conn {
	now := time.Now()
	c := &conn{
		p: p, id: ulid.Make().String(), via: via, client: tc, start: now, progress: now,
		kid: tc.remote, upstreams: map[*upstream]struct{}{},
	}
	c.ctx, c.cancel = context.WithCancel(context.WithValue(p.ctx, connKey{}, c))
	return c
}

// aim judges the connection for a destination by the policy in force and remembers both, so that a later
// policy can be held against them. Judging under the lock leaves no gap between the two.
func (c *conn) aim(t target) policy.Decision {
	c.mu.Lock()
	c.target, c.rule, c.bound = t, nil, true
	d := c.sess.current().connect(t)
	c.rule = d.Rule
	c.mu.Unlock()
	if d.Verdict != policy.Allow {
		return d
	}
	if why := c.sess.limits(d.Rule, rateConns); why != nil {
		return policy.Decision{Rule: d.Rule, Reason: why.code, Detail: why.detail}
	}
	return d
}

// admit judges one request by the policy in force and, where it may pass, remembers it until release, as aim
// does for a whole connection.
func (c *conn) admit(x *exchange) policy.Decision {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.bound {
		c.target, c.rule = x.target, nil
	}
	if c.wasCut {
		return policy.Decision{Reason: c.cutCode, Detail: c.cutDetail}
	}
	d := x.judge(c.sess.current())
	if d.Rule != nil && !c.bound {
		c.rule = d.Rule
	}
	if d.Verdict == policy.Allow {
		if c.requests == nil {
			c.requests = map[*exchange]struct{}{}
		}
		c.requests[x] = struct{}{}
	}
	return d
}

func (c *conn) release(x *exchange) {
	c.mu.Lock()
	delete(c.requests, x)
	c.mu.Unlock()
}

// judgeAgain holds the connection against a newer policy. What it does not allow any more is cut; what it
// does allow is left alone, at its new limits. It returns how many connections and requests were cut.
func (c *conn) judgeAgain(r *rules) int {
	code, detail, ended := c.against(r)
	if code != reason.OK {
		c.cut(code, detail)
		return 1
	}
	for _, x := range ended {
		x.abort()
	}
	return len(ended)
}

// changed puts a decision of a newer policy into the words of a cut.
func changed(d policy.Decision) (reason.Code, string) {
	if d.Reason == reason.Expired {
		return reason.Expired, d.Detail
	}
	return reason.PolicyChanged, d.Reason.String() + ": " + d.Detail
}

// against says whether the whole connection has to end under a newer policy, and otherwise which of its
// requests have to.
func (c *conn) against(r *rules) (code reason.Code, detail string, ended []*exchange) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bound && c.target.name != "" {
		d := r.connect(c.target)
		if d.Verdict != policy.Allow {
			code, detail = changed(d)
			return code, detail, nil
		}
		if c.rule != nil && (c.rule.Protocol != d.Rule.Protocol || c.rule.Inspect != d.Rule.Inspect) {
			return reason.PolicyChanged, "the rule now wants another protocol", nil
		}
	}
	for x := range c.requests {
		d := x.judge(r)
		if d.Verdict == policy.Allow {
			continue
		}
		code, detail = changed(d)
		if !x.layer.h2 {
			return code, detail, nil
		}
		x.ended.Store(&refusal{code, detail, x.rule})
		ended = append(ended, x)
	}
	code, detail = c.upstreamsAgainst(r)
	return code, detail, ended
}

// upstreamsAgainst holds the open upstream sockets against a newer policy. One that carries nothing now is
// closed quietly; one that does, for the connection's own target, is a reason to cut. c.mu is held.
func (c *conn) upstreamsAgainst(r *rules) (reason.Code, string) {
	for u := range c.upstreams {
		d := u.judge(r)
		switch {
		case d.Verdict == policy.Allow:
			u.meter.quota.Store(c.sess.usage.quota(r.heir(u.rule, d.Rule, u.target.port), u.target.port))
		case u.target == c.target && (c.bound || len(c.requests) > 0):
			return changed(d)
		default:
			reset(u.tcp)
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

// attach makes an upstream socket the connection's. It closes it where the connection was cut meanwhile, or
// where a policy that came into force since the dial does not allow it; the error is a refusal.
func (c *conn) attach(u *upstream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.wasCut {
		reset(u.tcp)
		return refusal{c.cutCode, c.cutDetail, u.rule}
	}
	d := u.judge(c.sess.current())
	if d.Verdict != policy.Allow {
		reset(u.tcp)
		return refuseBy(d)
	}
	u.meter = c.sess.usage.meter(u.rule, u.target.port)
	c.upstreams[u] = struct{}{}
	c.real = u.addr
	return nil
}

// judge asks a policy about the socket's name, port and address.
func (u *upstream) judge(r *rules) policy.Decision {
	d := r.connect(u.target)
	if d.Verdict == policy.Allow {
		rule := d.Rule
		d = r.policy.Upstream(rule, u.addr, u.target.port)
		d.Rule = rule
	}
	return d
}

func (c *conn) detach(u *upstream) {
	c.mu.Lock()
	delete(c.upstreams, u)
	c.mu.Unlock()
}

// sockets returns the upstream sockets that are open now.
func (c *conn) sockets() []*sock {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]*sock, 0, len(c.upstreams))
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

// aimedAt returns what the connection was last judged for.
func (c *conn) aimedAt() target {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.target
}

// full ends a connection for which the session's share of memory does not suffice.
func (c *conn) full() {
	const detail = "the kid's connections keep too much waiting"
	c.mu.Lock()
	opened := c.opened
	c.mu.Unlock()
	if opened {
		c.blame(reason.Capacity, detail)
	} else {
		c.recordRefused(refusal{code: reason.Capacity, detail: detail})
	}
	reset(c.client)
}

// blame keeps what the record of the connection's end should give as its reason, where nobody cuts it.
func (c *conn) blame(code reason.Code, note string) {
	c.mu.Lock()
	if c.noteCode == reason.OK {
		c.noteCode, c.note = code, note
	}
	c.mu.Unlock()
}

func (c *conn) count(up, down int64) {
	c.up.Add(up)
	c.down.Add(down)
	c.p.cfg.Metrics.Bytes(up, down)
}

func (c *conn) countWay(w way, n int) {
	if w == upward {
		c.count(int64(n), 0)
	} else {
		c.count(0, int64(n))
	}
}

// How long a client may take to read a refusal and to hang up, and how much it may have sent by then: what the kernel
// holds of an upload on both sides is several MiB.
const (
	lingerTime  = 500 * time.Millisecond
	lingerBytes = 16 << 20
)

// hangUp closes the client's side so that it still reads what was written last: closing a socket that has
// unread bytes would send a RST that overtakes them.
func (c *conn) hangUp() {
	deadline := time.Now().Add(lingerTime)
	if c.client.CloseWrite() == nil && c.client.SetDeadline(deadline) == nil {
		drain(c.client, lingerBytes)
	}
	c.client.Close() // nothing is lost
}

func drain(r interface{ Read([]byte) (int, error) }, limit int) {
	buf := make([]byte, 32<<10)
	for limit > 0 {
		n, err := r.Read(buf)
		limit -= n
		if err != nil {
			return
		}
	}
}
