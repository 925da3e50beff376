// Package execlog records every program that a kid starts, as the kernel had it before the program's first instruction:
// who started it, the file, and the arguments. A kid that starts more than are handed over one by one has the rest
// counted exactly, and how many there were in all stands in a record when its session ends.
//
// It does not see what runs without an execve(2): a library that is loaded, a script's lines, code that is written into
// memory.
package execlog

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"time"

	"tagout/internal/audit"
)

// Start is one program that was started.
type Start struct {
	Boot       time.Duration // CLOCK_BOOTTIME
	Mark       uint32
	PID        int // in the host's pid namespace
	Parent     int
	UID        uint32
	Comm       string
	File       string // name of the file that runs, without its directory
	Inode      uint64
	Path       string // as it was given to execve
	Args       []string
	ArgsLength int  // of all of them, a zero byte after each
	Cut        bool // Args are only the first
}

// Count is the kernel's truth about one session: Untold are those among Started that no Start tells of, and Told how
// many of these are in records already.
type Count struct{ Started, Untold, Told uint64 }

// Source is where starts come from.
type Source interface {
	// Starts calls fn for each until ctx ends, and returns nil then.
	Starts(ctx context.Context, fn func(Start)) error
	// Drain returns nil when every start from before the call has been handed over.
	Drain(ctx context.Context) error
	Counts() (map[uint32]Count, error)
	CountOf(mark uint32) (Count, error)
	// Told notes how many untold ones are in records, so that a successor knows it.
	Told(mark uint32, n uint64) error
	Forget(mark uint32) error
	// Seen is why nobody sees which programs are started, nil where it is seen.
	Seen() error
}

// Sessions says whose mark it is.
type Sessions interface {
	SessionOf(mark uint32) (kid, id, card string, ok bool)
}

// Recorder is the audit log. Log must not block.
type Recorder interface{ Log(audit.Record) }

// Metrics is what the reader reports to.
type Metrics interface {
	// Recorded adds n events of a kind, of which folded have no record of their own.
	Recorded(kind string, n, folded uint64)
}

// Config of a Reader. Every field is needed.
type Config struct {
	Source   Source
	Sessions Sessions
	Audit    Recorder
	Metrics  Metrics
	Log      *slog.Logger
}

const (
	settleEvery = time.Second
	drainLimit  = 500 * time.Millisecond
	kind        = "process"
)

// Reader records starts of programs. Make one with New and run it once.
type Reader struct {
	cfg   Config
	blind bool // it was told that nobody sees them; owned by the goroutine of settleAgain
}

// New returns a reader.
func New(cfg Config) *Reader { return &Reader{cfg: cfg} }

// Run records until ctx ends and returns nil then. Any other end is an error.
func (r *Reader) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() { r.settleAgain(ctx); close(done) }()
	err := r.cfg.Source.Starts(ctx, r.note)
	cancel()
	<-done
	if err != nil {
		return fmt.Errorf("reading which programs the kids start: %w", err)
	}
	return nil
}

// note records one start.
func (r *Reader) note(s Start) {
	r.cfg.Metrics.Recorded(kind, 1, 0)
	rec := r.about(s.Mark)
	rec.Boot = s.Boot
	if n := len(s.Args); s.Cut && n > 0 { // where the kernel cut may be the middle of a secret
		s.Args = slices.Concat(s.Args[:n-1], []string{audit.WithoutLastWord(s.Args[n-1])})
	}
	rec.Process = &audit.Process{PID: s.PID, Parent: s.Parent, Comm: audit.Shown(s.Comm), Exe: audit.Shown(s.Path)}
	rec.Fields = map[string]string{
		"arguments": audit.Line(s.Args), "uid": strconv.FormatUint(uint64(s.UID), 10), "file": audit.Shown(s.File),
		"inode": strconv.FormatUint(s.Inode, 10),
	}
	if s.Cut {
		rec.Fields["arguments_bytes"] = strconv.Itoa(s.ArgsLength)
		rec.Fields["cut"] = "true"
	}
	r.cfg.Audit.Log(rec)
}

func (r *Reader) about(mark uint32) audit.Record {
	rec := audit.Record{Event: audit.EventProcessStarted, Mark: mark, Actor: "kid", Outcome: audit.OutcomeOK}
	rec.Kid, rec.Session, rec.Card, _ = r.cfg.Sessions.SessionOf(mark)
	return rec
}

// settleAgain records what was counted and not handed over, again and again.
func (r *Reader) settleAgain(ctx context.Context) {
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()
	for {
		r.look()
		counts, err := r.cfg.Source.Counts()
		if err != nil {
			r.cfg.Log.Error("counting which programs the kids start; trying again", "error", err)
		}
		for _, mark := range slices.Sorted(maps.Keys(counts)) {
			r.settle(mark, counts[mark])
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// look records when nobody sees starts of programs any more, and when they are seen again.
func (r *Reader) look() {
	err := r.cfg.Source.Seen()
	switch {
	case err != nil && !r.blind:
		r.cfg.Log.Error("which programs the kids start is not recorded", "error", err)
		r.cfg.Audit.Log(audit.Record{Event: audit.EventGap, Outcome: audit.OutcomeFail, Count: 1, Fields: map[string]string{audit.FieldBlind: "true"},
			Detail: "which programs the kids start is not recorded from now on: " + err.Error()})
	case err == nil && r.blind:
		r.cfg.Audit.Log(audit.Record{Event: audit.EventGap, Outcome: audit.OutcomeOK, Count: 1, Detail: "which programs the kids start is recorded again"})
	}
	r.blind = err != nil
}

// settle records starts that were not handed over. The record is written before it is noted: killed in between, a
// successor tells them twice rather than not at all.
func (r *Reader) settle(mark uint32, c Count) {
	if c.Untold <= c.Told {
		return
	}
	n := c.Untold - c.Told
	r.cfg.Metrics.Recorded(kind, n, n)
	rec := r.about(mark)
	rec.Count = n
	rec.Detail = "more programs than are recorded one by one"
	rec.Fields = map[string]string{"started": strconv.FormatUint(c.Started, 10)}
	r.cfg.Audit.Log(rec)
	if err := r.cfg.Source.Told(mark, c.Untold); err != nil {
		r.cfg.Log.Error("noting which starts of programs were recorded; they may be recorded twice", "error", err)
	}
}

// Forget records all that is left of a session of which nothing runs any more, and how many programs there were, and
// forgets it. It waits for the reader, and not for long.
func (r *Reader) Forget(mark uint32) {
	ctx, cancel := context.WithTimeout(context.Background(), drainLimit)
	defer cancel()
	if err := r.cfg.Source.Drain(ctx); err != nil {
		r.cfg.Log.Error("waiting for the last programs that a kid started to be recorded", "mark", mark, "error", err)
	}
	c, err := r.cfg.Source.CountOf(mark)
	if err != nil {
		r.cfg.Log.Error("counting the programs that a kid started", "mark", mark, "error", err)
		return
	}
	r.settle(mark, c)
	if c.Started > 0 {
		rec := r.about(mark)
		rec.Event, rec.Actor = audit.EventProcessCounts, ""
		rec.Detail = fmt.Sprintf("%d programs were started in all", c.Started)
		rec.Fields = map[string]string{"started": strconv.FormatUint(c.Started, 10), "folded": strconv.FormatUint(c.Untold, 10)}
		r.cfg.Audit.Log(rec)
	}
	if err := r.cfg.Source.Forget(mark); err != nil {
		r.cfg.Log.Error("forgetting the programs that a kid started", "mark", mark, "error", err)
	}
}
