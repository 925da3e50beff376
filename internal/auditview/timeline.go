package auditview

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"tagout/internal/audit"
)

// Kinds of what a timeline can be about.
const (
	KindKid     = "kid"
	KindSession = "session"
	KindStop    = "stop"
)

// Story is everything that the logs say of a kid, a session or a stop, in the order in which it happened.
type Story struct {
	Who      string
	Kind     string   // KindKid, KindSession or KindStop
	Kids     []string // sorted
	Sessions []string // sorted
	Stops    []string // that had one of them in their scope; sorted
	Lines    []Line
	Stats    Stats
}

// Tell finds the story of who: a kid's name (all sessions that had it), a session's id or a stop's. It is nil where the
// logs do not know them. Records that name a kid and no session count to the session that the kid's name stood for at
// that moment; gaps in the logs count to every story in whose time they fall.
func Tell(ctx context.Context, f Finder, who string) (*Story, error) {
	t := &teller{f: f, seen: map[place]bool{}, stopped: map[string]bool{}, known: map[string]bool{}}
	s := &Story{Who: who}
	first, err := t.find(ctx, Query{Who: who})
	if err != nil || len(first) == 0 {
		return nil, err
	}
	s.Kind = kindOf(first, who)
	kids := map[string]bool{}
	for _, l := range first {
		if l.Kid != "" {
			kids[l.Kid] = true
		}
	}
	switch s.Kind {
	case KindKid:
		t.take(first)
	case KindSession, KindStop:
		if s.Kind == KindStop {
			t.take(first)
		}
		for kid := range kids {
			if err := t.sessions(ctx, s, kid); err != nil {
				return nil, err
			}
		}
	}
	if err := t.stops(ctx); err != nil {
		return nil, err
	}
	if err := t.gaps(ctx); err != nil {
		return nil, err
	}
	s.Lines, s.Stats = t.lines, t.stats
	Order(s.Lines)
	s.name()
	return s, nil
}

type place struct {
	log string
	off int64
}

// teller gathers the lines of a story, each once.
type teller struct {
	f       Finder
	seen    map[place]bool
	stopped map[string]bool // stops that are met
	known   map[string]bool // stops whose records are there
	lines   []Line
	stats   Stats
}

func (t *teller) find(ctx context.Context, q Query) ([]Line, error) {
	var out []Line
	stats, err := t.f.Find(ctx, q, func(l Line) error {
		out = append(out, l)
		return nil
	})
	if stats.Unreadable > t.stats.Unreadable || stats.Sealed > t.stats.Sealed { // each search meets the same
		t.stats = stats
	}
	return out, err
}

func (t *teller) take(lines []Line) {
	for _, l := range lines {
		at := place{l.Log, l.Off}
		if t.seen[at] {
			continue
		}
		t.seen[at] = true
		t.lines = append(t.lines, l)
		if stop := l.Fields[fieldStop]; stop != "" && !strings.HasPrefix(l.Event, "audit.") {
			t.stopped[stop] = true
		}
	}
}

func kindOf(lines []Line, who string) string {
	kind := KindKid
	for _, l := range lines {
		switch {
		case l.Session == who:
			return KindSession
		case l.Kid == who:
			return KindKid
		case l.Fields[fieldStop] == who:
			kind = KindStop
		}
	}
	return kind
}

// sessions takes, of the records that name a kid, those of the session that the story is about: the one with its id, or
// those that the stop met.
func (t *teller) sessions(ctx context.Context, s *Story, kid string) error {
	all, err := t.find(ctx, Query{Kid: kid})
	if err != nil {
		return err
	}
	Order(all)
	of := assign(all)
	wanted := map[string]bool{}
	for i, l := range all {
		if s.Kind == KindSession && of[i] == s.Who || s.Kind == KindStop && l.Fields[fieldStop] == s.Who {
			wanted[of[i]] = true
		}
	}
	for i, l := range all {
		if wanted[of[i]] {
			t.take([]Line{l})
		}
	}
	return nil
}

// assign says which session each of a kid's records, which are in order, belongs to. One that names none belongs to the
// last session before it that does, and before all of them to the first.
func assign(lines []Line) []string {
	of := make([]string, len(lines))
	now := ""
	for _, l := range lines {
		if l.Session != "" {
			now = l.Session
			break
		}
	}
	for i, l := range lines {
		if l.Session != "" {
			now = l.Session
		}
		of[i] = now
	}
	return of
}

// stops takes what is said of the stops themselves: who ordered them, how they ended, who released them.
func (t *teller) stops(ctx context.Context) error {
	for _, stop := range slices.Sorted(maps.Keys(t.stopped)) {
		if t.known[stop] {
			continue
		}
		t.known[stop] = true
		of, err := t.find(ctx, Query{Stop: stop})
		if err != nil {
			return err
		}
		for _, l := range of {
			if l.Kid == "" {
				t.take([]Line{l})
			}
		}
	}
	return nil
}

// gaps takes the records of what is missing from any log during the story. A gap that is about another kid is not.
func (t *teller) gaps(ctx context.Context) error {
	if len(t.lines) == 0 {
		return nil
	}
	from, to := span(t.lines)
	kids := map[string]bool{"": true}
	for _, l := range t.lines {
		kids[l.Kid] = true
	}
	found, err := t.find(ctx, Query{Events: []string{audit.EventGap}, Since: from, Until: to.Add(time.Nanosecond)})
	if err != nil {
		return err
	}
	for _, l := range found {
		if kids[l.Kid] {
			t.take([]Line{l})
		}
	}
	return nil
}

// span returns the earliest and the latest wall time of records that are in no order.
func span(lines []Line) (from, to time.Time) {
	for i := range lines {
		at := lines[i].Time
		if from.IsZero() || at.Before(from) {
			from = at
		}
		if at.After(to) {
			to = at
		}
	}
	return from, to
}

// Span returns the earliest and the latest wall time of the story.
func (s *Story) Span() (from, to time.Time) { return span(s.Lines) }

func (s *Story) name() {
	kids, sessions, stops := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, l := range s.Lines {
		if l.Event == audit.EventGap {
			continue
		}
		kids[l.Kid], sessions[l.Session] = true, true
		stops[l.Fields[fieldStop]] = true
	}
	for _, set := range []map[string]bool{kids, sessions, stops} {
		delete(set, "")
	}
	s.Kids, s.Sessions, s.Stops = slices.Sorted(maps.Keys(kids)), slices.Sorted(maps.Keys(sessions)), slices.Sorted(maps.Keys(stops))
}

// Belongs says whether a new record belongs to the story.
func (s *Story) Belongs(r *audit.Record) bool {
	switch {
	case r.Fields[fieldStop] != "" && r.Kid == "":
		return slices.Contains(s.Stops, r.Fields[fieldStop])
	case s.Kind != KindKid && r.Session != "":
		return slices.Contains(s.Sessions, r.Session)
	}
	return r.Kid != "" && slices.Contains(s.Kids, r.Kid)
}

// Meet notes a new record that belongs to the story. It returns the stop that is part of the story from now on, where the
// record names one that was not.
func (s *Story) Meet(r *audit.Record) (stop string) {
	if id := r.Fields[fieldStop]; id != "" && !slices.Contains(s.Stops, id) {
		s.Stops, stop = append(s.Stops, id), id
	}
	if s.Kind == KindKid && r.Session != "" && !slices.Contains(s.Sessions, r.Session) {
		s.Sessions = append(s.Sessions, r.Session)
	}
	return stop
}

// Filter keeps the records that want accepts.
func (s *Story) Filter(want func(*Line) bool) {
	s.Lines = slices.DeleteFunc(s.Lines, func(l Line) bool { return !want(&l) })
}
