// Package filelog records what is done to the files in the places where kids may write: created, changed (closed after
// it was open for writing), renamed, deleted, each with its name (fanotify(7) on the places' own file systems). It only
// looks: nothing a kid does waits for it.
//
// It promises a record for each, or for a flood records that count them exactly; where the kernel's queue ran over, or
// nobody looked, a gap record says so. Names are those of the moment, also of directories that are gone by the time they
// are read. Operations of one process on one name that nobody has read yet come as one each, in the order created,
// changed, deleted.
//
// What it cannot see: a file that is cut short by name, without being opened (truncate(2)); changes of modes and owners;
// what is written through a mapping before it is closed; what is written to files of an image's lower layers where the
// kid has a writable root (their copy in the layer is seen as created). The manifest at a session's end has what is left.
package filelog

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"

	"tagout/internal/audit"
	"tagout/internal/session"
	"tagout/internal/tally"
)

// Recorder is the audit log. Log must not block.
type Recorder interface{ Log(audit.Record) }

// Metrics is what the watch reports to.
type Metrics interface {
	// Recorded adds n events of a kind, of which folded have no record of their own.
	Recorded(kind string, n, folded uint64)
}

// Config of a Watch. Every field is needed.
type Config struct {
	Audit   Recorder
	Metrics Metrics
	Log     *slog.Logger
}

// Place is one file system in which a kid may write.
type Place struct {
	Dir   string // absolute, on the host; a directory
	Parts []Part // nil: all of it, below As
	As    string // what the kid calls it
}

// Part is a directory of a Place. What is in none of its parts is not recorded.
type Part struct {
	In string // relative to the place, "upper" say
	As string // what the kid calls it, "/usr" say
}

const (
	// lines is how many records of files a kid may cause in a second before they are counted.
	lines = 100
	// groups is how many queues there are: the machine has not many for all that run on it
	// (fs.fanotify.max_user_groups). Kids beyond that share one, and the gap when it runs over.
	groups = 8
	kind   = "file"
)

// Watch watches kids. Make it with New and run it; safe for concurrent use.
type Watch struct {
	cfg   Config
	tally *tally.Tally

	mu     sync.Mutex
	groups []*group          // guarded by mu; made when needed
	kids   map[string]*watch // by session; guarded by mu
}

// watch is one kid that is watched.
type watch struct {
	session string
	rec     audit.Record // whom records are about
	group   *group
	places  []*place
}

// New returns a Watch of nobody.
func New(cfg Config) *Watch {
	w := &Watch{cfg: cfg, kids: map[string]*watch{}}
	w.tally = tally.New(counted{cfg}, lines)
	return w
}

// counted counts what is recorded.
type counted struct{ cfg Config }

func (c counted) Log(r audit.Record) {
	if r.Event != audit.EventGap {
		c.cfg.Metrics.Recorded(kind, max(r.Count, 1), r.Count)
	}
	c.cfg.Audit.Log(r)
}

// Run writes the counts of floods until ctx ends; then it watches nobody any more.
func (w *Watch) Run(ctx context.Context) {
	w.tally.Run(ctx, tally.Window)
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, k := range w.kids {
		k.group.remove(k)
		closePlaces(k.places)
		delete(w.kids, id)
	}
	for _, g := range w.groups {
		g.close()
	}
	w.groups = nil
}

// Add begins to watch the places of a kid. Call it when they are there and before anything of the kid's runs; late says
// that something may have. A place that cannot be watched leaves a gap record: nobody is kept from working by it.
func (w *Watch) Add(s *session.Session, places []Place, late bool) {
	k := &watch{session: s.ID, rec: audit.Record{Session: s.ID, Kid: s.Kid, Mark: s.Mark, Card: s.Card, Actor: "kid", Outcome: audit.OutcomeOK}}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.kids[s.ID] != nil {
		return
	}
	var errs []error
	for _, p := range places {
		opened, err := openPlace(p, k)
		if err == nil {
			k.places = append(k.places, opened)
		}
		errs = append(errs, err)
	}
	g, err := w.leastUsed()
	if err == nil {
		k.group = g
		err = g.add(k)
	}
	if err := errors.Join(append(errs, err)...); err != nil {
		w.cfg.Log.Error("recording what a kid does to its files", "kid", s.Kid, "error", err)
		w.gap(k.rec, "what the kid does to its files is not all recorded: "+err.Error(), "")
	}
	if late {
		w.gap(k.rec, "nobody recorded what the kid did to its files: sandboxd was away", "manifest")
	}
	if k.group == nil {
		closePlaces(k.places)
		return
	}
	w.kids[s.ID] = k
}

// leastUsed returns a queue, the kid's own while there are few kids. w.mu is held.
func (w *Watch) leastUsed() (*group, error) {
	var best *group
	for _, g := range w.groups {
		if best == nil || g.size() < best.size() {
			best = g
		}
	}
	if best != nil && (best.size() == 0 || len(w.groups) >= groups) {
		return best, nil
	}
	g, err := newGroup(w)
	if err != nil {
		if best != nil {
			return best, nil // the machine gives no more
		}
		return nil, err
	}
	w.groups = append(w.groups, g)
	return g, nil
}

// Root is the top of a place, which outlives the kid while it is open.
type Root struct {
	Dir   *os.File
	As    string
	Parts []Part
}

// End records what is still to be read of a session of which nothing runs any more, ends its watch and returns the tops
// of its places, which the caller closes. There are none of a session that is not watched.
func (w *Watch) End(session string) []Root {
	w.mu.Lock()
	k := w.kids[session]
	delete(w.kids, session)
	w.mu.Unlock()
	if k == nil {
		return nil
	}
	k.group.remove(k)
	w.tally.FlushGroup(session)
	var out []Root
	for _, p := range k.places {
		out = append(out, Root{Dir: p.root, As: p.of.As, Parts: p.of.Parts})
	}
	return out
}

func closePlaces(places []*place) {
	for _, p := range places {
		p.root.Close() // only read
	}
}

// gap records that something may have gone unseen; counted says where it can be seen all the same, "" nowhere.
func (w *Watch) gap(about audit.Record, detail, counted string) {
	r := about
	r.Event, r.Outcome, r.Count, r.Detail = audit.EventGap, audit.OutcomeFail, 1, detail
	r.Fields = map[string]string{audit.FieldLost: kind}
	if counted != "" {
		r.Fields[audit.FieldCounted] = counted
	}
	w.cfg.Audit.Log(r)
}

// inKid is what the kid calls a file of the place; ok is false where it calls it nothing.
func (p Place) inKid(path string) (name string, ok bool) {
	if p.Parts == nil {
		return join(p.As, path), true
	}
	for _, part := range p.Parts {
		if rest, in := strings.CutPrefix(path, part.In); in && (rest == "" || rest[0] == '/') {
			return join(part.As, strings.TrimPrefix(rest, "/")), true
		}
	}
	return "", false
}

func join(dir, path string) string {
	if path == "" {
		return dir
	}
	return strings.TrimSuffix(dir, "/") + "/" + path
}
