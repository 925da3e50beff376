package events

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// fakeKernel denies as the programs do: it counts, then hands over, or keeps a destination, or only counts.
type fakeKernel struct {
	mu       sync.Mutex
	attempts Attempts // guarded by mu
	ring     []Denial // guarded by mu
	floods   []Flood  // guarded by mu
	unsaid   uint64   // guarded by mu
	unread   bool     // nobody reads; guarded by mu
	fn       func(Denial)
}

func (k *fakeKernel) deny(d Denial, how int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.attempts[d.Mark][d.Reason]++
	if how > 0 {
		k.unsaid++
	}
	switch how {
	case 0:
		k.ring = append(k.ring, d)
	case 1:
		k.floods = append(k.floods, Flood{Denial: d, Count: 1})
	}
}

func (k *fakeKernel) source() fakeSource {
	return fakeSource{
		drain: func(context.Context) error {
			k.mu.Lock()
			ring, unread := k.ring, k.unread
			if !unread {
				k.ring = nil
			}
			k.mu.Unlock()
			if unread {
				return errors.New("nobody reads")
			}
			for _, d := range ring {
				k.fn(d)
			}
			return nil
		},
		attempts: func() (Attempts, error) {
			k.mu.Lock()
			defer k.mu.Unlock()
			out := Attempts{}
			for mark, codes := range k.attempts {
				out[mark] = map[reason.Code]uint64{}
				for code, n := range codes {
					out[mark][code] = n
				}
			}
			return out, nil
		},
		lost: func() (uint64, error) { return 0, nil },
		unsaid: func() (uint64, error) {
			k.mu.Lock()
			defer k.mu.Unlock()
			return k.unsaid, nil
		},
		floods: func() ([]Flood, error) {
			k.mu.Lock()
			defer k.mu.Unlock()
			out := k.floods
			k.floods = nil
			return out, nil
		},
	}
}

func newBooks(k *fakeKernel, told string) (*Reader, *records) {
	out := &records{}
	r := New(Config{
		Told: told, Audit: out, Metrics: nullMetrics{}, Log: slog.New(slog.DiscardHandler), Source: k.source(),
		Sessions: sessionsFunc(func(mark uint32) (string, string, string, bool) { return "calm-otter", "01S", "practice", mark == 7 }),
	})
	k.fn = r.note
	return r, out
}

// told sums what the records stand for.
func (r *records) told() Attempts {
	r.mu.Lock()
	defer r.mu.Unlock()
	sum := Attempts{}
	for _, rec := range r.all {
		if sum[rec.Mark] == nil {
			sum[rec.Mark] = map[reason.Code]uint64{}
		}
		sum[rec.Mark][rec.Reason] += max(rec.Count, 1)
	}
	return sum
}

func wantTold(t *testing.T, got, want Attempts) {
	t.Helper()
	for mark, codes := range want {
		for code, n := range codes {
			if got[mark][code] != n {
				t.Errorf("mark %d, %v: records stand for %d, the kernel counted %d", mark, code, got[mark][code], n)
			}
		}
	}
}

func denial(mark uint32, code reason.Code, port uint16) Denial {
	return Denial{Mark: mark, Hook: "connect4", Reason: code, Proto: 6, Family: "ipv4",
		Dst: netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), port)}
}

// TestRecordsAgreeWithTheKernel denies from several CPUs while the reader settles: whatever becomes of an
// event, the records stand for exactly what was counted, by session and reason.
func TestRecordsAgreeWithTheKernel(t *testing.T) {
	k := &fakeKernel{attempts: Attempts{0: {}, 7: {}, 8: {}}}
	r, out := newBooks(k, filepath.Join(t.TempDir(), "none"))
	stop := make(chan struct{})
	var settler, kids sync.WaitGroup
	settler.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, look := range []func(context.Context) error{r.glance, r.settle} {
				if err := look(t.Context()); err != nil {
					t.Error(err)
				}
			}
			over := out.told()
			counted, _ := k.source().attempts()
			for mark, codes := range over {
				for code, n := range codes {
					if n > counted[mark][code] {
						t.Errorf("mark %d, %v: records stand for %d of %d", mark, code, n, counted[mark][code])
						return
					}
				}
			}
		}
	})
	for seed := range uint64(4) {
		kids.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, 1))
			for range 5000 {
				k.deny(denial([]uint32{0, 7, 8}[rnd.IntN(3)], reason.RawAddress+reason.Code(rnd.IntN(3)), uint16(rnd.IntN(100))), rnd.IntN(3))
			}
		})
	}
	kids.Wait()
	close(stop)
	settler.Wait()
	if err := r.settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.tally.Flush()
	wantTold(t, out.told(), k.attempts)
}

func TestFloodNamesItsBiggestDestinations(t *testing.T) {
	k := &fakeKernel{attempts: Attempts{7: {reason.RawAddress: 50_000}}}
	for port := range uint16(400) {
		k.floods = append(k.floods, Flood{Denial: denial(7, reason.RawAddress, port), Count: uint64(port)})
	}
	r, out := newBooks(k, filepath.Join(t.TempDir(), "none"))
	if err := r.settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(out.all) != floodLines+1 {
		t.Fatalf("%d records, want one for each of %d destinations and one for the rest", len(out.all), floodLines)
	}
	if first := out.all[0]; first.Kid != "calm-otter" || first.Dst.Port != 399 || first.Count != 399 || first.Fields["hook"] != "connect4" {
		t.Errorf("first record %+v", first)
	}
	if last := out.all[floodLines]; last.Kid != "calm-otter" || last.Dst != nil || last.Reason != reason.RawAddress || last.Detail == "" {
		t.Errorf("last record %+v", last)
	}
	wantTold(t, out.told(), k.attempts)
	if err := r.settle(t.Context()); err != nil || len(out.all) != floodLines+1 {
		t.Errorf("a second settlement: %v and %d records", err, len(out.all))
	}
}

// TestUnknownMarksAreCountedAsNobodys: the kernel counts a mark without counters under 0.
func TestUnknownMarksAreCountedAsNobodys(t *testing.T) {
	k := &fakeKernel{attempts: Attempts{0: {reason.UnknownSession: 5}}}
	k.ring = []Denial{denial(99, reason.UnknownSession, 1), denial(99, reason.UnknownSession, 2)}
	k.floods = []Flood{{Denial: denial(98, reason.UnknownSession, 3), Count: 2}}
	r, out := newBooks(k, filepath.Join(t.TempDir(), "none"))
	for range 2 {
		if err := r.settle(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	sum := uint64(0)
	for _, codes := range out.told() {
		sum += codes[reason.UnknownSession]
	}
	if sum != 5 {
		t.Errorf("records stand for %d denials, want 5", sum)
	}
}

// TestRestartTellsTheDifference: what a predecessor wrote is not told again, and what it did not write is.
func TestRestartTellsTheDifference(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sandboxd.jsonl")
	log, err := audit.Open(path, "test", "sandboxd")
	if err != nil {
		t.Fatal(err)
	}
	log.Log(audit.Record{Event: audit.EventConnectDenied, Mark: 7, Reason: reason.QUIC})
	log.Log(audit.Record{Event: audit.EventConnectDenied, Mark: 7, Reason: reason.QUIC, Count: 30})
	log.Log(audit.Record{Event: audit.EventConnectDenied, Mark: 7, Reason: reason.RawSocket, Count: 9, Fields: map[string]string{"hook": "seccomp"}}) // not in the kernel's counters
	log.Log(audit.Record{Event: audit.EventConnectDenied, Mark: 6, Reason: reason.QUIC, Count: 5})                                                    // long gone
	log.Log(audit.Record{Event: audit.EventLookup, Mark: 7, Reason: reason.QUIC, Detail: "connect.denied"})
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	k := &fakeKernel{attempts: Attempts{0: {}, 7: {reason.QUIC: 100, reason.DoT: 3, reason.RawSocket: 10}}}
	r, out := newBooks(k, path)
	r.load()
	if err := r.settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantTold(t, out.told(), Attempts{7: {reason.QUIC: 69, reason.DoT: 3, reason.RawSocket: 10}})
}

// TestForgettingTellsEverything: also while nobody reads, and then nothing twice.
func TestForgettingTellsEverything(t *testing.T) {
	for name, unread := range map[string]bool{"read": false, "unread": true} {
		t.Run(name, func(t *testing.T) {
			k := &fakeKernel{attempts: Attempts{0: {}, 7: {}}, unread: unread}
			r, out := newBooks(k, filepath.Join(t.TempDir(), "none"))
			for i := range 30 {
				k.deny(denial(7, reason.RawAddress, uint16(i)), i%3)
			}
			r.Forget(7)
			r.Forget(7) // a withdrawal that failed half-way is repeated
			wantTold(t, out.told(), Attempts{7: {reason.RawAddress: 30}})
			k.mu.Lock()
			delete(k.attempts, 7)
			k.unread = false
			k.mu.Unlock()
			if err := r.settle(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.tally.Flush()
			wantTold(t, out.told(), Attempts{7: {reason.RawAddress: 30}, 0: {reason.RawAddress: 0}})
		})
	}
}

// TestWithoutSettlingNumbersAreLost shows what the settlement is for.
func TestWithoutSettlingNumbersAreLost(t *testing.T) {
	k := &fakeKernel{attempts: Attempts{0: {}, 7: {}}}
	r, out := newBooks(k, filepath.Join(t.TempDir(), "none"))
	for i := range 30 {
		k.deny(denial(7, reason.RawAddress, uint16(i)), i%3)
	}
	if err := k.source().drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.tally.Flush()
	wantTold(t, out.told(), Attempts{7: {reason.RawAddress: 10}})
}
