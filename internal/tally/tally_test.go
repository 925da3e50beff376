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

// TestRestDoesNotWaitForTheWindow: what went beyond a group's records is told in the middle of a window, repeats at its
// end.
func TestRestDoesNotWaitForTheWindow(t *testing.T) {
	rec := &recorder{}
	ta := New(rec, 1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	const window = 4 * time.Second
	began := time.Now()
	go func() { ta.Run(ctx, window); close(done) }()
	for range 5 {
		ta.Add("s", "A a.test", lookup("a.test", reason.NameNotAllowed))
	}
	ta.Add("s", "A b.test", lookup("b.test", reason.NameNotAllowed))
	for {
		if records, _ := rec.events(); records == 2 {
			break
		}
		if time.Since(began) > window {
			t.Fatal("what went beyond waited for the window's end")
		}
		time.Sleep(2 * time.Millisecond) // between looks at a condition
	}
	if took := time.Since(began); took > window/2 {
		t.Errorf("told after %v", took)
	}
	cancel()
	<-done
	if records, events := rec.events(); records != 3 || events != 6 {
		t.Errorf("%d records for %d events, want 3 for 6", records, events)
	}
}

// TestOneKeyLeavesRoom: with AddEach repeats are shown one by one, and leave half of the records to other keys; with
// keys left empty they take all.
func TestOneKeyLeavesRoom(t *testing.T) {
	for key, want := range map[string]int{"A a.test": 5 + 5 + 1, "": 10 + 1} {
		rec := &recorder{}
		ta := New(rec, 10)
		for range 100 {
			ta.AddEach("s", key, lookup("a.test", reason.NameNotAllowed))
		}
		named := 0
		for i := range 5 {
			name := fmt.Sprintf("b%d.test", i)
			other := key
			if key != "" {
				other = name
			}
			ta.AddEach("s", other, lookup(name, reason.NameNotAllowed))
		}
		for _, r := range rec.recs {
			if r.Dst.Name != "a.test" {
				named++
			}
		}
		ta.Flush()
		if records, events := rec.events(); records != want || events != 105 || (named == 5) != (key != "") {
			t.Errorf("key %q: %d records for %d events, %d other names; want %d for 105", key, records, events, named, want)
		}
	}
}
