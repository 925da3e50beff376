package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/vaddr"
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
	doc *session.Session

	mu    sync.Mutex
	rules *rules             // guarded by mu; nil where the policy is unusable: everything is denied
	conns map[*conn]struct{} // guarded by mu
	gone  bool               // guarded by mu: no connection may join any more
}

// rules is one generation of a session's policy. Immutable but for what is learned.
type rules struct {
	generation uint64
	policy     *policy.Policy
	exact      *vaddr.Table
	learned    sync.Map // netip.Addr -> string: what dnsfilter told; at most as many as there are addresses
}

func newTable() *table {
	return &table{byKid: map[string]*entry{}, byAddr: map[netip.Addr]*entry{}}
}

func (t *table) find(addr netip.Addr) *entry {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byAddr[addr]
}

func compile(s *session.Session, virtual netip.Prefix) (*rules, error) {
	pol, err := policy.Compile(s.Egress)
	if err != nil {
		return nil, fmt.Errorf("compiling the policy of session %s: %w", s.ID, err)
	}
	s.AddNames(pol.ExactHosts())
	exact, err := vaddr.New(virtual, s.Names)
	if err != nil {
		return nil, fmt.Errorf("giving addresses to the names of session %s: %w", s.ID, err)
	}
	return &rules{generation: s.Generation, policy: pol, exact: exact}, nil
}

// put makes s's policy the one in force. It returns the entries whose session this one replaces; the caller
// cuts them. A policy that does not compile is refused and leaves nothing in force for the kid (invariant 1).
func (t *table) put(s *session.Session, virtual netip.Prefix) (now *entry, replaced []*entry, err error) {
	next, err := compile(s, virtual)
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.byKid[s.Kid]
	if old != nil && old.doc.ID == s.ID && old.doc.Mark == s.Mark && old.doc.Addr == s.Addr {
		old.mu.Lock()
		defer old.mu.Unlock()
		if old.rules != nil && s.Generation < old.rules.generation {
			return nil, nil, fmt.Errorf("session %s: generation %d: %w", s.ID, s.Generation, ErrStale)
		}
		old.rules = next
		return old, nil, err
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
	now = &entry{doc: s, rules: next, conns: map[*conn]struct{}{}}
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
func (e *entry) join(c *conn, limit int) reason.Code {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.gone:
		return reason.Stopped
	case len(e.conns) >= limit:
		return reason.Capacity
	}
	e.conns[c] = struct{}{}
	return reason.OK
}

func (e *entry) leave(c *conn) {
	e.mu.Lock()
	delete(e.conns, c)
	e.mu.Unlock()
}

// current returns the policy in force, nil where there is none.
func (e *entry) current() *rules {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.rules
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
	e.rules = nil
	e.mu.Unlock()
	live := e.live()
	for _, c := range live {
		c.cut(code, detail)
	}
	return len(live)
}

// judgeAgain cuts the connections that the policy in force does not allow any more.
func (e *entry) judgeAgain() {
	r := e.current()
	for _, c := range e.live() {
		if code, detail := c.stillAllowed(r); code != reason.OK {
			c.cut(code, detail)
		}
	}
}
