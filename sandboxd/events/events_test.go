package events

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// fakeSource panics where a test does not expect a call.
type fakeSource struct {
	denials  func(ctx context.Context, fn func(Denial)) error
	drain    func(ctx context.Context) error
	attempts func() (Attempts, error)
	floods   func() ([]Flood, error)
	lost     func() (uint64, error)
	unsaid   func() (uint64, error)
}

func (f fakeSource) Denials(ctx context.Context, fn func(Denial)) error { return f.denials(ctx, fn) }
func (f fakeSource) Drain(ctx context.Context) error                    { return f.drain(ctx) }
func (f fakeSource) Attempts() (Attempts, error)                        { return f.attempts() }
func (f fakeSource) Floods() ([]Flood, error)                           { return f.floods() }
func (f fakeSource) Lost() (uint64, error)                              { return f.lost() }
func (f fakeSource) Unsaid() (uint64, error)                            { return f.unsaid() }

type sessionsFunc func(mark uint32) (kid, id, card string, ok bool)

func (f sessionsFunc) SessionOf(mark uint32) (kid, id, card string, ok bool) { return f(mark) }

type records struct {
	mu  sync.Mutex
	all []audit.Record
}

func (r *records) Log(rec audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, rec)
}

type nullMetrics struct{}

func (nullMetrics) Denied(reason.Code, uint64) {}
func (nullMetrics) DenialsLost(uint64)         {}

// run feeds the denials to a reader and returns what it recorded once it has ended.
func run(t *testing.T, cursor string, lost uint64, denials ...Denial) []audit.Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var out records
	r := New(Config{
		Cursor: cursor, Audit: &out, Metrics: nullMetrics{}, Log: slog.New(slog.DiscardHandler),
		Source: fakeSource{
			denials: func(_ context.Context, fn func(Denial)) error {
				for _, d := range denials {
					fn(d)
				}
				return nil
			},
			attempts: func() (Attempts, error) { return nil, nil },
			lost:     func() (uint64, error) { return lost, nil },
			unsaid:   func() (uint64, error) { return 0, nil },
		},
		Sessions: sessionsFunc(func(mark uint32) (string, string, string, bool) { return "calm-otter", "01S", "practice", mark == 7 }),
	})
	if err := r.Run(ctx); err != nil {
		t.Fatal(err)
	}
	return out.all
}

func TestDenialBecomesARecord(t *testing.T) {
	dst := netip.MustParseAddrPort("1.1.1.1:853")
	got := run(t, filepath.Join(t.TempDir(), "c"), 0, Denial{Mark: 7, PID: os.Getpid(), Comm: "curl", Hook: "connect4", Reason: reason.DoT, Family: "ipv4", Proto: 6, Dst: dst})
	if len(got) != 1 {
		t.Fatalf("%d records, want 1", len(got))
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := got[0]
	if r.Event != audit.EventConnectDenied || r.Outcome != audit.OutcomeDeny || r.Reason != reason.DoT || r.Kid != "calm-otter" || r.Session != "01S" {
		t.Errorf("record %+v", r)
	}
	if r.Process == nil || r.Process.Comm != "curl" || r.Process.Exe != self || r.Process.PID != os.Getpid() {
		t.Errorf("process %+v, want curl in %s", r.Process, self)
	}
	if r.Dst == nil || r.Dst.Addr != dst.Addr() || r.Dst.Port != 853 || r.Dst.Proto != "tcp" {
		t.Errorf("destination %+v", r.Dst)
	}
}

func TestFloodKeepsCount(t *testing.T) {
	var flood []Denial
	for i := range 5000 {
		flood = append(flood, Denial{Mark: 7, PID: 1 << 30, Hook: "connect4", Reason: reason.RawAddress, Proto: 6,
			Dst: netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(i))})
	}
	got := run(t, filepath.Join(t.TempDir(), "c"), 0, flood...)
	total := uint64(0)
	for _, r := range got {
		total += max(r.Count, 1)
	}
	if total != 5000 {
		t.Errorf("the records stand for %d denials, want 5000", total)
	}
	if len(got) > 2*linesPerWindow+10 {
		t.Errorf("%d records for one burst", len(got))
	}
}

func TestLossLeavesAGapAlsoAcrossARestart(t *testing.T) {
	cursor := filepath.Join(t.TempDir(), "cursor")
	for i, step := range []struct{ lost, gap uint64 }{{3, 3}, {3, 0}, {10, 7}, {2, 2}} {
		gap := uint64(0)
		for _, r := range run(t, cursor, step.lost) {
			if r.Event == audit.EventGap {
				gap += r.Count
			}
		}
		if gap != step.gap {
			t.Errorf("step %d: gap of %d, want %d", i, gap, step.gap)
		}
	}
}
