package execlog

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
)

const mark = 7

// kernel is a source whose numbers a test sets.
type kernel struct {
	mu     sync.Mutex
	counts map[uint32]Count
	blind  error
	starts chan Start
	gone   bool
}

func (k *kernel) Starts(ctx context.Context, fn func(Start)) error {
	for {
		select {
		case s := <-k.starts:
			fn(s)
		case <-ctx.Done():
			return nil
		}
	}
}

// Drain waits for the reader to have taken everything.
func (k *kernel) Drain(ctx context.Context) error {
	for len(k.starts) > 0 {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (k *kernel) Counts() (map[uint32]Count, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := map[uint32]Count{}
	for m, c := range k.counts {
		out[m] = c
	}
	return out, nil
}

func (k *kernel) CountOf(m uint32) (Count, error) { all, err := k.Counts(); return all[m], err }

func (k *kernel) Told(m uint32, n uint64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.counts[m]
	c.Told = n
	k.counts[m] = c
	return nil
}

func (k *kernel) Forget(m uint32) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.counts, m)
	k.gone = true
	return nil
}

func (k *kernel) Seen() error { k.mu.Lock(); defer k.mu.Unlock(); return k.blind }

func (k *kernel) set(fn func()) { k.mu.Lock(); defer k.mu.Unlock(); fn() }

type names struct{}

func (names) SessionOf(m uint32) (kid, id, card string, ok bool) { return "k1", "s1", "c1", m == mark }

// log keeps records, and adds what the metrics are told.
type log struct {
	records      chan audit.Record
	mu           sync.Mutex
	all, without uint64
}

func (l *log) Log(r audit.Record) { l.records <- r }

func (l *log) Recorded(_ string, n, folded uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all += n
	l.without += folded
}

func (l *log) next(t *testing.T, event string) audit.Record {
	t.Helper()
	for {
		select {
		case r := <-l.records:
			if r.Event == event {
				return r
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("no record of %s", event)
		}
	}
}

func begin(t *testing.T) (*kernel, *log, *Reader) {
	k := &kernel{counts: map[uint32]Count{}, starts: make(chan Start, 100)}
	l := &log{records: make(chan audit.Record, 100)}
	r := New(Config{Source: k, Sessions: names{}, Audit: l, Metrics: l, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return k, l, r
}

func TestStartsAreRecordedAndTheRestIsCounted(t *testing.T) {
	k, l, r := begin(t)
	k.starts <- Start{Mark: mark, PID: 5, Parent: 4, Comm: "sh", File: "dash", Path: "/bin/sh", Args: []string{"sh", "-c", "a\nb s3cr"}, ArgsLength: 99, Cut: true}
	got := l.next(t, audit.EventProcessStarted)
	if got.Kid != "k1" || got.Session != "s1" || got.Process == nil || got.Process.Parent != 4 || got.Fields["arguments"] != `sh -c "a\nb…"` || got.Fields["arguments_bytes"] != "99" {
		t.Errorf("got %+v", got)
	}
	k.set(func() { k.counts[mark] = Count{Started: 10, Untold: 9} })
	if got := l.next(t, audit.EventProcessStarted); got.Count != 9 || got.Fields["started"] != "10" {
		t.Errorf("a flood: %+v", got)
	}
	k.set(func() { k.counts[mark] = Count{Started: 12, Untold: 11, Told: 9} })
	r.Forget(mark)
	if got := l.next(t, audit.EventProcessStarted); got.Count != 2 {
		t.Errorf("the rest: %+v", got)
	}
	if got := l.next(t, audit.EventProcessCounts); got.Fields["started"] != "12" || got.Fields["folded"] != "11" || got.Count != 0 {
		t.Errorf("all: %+v", got)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all != 12 || l.without != 11 || !k.gone {
		t.Errorf("%d counted, %d without a record, forgotten %v", l.all, l.without, k.gone)
	}
}

func TestNobodyRecordingIsAGap(t *testing.T) {
	k, l, _ := begin(t)
	k.set(func() { k.blind = errors.New("no program") })
	if got := l.next(t, audit.EventGap); got.Outcome != audit.OutcomeFail || got.Fields[audit.FieldBlind] == "" {
		t.Errorf("got %+v", got)
	}
	k.set(func() { k.blind = nil })
	if got := l.next(t, audit.EventGap); got.Outcome != audit.OutcomeOK {
		t.Errorf("got %+v", got)
	}
}
