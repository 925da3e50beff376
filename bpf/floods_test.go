package bpf

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/reason"
)

// takeFloods sums the floods by destination port.
func (b *bench) takeFloods(t *testing.T) (byPort map[uint16]uint64, sum uint64) {
	t.Helper()
	floods, err := b.maps.TakeFloods()
	must(t, err)
	byPort = map[uint16]uint64{}
	for _, f := range floods {
		if f.Mark != tMark || f.Reason != reason.RawAddress || f.Dst.Addr() != tWorld || f.Proto != tcp || f.Hook != HookKidEgress {
			t.Errorf("flood %+v", f)
		}
		byPort[f.Dst.Port()] += f.Count
		sum += f.Count
	}
	return byPort, sum
}

// Denials that have no event, whatever the cause, keep their destination and their number.
func TestFloodsAreCountedByDestination(t *testing.T) {
	for name, budget := range map[string]uint32{"over the budget": 10, "ring full": 1 << 31} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, func(c *constants) { c.budget = budget })
			const each = 9000 // twice this is more than the ring holds, and nobody reads
			for _, port := range []uint16{80, 8080} {
				frame := packet{dst: tWorld, proto: tcp, dport: port}.fromKid().bytes()
				for range each {
					b.run(t, tagoutProgTagoutKidUp, frame)
				}
			}
			lost, err := b.maps.Lost()
			must(t, err)
			byPort, sum := b.takeFloods(t)
			if lost == 0 || sum != lost || byPort[8080] == 0 {
				t.Errorf("floods of %v, %d in all, for %d denials without an event", byPort, sum, lost)
			}
			if _, again := b.takeFloods(t); again != 0 {
				t.Errorf("a second taking gave %d", again)
			}
		})
	}
}

// A flood towards more destinations than the map holds loses destinations and not the number.
func TestFloodOfDestinationsIsBounded(t *testing.T) {
	b := newBench(t, func(c *constants) { c.budget = 10 })
	const flood = 20000
	for i := range flood {
		b.run(t, tagoutProgTagoutKidUp, packet{dst: tWorld, proto: tcp, dport: uint16(1024 + i)}.fromKid().bytes())
	}
	byPort, sum := b.takeFloods(t)
	attempts, err := b.maps.Attempts()
	must(t, err)
	if n := attempts[tMark][reason.RawAddress]; n != flood {
		t.Errorf("%d attempts, want %d", n, flood)
	}
	if len(byPort) > 8192 || sum == 0 || sum >= flood {
		t.Errorf("%d destinations with %d denials", len(byPort), sum)
	}
}

func TestHousekeepingIsNoAttempt(t *testing.T) {
	b := newBench(t, nil)
	mld := packet{src: addr("fe80::1"), dst: addr("ff02::16"), proto: 0}
	b.run(t, tagoutProgTagoutLinkUp, mld.bytes())
	b.run(t, tagoutProgTagoutLinkUp, packet{dst: tWorld, proto: tcp, dport: 80}.fromKid().bytes())
	attempts, err := b.maps.Attempts()
	must(t, err)
	c, err := b.maps.Counters(tMark)
	must(t, err)
	if c.Denied[reason.IPv6] != 1 || c.Quiet[reason.IPv6] != 1 || len(attempts[tMark]) != 1 || attempts[tMark][reason.RawAddress] != 1 {
		t.Errorf("denied %v, quiet %v, attempts %v", c.Denied, c.Quiet, attempts[tMark])
	}
	if _, sum := b.takeFloods(t); sum != 0 {
		t.Errorf("housekeeping made a flood of %d", sum)
	}
}

// After Drain every event from before it was handed over, while others keep coming.
func TestDrainLeavesNothingBehind(t *testing.T) {
	b := newBench(t, func(c *constants) { c.budget = 1 << 31 })
	if err := b.maps.Drain(t.Context()); !errors.Is(err, ErrNoReader) {
		t.Errorf("without a reader: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var got atomic.Uint64
	done := make(chan error, 1)
	go func() { done <- b.maps.Events(ctx, func(Event) { got.Add(1) }) }()
	frame := packet{dst: tWorld, proto: tcp, dport: 80}.fromKid().bytes()
	drain := func() error {
		limit, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		return b.maps.Drain(limit)
	}
	eventually(t, "somebody to read", func() bool { return drain() == nil })
	for round := range uint64(200) {
		for range 10 {
			b.run(t, tagoutProgTagoutKidUp, frame)
		}
		must(t, drain())
		if n := got.Load(); n != 10*(round+1) {
			t.Fatalf("after round %d %d events were handed over", round, n)
		}
	}
	cancel()
	must(t, <-done)
	if err := drain(); !errors.Is(err, ErrNoReader) {
		t.Errorf("after the reader's end: %v", err)
	}
}
