package events

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"tagout/internal/reason"
)

const (
	floodLines = 50 // destinations of a session that a settlement names; the others are summed up by reason
	freshLines = 64 // destinations of a session that a glance names: those that nobody was told of yet
	floodTurns = 3  // settlements that a flood may wait for its number to appear in the counters
	namedTurns = 10 // settlements for which a destination counts as named
	namedMost  = 1 << 16
)

// ledger compares what was recorded with what the kernel counted. Safe for concurrent use.
type ledger struct {
	mu      sync.Mutex
	entries Attempts        // what records stand for, by mark
	owned   map[uint32]bool // marks that the kernel has counters for; it counts all others under 0
	closed  map[uint32]bool // sessions whose last settlement has told everything there will ever be
	floods  []waiting       // taken from the kernel and not yet recorded, one for each destination
	turn    int             // settlements so far
	named   map[target]int  // destinations of floods that records named, and in which turn
}

type waiting struct {
	Flood
	turns int
}

// target is what an alert is about.
type target struct {
	mark uint32
	code reason.Code
	dst  netip.AddrPort
}

func (f *Flood) target() target { return target{f.Mark, f.Reason, f.Dst} }

func newLedger() *ledger {
	return &ledger{entries: Attempts{}, owned: map[uint32]bool{}, closed: map[uint32]bool{}, named: map[target]int{}}
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
	l.turn++
	l.forgetNamed()
	var out []Flood
	for mark, codes := range counted {
		out = append(out, l.settleMark(mark, codes)...)
	}
	return out
}

// glance returns what is to be recorded of floods before the next settlement: destinations that nobody was told of
// yet, which alerts wait for. All else stays for the settlement. What it must be given is what settle must.
func (l *ledger) glance(counted Attempts, floods []Flood) []Flood {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.own(counted)
	l.take(floods)
	slices.SortFunc(l.floods, func(a, b waiting) int { return cmp.Compare(a.Count, b.Count) }) // the rare ones first
	var out []Flood
	lines := map[uint32]int{}
	for i := range l.floods {
		w := &l.floods[i]
		under := w.Mark // what the kernel counted it under
		if !l.owned[under] {
			under = 0
		}
		counted, told := counted[under][w.Reason], l.entries[under][w.Reason]
		n := min(w.Count, counted-min(counted, told))
		if n == 0 || lines[under] >= freshLines || l.wasNamed(w.target()) {
			continue
		}
		lines[under]++
		l.name(w.target())
		l.add(under, w.Reason, n)
		w.Count -= n
		f := w.Flood
		f.Count = n
		out = append(out, f)
	}
	l.floods = slices.DeleteFunc(l.floods, func(w waiting) bool { return w.Count == 0 })
	return out
}

func (l *ledger) wasNamed(t target) bool { _, ok := l.named[t]; return ok }

// name is called with mu held. Forgetting costs a record that comes earlier than it had to.
func (l *ledger) name(t target) {
	if len(l.named) >= namedMost {
		clear(l.named)
	}
	l.named[t] = l.turn
}

// forgetNamed is called with mu held.
func (l *ledger) forgetNamed() {
	maps.DeleteFunc(l.named, func(_ target, turn int) bool { return l.turn-turn > namedTurns })
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
	if len(floods) == 0 {
		return
	}
	type same struct {
		target
		hook string
	}
	at := make(map[same]int, len(l.floods))
	for i, w := range l.floods {
		at[same{w.target(), w.Hook}] = i
	}
	for _, f := range floods {
		if i, ok := at[same{f.target(), f.Hook}]; ok {
			l.floods[i].Count += f.Count
			l.floods[i].turns = 0
			continue
		}
		l.floods = append(l.floods, waiting{Flood: f})
	}
}

// settleMark is called with mu held. Floods can be ahead of the counters that were read before them: what the
// counters do not have yet waits for the next turn.
func (l *ledger) settleMark(mark uint32, codes map[reason.Code]uint64) []Flood {
	mine, others := l.split(mark)
	slices.SortStableFunc(mine, l.before)
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
			l.name(f.target())
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

// before puts destinations that nobody was told of first, then those that were tried most. It is called with mu held.
func (l *ledger) before(a, b waiting) int {
	if old := l.wasNamed(a.target()); old != l.wasNamed(b.target()) {
		if old {
			return 1
		}
		return -1
	}
	return cmp.Compare(b.Count, a.Count)
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
