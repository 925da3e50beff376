package practice

import (
	"sync"
	"time"
)

// Tally is what one presenter did with a credential at one service. Times are CLOCK_MONOTONIC, 0 where there
// was none.
type Tally struct {
	Accepted     int           `json:"accepted"`
	Refused      int           `json:"refused"`
	LastAccepted time.Duration `json:"last_accepted_ns"`
	LastRefused  time.Duration `json:"last_refused_ns"`
}

// Ledger counts accepted and refused uses by presenter. Safe for concurrent use; the zero value is ready.
type Ledger struct {
	mu      sync.Mutex
	tallies map[string]Tally // guarded by mu
}

// note is called after the decision and before the answer, so that an accepted use is never dated too early.
func (l *Ledger) note(presenter string, accepted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.tallies == nil {
		l.tallies = map[string]Tally{}
	}
	t := l.tallies[presenter]
	if accepted {
		t.Accepted++
		t.LastAccepted = Now()
	} else {
		t.Refused++
		t.LastRefused = Now()
	}
	l.tallies[presenter] = t
}

// Tally returns one presenter's tally.
func (l *Ledger) Tally(presenter string) Tally {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tallies[presenter]
}

// Total sums all presenters up; the times are the latest.
func (l *Ledger) Total() Tally {
	l.mu.Lock()
	defer l.mu.Unlock()
	var sum Tally
	for _, t := range l.tallies {
		sum.Accepted += t.Accepted
		sum.Refused += t.Refused
		sum.LastAccepted = max(sum.LastAccepted, t.LastAccepted)
		sum.LastRefused = max(sum.LastRefused, t.LastRefused)
	}
	return sum
}
