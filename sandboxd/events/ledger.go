package events

import (
	"cmp"
	"slices"
	"sync"

	"tagout/internal/reason"
)

const (
	floodLines = 50 // destinations of a session that a settlement names; the others are summed up by reason
	floodTurns = 3  // settlements that a flood may wait for its number to appear in the counters
)

// ledger compares what was recorded with what the kernel counted. Safe for concurrent use.
type ledger struct {
	mu      sync.Mutex
	entries Attempts        // what records stand for, by mark
	owned   map[uint32]bool // marks that the kernel has counters for; it counts all others under 0
	closed  map[uint32]bool // sessions whose last settlement has told everything there will ever be
	floods  []waiting       // taken from the kernel and not yet recorded
}

type waiting struct {
	Flood
	turns int
}

func newLedger() *ledger {
	return &ledger{entries: Attempts{}, owned: map[uint32]bool{}, closed: map[uint32]bool{}}
}

// told notes that a record will stand for one more denial. It returns false where one already does.
func (l *ledger) told(mark uint32, code reason.Code) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed[mark] {
		return false
	}
	l.add(mark, code, 1)
	return true
}

// add is called with mu held.
func (l *ledger) add(mark uint32, code reason.Code, n uint64) {
	if l.entries[mark] == nil {
		l.entries[mark] = map[reason.Code]uint64{}
	}
	l.entries[mark][code] += n
}

// load sets what a predecessor told. More than the kernel counted is not believed: then the counters are new.
func (l *ledger) load(told, counted Attempts) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for mark, codes := range told {
		if counted[mark] == nil {
			mark = 0
		}
		for code, n := range codes {
			l.add(mark, code, n)
		}
	}
	for mark, codes := range l.entries {
		for code := range codes {
			codes[code] = min(codes[code], counted[mark][code])
		}
	}
	l.own(counted)
}

// own notes which marks have counters, and forgets those that no longer have any. What was told under a mark
// that never had any was counted under mark 0. It is called with mu held.
func (l *ledger) own(counted Attempts) {
	for mark, codes := range l.entries {
		if counted[mark] != nil || mark == 0 {
			continue
		}
		delete(l.entries, mark)
		if !l.owned[mark] {
			for code, n := range codes {
				l.add(0, code, n)
			}
		}
	}
	clear(l.owned)
	for mark := range counted {
		l.owned[mark] = true
	}
}

// settle returns what is to be recorded so that the records stand for all that counted has, and notes it as
// told. Every denial in counted must have been told, or be among floods, or be lost.
func (l *ledger) settle(counted Attempts, floods []Flood) []Flood {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.own(counted)
	l.take(floods)
	var out []Flood
	for mark, codes := range counted {
		out = append(out, l.settleMark(mark, codes)...)
	}
	return out
}

// close is settle for one session that is about to go, where events of it may still be unread: they are told
// by number now, and not again when they are read.
func (l *ledger) close(mark uint32, codes map[reason.Code]uint64, floods []Flood) []Flood {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.take(floods)
	l.closed[mark] = true
	return l.settleMark(mark, codes)
}

// take is called with mu held.
func (l *ledger) take(floods []Flood) {
	for _, f := range floods {
		l.floods = append(l.floods, waiting{Flood: f})
	}
}

// settleMark is called with mu held. Floods can be ahead of the counters that were read before them: what the
// counters do not have yet waits for the next turn.
func (l *ledger) settleMark(mark uint32, codes map[reason.Code]uint64) []Flood {
	mine, others := l.split(mark)
	slices.SortStableFunc(mine, func(a, b waiting) int { return cmp.Compare(b.Count, a.Count) })
	missing := map[reason.Code]uint64{}
	for code, n := range codes {
		missing[code] = n - min(n, l.entries[mark][code])
	}
	var out []Flood
	for _, w := range mine {
		n := min(w.Count, missing[w.Reason])
		switch {
		case n > 0 && len(out) < floodLines:
			f := w.Flood
			f.Count = n
			out = append(out, f)
			missing[w.Reason] -= n
			w.Count -= n
		case n > 0: // only its number is told, below
			w.Count = 0
		}
		if w.turns++; w.Count > 0 && w.turns < floodTurns {
			others = append(others, w)
		}
	}
	l.floods = others
	for code, n := range missing {
		if n > 0 {
			out = append(out, Flood{Denial: Denial{Mark: mark, Reason: code}, Count: n})
		}
	}
	for _, f := range out {
		l.add(mark, f.Reason, f.Count)
	}
	return out
}

// split takes out the waiting floods that the kernel counted under mark.
func (l *ledger) split(mark uint32) (mine, others []waiting) {
	for _, w := range l.floods {
		if w.Mark == mark || mark == 0 && !l.owned[w.Mark] {
			mine = append(mine, w)
		} else {
			others = append(others, w)
		}
	}
	return mine, others
}
