package proxy

import (
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/reason"
	"tagout/internal/session"
)

// ErrStale is returned for a policy that is older than the one in force.
var ErrStale = errors.New("an older policy than the one in force")

// table finds sessions. Whoever is not in it is denied.
type table struct {
	mu     sync.RWMutex
	byKid  map[string]*entry
	byAddr map[netip.Addr]*entry
}

// entry is one session. The document's identity fields never change; its policy does.
type entry struct {
	doc   *session.Session
	usage usage // bytes of every rule, whatever the generation
	known known // addresses of names

	rules atomic.Pointer[rules] // nil where no policy is in force: everything is denied

	mu       sync.Mutex
	conns    map[*conn]struct{} // guarded by mu
	gone     bool               // guarded by mu: no connection may join any more
	alarm    *time.Timer        // guarded by mu: for the next deadline of a rule; nil without one
	fresh    bucket             // guarded by mu: connections
	rates    map[string]*bucket // guarded by mu: of the rules that have a rate
	buffered int64              // guarded by mu: bytes that the proxy keeps for the session's connections
}

func newTable() *table {
	return &table{byKid: map[string]*entry{}, byAddr: map[netip.Addr]*entry{}}
}

func (t *table) find(addr netip.Addr) *entry {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byAddr[addr]
}

// put makes s's policy the one in force. It returns the entries whose session this one replaces; the caller
// cuts them. A policy that does not compile changes nothing for a session that is known and leaves a new one
// unknown, which denies everything (invariant 1).
func (t *table) put(s *session.Session, virtual netip.Prefix) (now *entry, replaced []*entry, err error) {
	next, err := compile(s, virtual, bootclock.Now())
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.byKid[s.Kid]
	if old != nil && old.doc.ID == s.ID && old.doc.Mark == s.Mark && old.doc.Addr == s.Addr {
		if err != nil {
			return nil, nil, err
		}
		return old, nil, old.take(next)
	}
	for _, e := range []*entry{old, t.byAddr[s.Addr]} {
		if e != nil {
			t.drop(e)
			replaced = append(replaced, e)
		}
	}
	if err != nil {
		return nil, replaced, err
	}
	now = &entry{doc: s, conns: map[*conn]struct{}{}}
	now.rules.Store(next)
	t.byKid[s.Kid], t.byAddr[s.Addr] = now, now
	return now, replaced, nil
}

// remove forgets the kid's session and returns its entry, nil where there is none.
func (t *table) remove(kid string) *entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byKid[kid]
	if e != nil {
		t.drop(e)
	}
	return e
}

// drop takes e out of both maps. t.mu is held.
func (t *table) drop(e *entry) {
	if t.byKid[e.doc.Kid] == e {
		delete(t.byKid, e.doc.Kid)
	}
	if t.byAddr[e.doc.Addr] == e {
		delete(t.byAddr, e.doc.Addr)
	}
}

func (t *table) kid(name string) *entry {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byKid[name]
}

func (t *table) all() []*entry {
	t.mu.RLock()
	defer t.mu.RUnlock()
	out := make([]*entry, 0, len(t.byKid))
	for _, e := range t.byKid {
		out = append(out, e)
	}
	return out
}

// join makes c one of the session's connections; any other code than OK says why it may not be.
func (e *entry) join(c *conn, l *Limits) reason.Code {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.gone:
		return reason.Stopped
	case len(e.conns) >= l.ConnsPerSession:
		return reason.Capacity
	case !e.fresh.take(time.Now(), l.NewConnsPerSecond, 2*l.NewConnsPerSecond):
		return reason.RateLimit
	}
	e.conns[c] = struct{}{}
	return reason.OK
}

func (e *entry) leave(c *conn) {
	e.mu.Lock()
	delete(e.conns, c)
	e.mu.Unlock()
}

func (e *entry) live() []*conn {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make([]*conn, 0, len(e.conns))
	for c := range e.conns {
		out = append(out, c)
	}
	return out
}

// close lets no connection join any more and cuts those that have. When it returns, every socket of the
// session is closed.
func (e *entry) close(code reason.Code, detail string) int {
	e.mu.Lock()
	e.gone = true
	e.rules.Store(nil)
	if e.alarm != nil {
		e.alarm.Stop()
	}
	e.mu.Unlock()
	live := e.live()
	for _, c := range live {
		c.cut(code, detail)
	}
	return len(live)
}

// judgeAgain cuts what the policy in force does not allow any more and returns how much that was: connections,
// and requests of HTTP/2 connections that live on.
func (e *entry) judgeAgain() (cut int) {
	r := e.current()
	for _, c := range e.live() {
		cut += c.judgeAgain(r)
	}
	return cut
}
