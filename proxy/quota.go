package proxy

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// usage is what a session has moved so far, by the rule that allowed it and the port, so that a newer policy
// does not start its limits at zero.
type usage struct {
	mu    sync.Mutex // held while a limit is looked at and taken from
	spots map[spot]*spent
}

type spot struct {
	rule string // ruleKey
	port uint16
}

type spent struct{ up, down atomic.Int64 }

// quota is what one rule grants: the limits, and where its bytes are counted. Immutable.
type quota struct {
	maxUp, maxDown int64 // 0: no limit
	spots          []*spent
	own            *spent // of the port in question; one of spots
}

// meter counts one upstream socket's bytes towards its rule.
type meter struct {
	usage *usage
	quota atomic.Pointer[quota]
}

// spot returns the counter of one place. u.mu is held.
func (u *usage) spot(rule string, port uint16) *spent {
	if u.spots == nil {
		u.spots = map[spot]*spent{}
	}
	s := u.spots[spot{rule, port}]
	if s == nil {
		s = &spent{}
		u.spots[spot{rule, port}] = s
	}
	return s
}

func (u *usage) quota(rule *policy.Rule, port uint16) *quota {
	u.mu.Lock()
	defer u.mu.Unlock()
	key := ruleKey(rule)
	q := &quota{maxUp: rule.MaxUp, maxDown: rule.MaxDown, own: u.spot(key, port)}
	for _, p := range rule.Ports {
		q.spots = append(q.spots, u.spot(key, p))
	}
	return q
}

func (u *usage) meter(rule *policy.Rule, port uint16) *meter {
	m := &meter{usage: u}
	m.quota.Store(u.quota(rule, port))
	return m
}

// usedUp says whether nothing is left of one of the rule's limits.
func (u *usage) usedUp(rule *policy.Rule) (detail string, yes bool) {
	if rule.MaxUp == 0 && rule.MaxDown == 0 {
		return "", false
	}
	up, down := u.quota(rule, rule.Ports[0]).sum()
	switch {
	case rule.MaxUp != 0 && up >= rule.MaxUp:
		return fmt.Sprintf("%d of %d bytes up are used", up, rule.MaxUp), true
	case rule.MaxDown != 0 && down >= rule.MaxDown:
		return fmt.Sprintf("%d of %d bytes down are used", down, rule.MaxDown), true
	}
	return "", false
}

func (q *quota) sum() (up, down int64) {
	for _, s := range q.spots {
		up += s.up.Load()
		down += s.down.Load()
	}
	return up, down
}

// way is a direction of a connection.
type way bool

// Ways.
const (
	upward   way = true // from the kid
	downward way = false
)

func (w way) String() string {
	if w == upward {
		return "up"
	}
	return "down"
}

func (s *spent) of(w way) *atomic.Int64 {
	if w == upward {
		return &s.up
	}
	return &s.down
}

// limited says whether the rule limits that direction.
func (m *meter) limited(w way) bool {
	q := m.quota.Load()
	return w == upward && q.maxUp != 0 || w == downward && q.maxDown != 0
}

// take counts up to n bytes that are about to be passed on and returns how many may be: fewer than n where the
// limit is reached.
func (m *meter) take(w way, n int) int {
	q := m.quota.Load()
	limit := q.maxDown
	if w == upward {
		limit = q.maxUp
	}
	if limit == 0 {
		q.own.of(w).Add(int64(n))
		return n
	}
	m.usage.mu.Lock()
	defer m.usage.mu.Unlock()
	up, down := q.sum()
	left := limit - down
	if w == upward {
		left = limit - up
	}
	n = int(min(int64(n), max(left, 0)))
	q.own.of(w).Add(int64(n))
	return n
}

// passed counts bytes whatever the limit is.
func (m *meter) passed(w way, n int) { m.quota.Load().own.of(w).Add(int64(n)) }

// giveBack uncounts bytes that were taken and did not pass.
func (m *meter) giveBack(w way, n int) {
	if n > 0 {
		m.quota.Load().own.of(w).Add(-int64(n))
	}
}

// bucket lets so many events pass in a second. The zero value is full.
type bucket struct {
	level float64 // events that may pass now
	last  time.Time
}

// take lets one event pass, or not: perSecond on average, burst at once.
func (b *bucket) take(now time.Time, perSecond, burst int) bool {
	if b.last.IsZero() {
		b.level = float64(burst)
	} else {
		b.level = min(b.level+now.Sub(b.last).Seconds()*float64(perSecond), float64(burst))
	}
	b.last = now
	if b.level < 1 {
		return false
	}
	b.level--
	return true
}

// Kinds of events that a rule's rate limits, each by itself.
const (
	rateConns    = "connections"
	rateRequests = "requests"
)

// inRate says whether the rule's rate lets one more event of the kind pass.
func (e *entry) inRate(rule *policy.Rule, kind string) bool {
	if rule.Rate == 0 {
		return true
	}
	key := kind + " " + ruleKey(rule)
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.rates[key]
	if b == nil {
		if e.rates == nil {
			e.rates = map[string]*bucket{}
		}
		b = &bucket{}
		e.rates[key] = b
	}
	return b.take(time.Now(), rule.Rate, rule.Rate)
}

// limits holds a connection or request that the policy allows against the rule's limits.
func (e *entry) limits(rule *policy.Rule, kind string) *refusal {
	if detail, yes := e.usage.usedUp(rule); yes {
		return &refusal{reason.ByteLimit, detail, rule}
	}
	if !e.inRate(rule, kind) {
		return &refusal{reason.RateLimit, fmt.Sprintf("the rule lets %d %s a second pass", rule.Rate, kind), rule}
	}
	return nil
}

// hold books n bytes of memory on the session; false where its share is used up.
func (c *conn) hold(n int) bool {
	e := c.sess
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.buffered+int64(n) > c.p.cfg.Limits.BufferPerSession {
		return false
	}
	e.buffered += int64(n)
	c.held += int64(n)
	return true
}

// hold books n bytes until the exchange is over; false where the session's share is used up.
func (x *exchange) hold(n int) bool {
	if !x.c.hold(n) {
		return false
	}
	x.held += n
	return true
}

// crowded refuses a request for which the session's share does not suffice.
func (x *exchange) crowded() *refusal {
	return &refusal{reason.Capacity, "the kid's connections keep too much waiting", x.rule}
}

// giveBack gives back n bytes of what hold booked for the connection.
func (c *conn) giveBack(n int) {
	if n == 0 {
		return
	}
	c.sess.mu.Lock()
	c.sess.buffered -= int64(n)
	c.held -= int64(n)
	c.sess.mu.Unlock()
}

// letGo gives back all that hold booked for the connection.
func (c *conn) letGo() {
	if c.sess == nil || c.held == 0 {
		return
	}
	c.sess.mu.Lock()
	c.sess.buffered -= c.held
	c.sess.mu.Unlock()
	c.held = 0
}
