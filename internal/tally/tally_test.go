package tally

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

type recorder struct {
	mu   sync.Mutex
	recs []audit.Record
}

func (r *recorder) Log(rec audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recs = append(r.recs, rec)
}

// events sums what the records stand for.
func (r *recorder) events() (records int, events uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rec := range r.recs {
		events += max(rec.Count, 1)
	}
	return len(r.recs), events
}

func lookup(name string, code reason.Code) func() audit.Record {
	outcome := audit.OutcomeDeny
	if code == reason.OK {
		outcome = audit.OutcomeAllow
	}
	return func() audit.Record {
		return audit.Record{Event: audit.EventLookup, Outcome: outcome, Reason: code, Dst: &audit.Dst{Name: name}}
	}
}

func TestRepeatsAreCountedExactly(t *testing.T) {
	rec := &recorder{}
	ta := New(rec, 10)
	for range 1000 {
		ta.Add("s1", "A api.vendor.test", lookup("api.vendor.test", reason.OK))
	}
	ta.Flush()
	records, events := rec.events()
	if records != 2 || events != 1000 {
		t.Fatalf("got %d records for %d events, want 2 for 1000", records, events)
	}
	if got := rec.recs[1].Dst.Name; got != "api.vendor.test" {
		t.Errorf("summary names %q", got)
	}
	ta.Flush()
	if records, _ := rec.events(); records != 2 {
		t.Errorf("a second flush wrote %d more records", records-2)
	}
}

func TestDistinctEventsAreBounded(t *testing.T) {
	rec := &recorder{}
	ta := New(rec, 10)
	for i := range 5000 {
		ta.Add("s1", "", lookup(fmt.Sprintf("x%d.evil.test", i), reason.NameNotAllowed))
		ta.Add("s1", "", lookup("bad", reason.NameInvalid))
	}
	ta.Add("s2", "", lookup("other.test", reason.NameNotAllowed))
	ta.Flush()
	records, events := rec.events()
	if records != 10+2+1 || events != 10001 {
		t.Fatalf("got %d records for %d events, want 13 for 10001", records, events)
	}
	for _, r := range rec.recs[11:] {
		if r.Dst.Name != "" || r.Count == 0 || r.Detail == "" {
			t.Errorf("summary %+v names one destination or has no count", r)
		}
	}
}

func TestRunFlushesAtTheEnd(t *testing.T) {
	rec := &recorder{}
	ta := New(rec, 1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { ta.Run(ctx, time.Hour); close(done) }()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 250 {
				ta.Add("s", "k", lookup("a.test", reason.OK))
			}
		})
	}
	wg.Wait()
	cancel()
	<-done
	if records, events := rec.events(); records != 2 || events != 1000 {
		t.Fatalf("got %d records for %d events, want 2 for 1000", records, events)
	}
}
