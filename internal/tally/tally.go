// Package tally keeps a flood of like events from filling a disk without losing count of them. Within a
// window a group (usually a session) may write a fixed number of records; events that repeat one of them,
// and events beyond that number, are folded into records that carry an exact Count. Whatever was added is
// in a record after the next Flush: Count 0 stands for one event, any other number for that many.
package tally

import (
	"context"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// Window is the length of a window for callers that have no reason to choose another.
const Window = time.Second

// parts is how often in a window Run writes what went beyond a group's records: an alert comes of it, and nobody
// was told of these events yet.
const parts = 4

// Recorder is where the records go. Log must not block.
type Recorder interface{ Log(audit.Record) }

// Tally folds events. Safe for concurrent use.
type Tally struct {
	rec   Recorder
	lines int

	mu     sync.Mutex
	groups map[string]*group // of the current window; guarded by mu
}

// group is what one group did in the current window.
type group struct {
	logged int                // records written at once
	keys   map[string]*folded // repeats of a record that was written at once
	rest   map[string]*folded // events for which no record was left, by outcome and reason
}

type folded struct {
	record audit.Record
	count  uint64
}

// New returns a tally that writes at most lines records at once per group and window; at a window's end at
// most as many again follow, and a few times in a window one for each outcome and reason that went beyond.
func New(rec Recorder, lines int) *Tally {
	return &Tally{rec: rec, lines: lines, groups: map[string]*group{}}
}

// Again counts one more event of a key that was recorded in this window already, and says whether it was. It
// costs less than Add, which has to follow where it was not.
func (t *Tally) Again(groupName, key string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.groups[groupName]
	if g == nil || key == "" {
		return false
	}
	f := g.keys[key]
	if f == nil {
		return false
	}
	f.count++
	return true
}

// More counts one more event of a kind that has gone beyond the group's records already, and says whether it has. Like
// Again it costs less than Add. The kind is that of records without a reason.
func (t *Tally) More(groupName, event, outcome string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.groups[groupName]
	if g == nil {
		return false
	}
	f := g.rest[event+" "+outcome+" "+reason.OK.String()]
	if f == nil {
		return false
	}
	f.count++
	return true
}

// Add counts one event. The first event of a key is recorded at once and repeats of it are counted; an empty
// key never repeats. record is called where its result is needed and with the tally locked: it must not call
// the tally.
func (t *Tally) Add(groupName, key string, record func() audit.Record) {
	t.add(groupName, key, 0, record)
}

// AddEach is Add for events that are worth a record each: repeats are recorded at once, too, until half of the
// group's records are used. The other half is kept for other keys, which a flood of one does not crowd out.
func (t *Tally) AddEach(groupName, key string, record func() audit.Record) {
	t.add(groupName, key, t.lines/2, record)
}

// add folds repeats once the group has written each records.
func (t *Tally) add(groupName, key string, each int, record func() audit.Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.groups[groupName]
	if g == nil {
		g = &group{keys: map[string]*folded{}, rest: map[string]*folded{}}
		t.groups[groupName] = g
	}
	again := g.keys[key]
	if again != nil && g.logged >= each {
		again.count++
		return
	}
	r := record()
	if g.logged < t.lines {
		g.logged++
		if key != "" && again == nil {
			g.keys[key] = &folded{record: r}
		}
		t.rec.Log(r)
		return
	}
	kind := r.Event + " " + r.Outcome + " " + r.Reason.String()
	f := g.rest[kind]
	if f == nil {
		f = &folded{record: beyond(r)}
		g.rest[kind] = f
	}
	f.count++
}

// beyond turns the first event that went beyond a group's records into the record that sums them up.
func beyond(r audit.Record) audit.Record {
	example := ""
	if r.Dst != nil {
		example = r.Dst.Name
		dst := *r.Dst
		dst.Name = ""
		r.Dst = &dst
	}
	r.Detail = "more of the same kind than are recorded one by one"
	if example != "" {
		r.Detail += ", the first of them for " + example
	}
	return r
}

// FlushGroup ends the window of one group.
func (t *Tally) FlushGroup(name string) {
	t.mu.Lock()
	g := t.groups[name]
	delete(t.groups, name)
	t.mu.Unlock()
	if g != nil {
		t.write(map[string]*group{name: g})
	}
}

// Flush ends the window: every count is written and forgotten.
func (t *Tally) Flush() {
	t.mu.Lock()
	groups := t.groups
	t.groups = make(map[string]*group, len(groups))
	t.mu.Unlock()
	t.write(groups)
}

// write writes the counts of groups that nobody else has.
func (t *Tally) write(groups map[string]*group) {
	for _, g := range groups {
		for _, set := range []map[string]*folded{g.keys, g.rest} {
			for _, f := range set {
				if f.count > 0 {
					f.record.Count = f.count
					t.rec.Log(f.record)
				}
			}
		}
	}
}

// flushRest writes the counts of events that no record was left for, in the middle of a window.
func (t *Tally) flushRest() {
	var rest []audit.Record
	t.mu.Lock()
	for _, g := range t.groups {
		for kind, f := range g.rest {
			f.record.Count = f.count
			rest = append(rest, f.record)
			delete(g.rest, kind)
		}
	}
	t.mu.Unlock()
	for _, r := range rest {
		t.rec.Log(r)
	}
}

// Run flushes at the end of each window until ctx ends, and then once more. What went beyond a group's records
// does not wait that long.
func (t *Tally) Run(ctx context.Context, window time.Duration) {
	tick := time.NewTicker(window / parts)
	defer tick.Stop()
	defer t.Flush()
	for part := 1; ; part++ {
		select {
		case <-tick.C:
			if part%parts == 0 {
				t.Flush()
			} else {
				t.flushRest()
			}
		case <-ctx.Done():
			return
		}
	}
}
