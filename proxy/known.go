package proxy

import (
	"net/netip"
	"sync"
	"time"
)

// Bounds of what a session remembers of the resolvers' answers.
const (
	knownNames = 256
	knownLife  = 10 * time.Second // however long the answer holds: a service that moves is followed
)

// known remembers the addresses of a session's names for as long as their records live, and not for long. They
// are judged again at every use. The zero value is ready.
type known struct {
	mu   sync.Mutex
	said map[string]remembered // guarded by mu
}

type remembered struct {
	addrs []netip.Addr
	until time.Time
}

// get returns the addresses of name, nil where they are not known. Nobody changes them.
func (k *known) get(name string, now time.Time) []netip.Addr {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r, ok := k.said[name]; ok && now.Before(r.until) {
		return r.addrs
	}
	return nil
}

// put remembers an answer; one with a TTL of 0 is for one use.
func (k *known) put(name string, a answer, now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if a.ttl <= 0 {
		return
	}
	if k.said == nil || len(k.said) >= knownNames {
		k.said = map[string]remembered{} // rarely: starting anew is cheaper than keeping order
	}
	k.said[name] = remembered{a.addrs, now.Add(min(a.ttl, knownLife))}
}

// drop forgets name: none of its addresses answers.
func (k *known) drop(name string) {
	k.mu.Lock()
	delete(k.said, name)
	k.mu.Unlock()
}
