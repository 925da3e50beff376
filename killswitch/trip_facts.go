package killswitch

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/logtail"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/trip"
)

const reasonTripped = reason.Tripped

// What lines of the logs are about. The logger writes no spaces, and quotes within a text are escaped, so none of
// these can stand in a text that a kid made up.
var (
	lineDenied  = []byte(`"outcome":"` + audit.OutcomeDeny + `"`)
	lineGap     = []byte(`"event":"` + audit.EventGap + `"`)
	lineCounted = []byte(`"` + audit.FieldCounted + `":`)
	lineExec    = []byte(`"event":"` + audit.EventExecSeen + `"`)
	lineWrite   = []byte(`"event":"` + audit.EventWriteSeen + `"`)
	lineCanary  = []byte(`"reason":"` + reason.Canary.String() + `"`)
	lineMisuse  = []byte(`"reason":"` + reason.TokenScope.String() + `"`)
	lineSeccomp = []byte(`"hook":"seccomp"`)
)

// facts is what the logs say of one session.
type facts struct {
	Denied int64             `json:"denied,omitempty"` // attempts that proxy, dnsfilter and sandboxd's socket watch refused
	Events map[string]string `json:"events,omitempty"` // kind of rule, or kind and path -> the first such event
	Wrote  []string          `json:"wrote,omitempty"`  // files outside the scratch places; at most maxWrote
	Last   time.Duration     `json:"last"`             // CLOCK_BOOTTIME of what was read last
}

// eventBlind is the key of the event that a kid's programs and files could not all be watched.
const eventBlind = "blind"

// maxWrote bounds how many files are remembered; with one more, every file counts as written outside.
const maxWrote = 32

// gapSeen is the last gap of all logs. A session that began before it has it.
type gapSeen struct {
	At     time.Duration `json:"at,omitempty"` // CLOCK_BOOTTIME; 0: none
	Detail string        `json:"detail,omitempty"`
}

// factBook is what the logs say. Safe for concurrent use; never held across a system call.
type factBook struct {
	mu     sync.Mutex
	bootID string
	marks  map[string]logtail.Mark
	byMark map[uint32]*facts // marks are never used again, so they name sessions
	gap    gapSeen
	fresh  time.Duration // CLOCK_BOOTTIME at which every log had been read to its end
	failed string        // why not, since
	news   bool
}

// factKeep is how long facts of a session that nobody knows are kept: its document may be just being written.
const factKeep = time.Minute

// logsStale is how old the last look at the logs may be before what they say is not known.
const logsStale = 4 * tripEvery

// follow reads the logs until ctx ends.
func (t *Trips) follow(ctx context.Context) {
	tail := logtail.New(t.cfg.Logs, t.facts.marks, lineDenied, lineGap, lineExec, lineWrite)
	h := logtail.Handler{
		Line: t.facts.line,
		Moved: func(log string, _ int64, replaced bool) {
			what := "was cut"
			if replaced {
				what = "was replaced by another file"
			}
			t.facts.lost(bootclock.Now(), "the audit log "+filepath.Base(log)+" "+what)
		},
		Gone: func(log string) {
			t.facts.lost(bootclock.Now(), "the audit log "+filepath.Base(log)+" was removed")
		},
	}
	tick := time.NewTicker(tripEvery)
	defer tick.Stop()
	for {
		began := bootclock.Now()
		failed := tail.Poll(ctx, h)
		if t.facts.read(began, tail.Marks, failed) {
			select {
			case t.wake <- struct{}{}:
			default:
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// read notes that the logs were read, as they were at began, and says whether that brought anything new.
func (b *factBook) read(began time.Duration, marks map[string]logtail.Mark, failed map[string]error) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.marks == nil {
		b.marks = map[string]logtail.Mark{}
	}
	for log, m := range marks {
		b.marks[log] = m
	}
	if len(failed) == 0 {
		b.fresh, b.failed = began, ""
	}
	for log, err := range failed {
		b.failed = fmt.Sprintf("reading the audit log %s: %v", filepath.Base(log), err)
	}
	news := b.news
	b.news = false
	return news
}

// line takes one line. Most are counted without being parsed: a kid can cause many.
func (b *factBook) line(line []byte, log string, _ int64) {
	daemon := filepath.Base(filepath.Dir(log))
	gap := bytes.Contains(line, lineGap)
	exec, write := bytes.Contains(line, lineExec), bytes.Contains(line, lineWrite)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case gap:
		b.gapLine(line)
	case exec, write:
		b.watched(line)
	case bytes.Contains(line, lineCanary):
		b.event(trip.Canary, line)
	case bytes.Contains(line, lineMisuse):
		b.event(trip.TokenMisuse, line)
		b.event(trip.Canary, line) // a token is bait, too: nobody has a reason to show it where it does not belong
	}
	if counts(daemon, line) {
		if f := b.of(line); f != nil {
			f.Denied += max(number(line, "count"), 1)
			b.news = true
		}
	}
}

// counts says whether the line is about attempts that nobody else counts. What the kernel refused is in its own
// counters, and what credd refused is in the proxy's record of the request.
func counts(daemon string, line []byte) bool {
	switch {
	case !bytes.Contains(line, lineDenied):
		return false
	case daemon == "proxy", daemon == "dnsfilter":
		return true
	}
	return daemon == "sandboxd" && bytes.Contains(line, lineSeccomp)
}

// of returns the facts of the session that a line is about, nil where it is about none. b.mu is held.
func (b *factBook) of(line []byte) *facts {
	mark := uint32(number(line, "mark")) // the logger wrote a uint32
	if mark == 0 {
		return nil
	}
	return b.session(mark)
}

func (b *factBook) session(mark uint32) *facts {
	f := b.byMark[mark]
	if f == nil {
		f = &facts{}
		if b.byMark == nil {
			b.byMark = map[uint32]*facts{}
		}
		b.byMark[mark] = f
	}
	f.Last = bootclock.Now()
	return f
}

// harmless are the causes of gap records, without a count, that are no reason to stop a kid: a daemon was killed and came
// back, somebody set the clock.
var harmless = map[string]bool{"crash": true, "clock": true}

// gapLine takes a record of missing records, of this boot. b.mu is held.
func (b *factBook) gapLine(line []byte) {
	if bytes.Contains(line, lineCounted) || !bytes.Contains(line, []byte(`"boot_id":"`+b.bootID+`"`)) {
		return
	}
	var r audit.Record
	if json.Unmarshal(line, &r) != nil || r.Count == 0 && harmless[r.Fields[audit.FieldCause]] {
		return
	}
	if r.Mark != 0 { // it concerns one kid: others have lost nothing
		f := b.session(r.Mark)
		b.first(f, trip.AuditGap, r.Detail)
		if r.Fields[audit.FieldBlind] != "" {
			b.first(f, eventBlind, r.Detail)
		}
		return
	}
	if r.Boot > b.gap.At {
		b.gap = gapSeen{At: r.Boot, Detail: fmt.Sprintf("%d records of %s are missing: %s", max(r.Count, 1), r.Daemon, r.Detail)}
		b.news = true
	}
}

// lost notes that a log itself was tampered with.
func (b *factBook) lost(now time.Duration, what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gap = gapSeen{At: now, Detail: what}
	b.news = true
}

// event takes a record of something that should never happen. b.mu is held.
func (b *factBook) event(kind string, line []byte) {
	var r audit.Record
	if json.Unmarshal(line, &r) != nil || r.Mark == 0 {
		return
	}
	what := r.Detail
	if r.Dst != nil && r.Dst.Name != "" {
		what = strings.TrimSuffix(r.Dst.Name+": "+r.Detail, ": ")
	}
	b.first(b.session(r.Mark), kind, what)
}

// watched takes a record of sandboxd's watch over programs and files. b.mu is held.
func (b *factBook) watched(line []byte) {
	var r audit.Record
	if json.Unmarshal(line, &r) != nil || r.Mark == 0 {
		return
	}
	f := b.session(r.Mark)
	if r.Event == audit.EventExecSeen {
		b.first(f, trip.Exec+" "+r.Fields["forbidden"], r.Detail)
		return
	}
	if file := r.Fields["path"]; !slices.Contains(f.Wrote, file) && len(f.Wrote) <= maxWrote {
		f.Wrote = append(f.Wrote, file)
		b.news = true
	}
}

func (b *factBook) first(f *facts, key, what string) {
	if _, before := f.Events[key]; before {
		return
	}
	if f.Events == nil {
		f.Events = map[string]string{}
	}
	f.Events[key] = what
	b.news = true
}

// unknown says why what the logs say is not known, "" where it is. b.mu is held.
func (b *factBook) unknown(now time.Duration) string {
	switch {
	case now-b.fresh <= logsStale:
		return ""
	case b.failed != "":
		return b.failed
	}
	return "the audit logs could not be read to their end: the disk does not answer"
}

// denied returns how many attempts the logs tell of.
func (b *factBook) denied(now time.Duration, mark uint32) trip.Reading {
	b.mu.Lock()
	defer b.mu.Unlock()
	got := trip.Reading{Unknown: b.unknown(now)}
	if f := b.byMark[mark]; f != nil {
		got.Value = f.Denied
	}
	return got
}

// seen returns whether what the rule is about happened.
func (b *factBook) seen(now time.Duration, d *session.Session, r trip.Rule) trip.Reading {
	b.mu.Lock()
	defer b.mu.Unlock()
	if what := b.happened(d, r); what != "" {
		return trip.Reading{Value: 1, Detail: what}
	}
	return trip.Reading{Unknown: b.unknown(now)}
}

// happened returns the first event that the rule is about, "" where there was none. b.mu is held.
func (b *factBook) happened(d *session.Session, r trip.Rule) string {
	if r.On == trip.AuditGap && b.gap.At > 0 && b.gap.At >= d.Boot {
		return b.gap.Detail
	}
	f := b.byMark[d.Mark]
	if f == nil {
		return ""
	}
	if what := f.Events[eventBlind]; what != "" && (r.On == trip.Exec || r.On == trip.WriteOutside) {
		return what
	}
	switch r.On {
	case trip.Exec:
		for _, p := range r.Paths {
			if what, ok := f.Events[trip.Exec+" "+p]; ok {
				return what
			}
		}
	case trip.WriteOutside:
		for _, file := range f.Wrote {
			if !slices.ContainsFunc(r.Except, func(dir string) bool { return within(file, dir) }) || len(f.Wrote) > maxWrote {
				return file + " was written"
			}
		}
	default:
		return f.Events[r.On]
	}
	return ""
}

// within says whether file is dir or below it.
func within(file, dir string) bool {
	return path.Clean(file) == dir || strings.HasPrefix(path.Clean(file), strings.TrimSuffix(dir, "/")+"/")
}

// prune forgets sessions that are gone.
func (b *factBook) prune(now time.Duration, living []*session.Session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for mark, f := range b.byMark {
		if now-f.Last > factKeep && !slices.ContainsFunc(living, func(d *session.Session) bool { return d.Mark == mark }) {
			delete(b.byMark, mark)
		}
	}
}

// number returns the number that a key of the record's outer object has, 0 where there is none. Keys with numbers
// are in no other object, and texts cannot hold an unescaped quote.
func number(line []byte, key string) int64 {
	_, rest, ok := bytes.Cut(line, []byte(`"`+key+`":`))
	if !ok {
		return 0
	}
	end := bytes.IndexAny(rest, ",}")
	if end < 0 {
		return 0
	}
	n, err := strconv.ParseInt(string(rest[:end]), 10, 64)
	if err != nil {
		return 0
	}
	return n
}
