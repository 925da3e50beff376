package dnsfilter

import (
	"fmt"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/policy"
)

// at returns the session without the rules that have run out by now (CLOCK_BOOTTIME). It is a new kid: whatever
// answers were kept ready for the old one are not found any more.
func (k *kid) at(now time.Duration) (*kid, error) {
	next := *k
	next.spec = k.spec.At(int64(now))
	next.until = time.Duration(next.spec.NextExpiry())
	var err error
	if next.policy, err = policy.Compile(next.spec); err != nil {
		return nil, fmt.Errorf("loading session %s as it stands now: %w", k.doc.ID, err)
	}
	next.ready = next.exactNames()
	return &next, nil
}

// fresh returns the session as it stands now. Nobody has to ring: the first query after a deadline finds it
// passed. Without a deadline no clock is read.
func (s *sessions) fresh(k *kid) *kid {
	if k == nil || k.until == 0 || bootclock.Now() < k.until {
		return k
	}
	return s.lapse(k)
}

// lapse puts the session k, whose deadline has passed, in force as it stands now, and returns what is in force;
// nil where the session was removed meanwhile.
func (s *sessions) lapse(k *kid) *kid {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := bootclock.Now()
	loaded := s.byKid(k.doc.Kid)
	switch {
	case loaded == nil || loaded.doc.ID != k.doc.ID:
		return nil // whoever asked, its session is gone
	case loaded.until == 0 || now < loaded.until:
		return loaded // somebody was faster
	}
	next, err := loaded.at(now)
	if err != nil { // cannot happen: fewer rules never collide; denying is what is left (invariant 1)
		denied := *loaded
		denied.policy, denied.ready, denied.until = nil, nil, 0
		next = &denied
	}
	s.replace(loaded, next)
	return next
}
