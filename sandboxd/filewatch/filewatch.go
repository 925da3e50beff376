// Package filewatch sees which programs the kids start and which files they write, for kids with trip rules on that.
// It only looks (fanotify(7), notification class): nothing a kid does waits for it.
//
// Packages execlog and filelog record every program and file, by name. They do not serve here, nor this there: a trip rule
// is about what is in a file, for which it takes the open file that these events carry, and events with open files carry
// no names, and come only of mounts that the kid has.
//
// It promises that the start of a program from any of the kid's file systems is compared with what is forbidden by
// path, by inode and by content, that starting one through its dynamic loader is noticed while it runs, and that a write to a
// file outside the scratch places is seen when it happens. Where events were lost, or nobody watched, a gap record
// says so; where nobody watches now, the file that says who is watched does not name the kid.
//
// What it cannot see: a program that was changed, even by a byte, before it was started; one that runs out of a memfd;
// a script that is handed to its interpreter as a file; an attempt to write that the kernel refuses (all but the
// scratch places are read-only), and the making of a directory or of an empty file.
package filewatch

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"tagout/internal/atomicfile"
	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/session"
	"tagout/internal/trip"
	"tagout/internal/wire"
)

// Recorder is the audit log. Log must not block.
type Recorder interface{ Log(audit.Record) }

// Config of a Watch. Every field is needed.
type Config struct {
	File  string // where to say who is watched; its directory exists
	GID   int    // who may read that
	Audit Recorder
	Log   *slog.Logger
}

// Watch watches kids. Make it with New and run it once; the rest is safe for concurrent use.
type Watch struct {
	cfg Config

	mu   sync.Mutex
	kids map[string]*kid // by session; guarded by mu
}

// New returns a Watch of nobody.
func New(cfg Config) *Watch { return &Watch{cfg: cfg, kids: map[string]*kid{}} }

// scratch are the places where a kid may write whatever it likes.
var scratch = []string{"/workspace", "/tmp"}

// Wants is what trip rules want to know of a kid.
type Wants struct {
	Forbidden []string // programs, absolute paths in the kid
	Writes    bool     // files outside the scratch places
	Scratch   []string // what every rule takes for such a place
}

// WantsOf returns what the rules want to know.
func WantsOf(rules []trip.Rule) Wants {
	var w Wants
	for _, r := range rules {
		switch r.On {
		case trip.Exec:
			w.Forbidden = append(w.Forbidden, r.Paths...)
		case trip.WriteOutside:
			if !w.Writes {
				w.Scratch = append(slices.Clone(scratch), r.Except...)
			}
			w.Scratch = slices.DeleteFunc(w.Scratch, func(dir string) bool {
				return !slices.Contains(scratch, dir) && !slices.Contains(r.Except, dir)
			})
			w.Writes = true
		}
	}
	slices.Sort(w.Forbidden)
	w.Forbidden = slices.Compact(w.Forbidden)
	return w
}

// Nothing says whether there is nothing to watch for.
func (w Wants) Nothing() bool { return len(w.Forbidden) == 0 && !w.Writes }

// isScratch says whether a file or directory of the kid is in a place where it may write.
func (w Wants) isScratch(file string) bool {
	return slices.ContainsFunc(w.Scratch, func(dir string) bool { return file == dir || strings.HasPrefix(file, strings.TrimSuffix(dir, "/")+"/") })
}

// Add begins to watch the kid whose first process is pid, for what wants says. Call it when the kid's mounts are there
// and before anything of its own runs; late says that something may have run already.
func (w *Watch) Add(s *session.Session, pid int, wants Wants, late bool) error {
	if wants.Nothing() {
		return nil
	}
	k, err := watchKid(s, pid, wants, w.cfg)
	if err != nil {
		return fmt.Errorf("watching the programs and files of kid %s: %w", s.Kid, err)
	}
	if late {
		k.gap("nobody watched which programs the kid starts and which files it writes: sandboxd was away", false)
	}
	w.mu.Lock()
	old := w.kids[s.ID]
	w.kids[s.ID] = k
	w.mu.Unlock()
	if old != nil {
		old.close()
	}
	go k.run()
	w.tell()
	return nil
}

// Remove ends the watch of a session. One that is not watched is not an error.
func (w *Watch) Remove(session string) {
	w.mu.Lock()
	k := w.kids[session]
	delete(w.kids, session)
	w.mu.Unlock()
	if k != nil {
		k.close()
	}
}

// tellEvery is how often the file is renewed, and fresh how recently a kid's reader must have been at work to be in it.
const (
	tellEvery = time.Second
	fresh     = 3 * time.Second
)

// Run says who is watched until ctx ends; then it watches nobody any more.
func (w *Watch) Run(ctx context.Context) {
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	w.sweep()
	for {
		w.tell()
		select {
		case <-tick.C:
		case <-ctx.Done():
			w.mu.Lock()
			defer w.mu.Unlock()
			for id, k := range w.kids {
				k.close()
				delete(w.kids, id)
			}
			return
		}
	}
}

// sweep removes what a predecessor that was killed has left half-written.
func (w *Watch) sweep() {
	w.mu.Lock()
	defer w.mu.Unlock() // nobody writes meanwhile
	if err := atomicfile.Sweep(w.cfg.File); err != nil {
		w.cfg.Log.Warn("removing what a killed sandboxd has left half-written", "error", err)
	}
}

// tell writes down who is watched now. An old file says to killswitchd that nobody is.
func (w *Watch) tell() {
	now := bootclock.Now()
	out := wire.Watched{At: now, Sessions: []string{}}
	w.mu.Lock()
	defer w.mu.Unlock() // also keeps two writers apart
	for id, k := range w.kids {
		if now-time.Duration(k.alive.Load()) < fresh {
			out.Sessions = append(out.Sessions, id)
		}
	}
	slices.Sort(out.Sessions)
	raw, err := json.Marshal(out)
	if err == nil {
		err = atomicfile.Write(w.cfg.File, raw, 0o640, -1, w.cfg.GID)
	}
	if err != nil {
		w.cfg.Log.Error("saying which kids' programs and files are watched: killswitchd stops those with rules on them if that goes on", "error", err)
	}
}

// clean is the path of a file as the kernel shows it, without what it adds for one that was removed.
func clean(shown string) string { return path.Clean(strings.TrimSuffix(shown, " (deleted)")) }
