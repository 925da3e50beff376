package events

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// flood denies the mark's ports again and again, as a session over its budget: nothing gets into the ring.
func (k *fakeKernel) flood(ctx context.Context, mark uint32, ports uint16) {
	for ctx.Err() == nil {
		for port := range ports {
			k.deny(denial(mark, reason.RawAddress, 1000+port), 1)
		}
		time.Sleep(time.Millisecond) // a pace, not a wait
	}
}

// soon is what is left of the second in which an alert leaves, for a machine with other things to do.
const soon = 700 * time.Millisecond

// firstTold returns how long after their denial the records of new destinations came, the slowest of them, while
// both sessions flood. The reader looks at the kernel at every tick.
func firstTold(t *testing.T, tick time.Duration, tries uint16) time.Duration {
	t.Helper()
	k := &fakeKernel{attempts: Attempts{0: {}, 7: {}, 8: {}}}
	r, out := newBooks(k, filepath.Join(t.TempDir(), "none"))
	src := k.source()
	src.denials = func(ctx context.Context, _ func(Denial)) error { <-ctx.Done(); return nil }
	r.cfg.Source, r.cfg.Cursor, r.every, r.cfg.Log = src, filepath.Join(t.TempDir(), "cursor"), tick, slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := r.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	wg.Go(func() { k.flood(ctx, 7, 100) })
	wg.Go(func() { k.flood(ctx, 8, 30) })
	defer wg.Wait()
	defer cancel()
	slowest := time.Duration(0)
	for i := range tries {
		mark, port := uint32(7+i%2), 20+i
		began := time.Now()
		k.deny(denial(mark, reason.RawAddress, port), 1)
		for !out.names(mark, port) {
			if time.Since(began) > 20*time.Second {
				t.Fatalf("port %d of mark %d is in no record", port, mark)
			}
			time.Sleep(2 * time.Millisecond) // between looks at a condition
		}
		slowest = max(slowest, time.Since(began))
	}
	return slowest
}

func (r *records) names(mark uint32, port uint16) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rec := range r.all {
		if rec.Event == audit.EventConnectDenied && rec.Mark == mark && rec.Dst != nil && rec.Dst.Port == port {
			return true
		}
	}
	return false
}

// TestNewDestinationIsToldSoonInAFlood: what a session tries for the first time is told by name in time for its alert,
// whatever else it and others try. Without the looks between settlements it is not.
func TestNewDestinationIsToldSoonInAFlood(t *testing.T) {
	t.Parallel()
	if took := firstTold(t, glanceEvery, 8); took > soon {
		t.Errorf("a new destination was told after %v, want %v at most", took, soon)
	}
	if took := firstTold(t, time.Second, 4); took < soon {
		t.Errorf("with a look a second it was told within %v: the test shows nothing", took)
	}
}

// TestGlancesKeepCount: with looks and settlements in any order the records stand for what was counted, and those that
// repeat wait for the settlement.
func TestGlancesKeepCount(t *testing.T) {
	k := &fakeKernel{attempts: Attempts{0: {}, 7: {}, 8: {}}}
	r, out := newBooks(k, filepath.Join(t.TempDir(), "none"))
	reconcile := func(due func(Attempts, []Flood) []Flood) (records int) {
		t.Helper()
		before := len(out.all)
		if err := r.reconcile(t.Context(), due); err != nil {
			t.Fatal(err)
		}
		return len(out.all) - before
	}
	for range 3 {
		for port := range uint16(100) {
			for how := range 3 {
				k.deny(denial(7, reason.RawAddress, port), how)
				k.deny(denial(8, reason.QUIC, port), how)
			}
		}
	}
	for i, want := range []int{2*100 /* from the ring */ + 2*freshLines, 2 * (100 - freshLines), 0} {
		if n := reconcile(r.ledger.glance); n != want {
			t.Errorf("look %d wrote %d records, want %d", i, n, want)
		}
	}
	k.deny(denial(7, reason.RawAddress, 5), 1)
	if n := reconcile(r.ledger.glance); n != 0 {
		t.Errorf("%d records of a destination that was told", n)
	}
	if n := reconcile(r.ledger.settle); n == 0 {
		t.Error("the settlement did not tell what the look left to it")
	}
	r.tally.Flush()
	wantTold(t, out.told(), k.attempts)
}
