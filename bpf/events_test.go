package bpf

import (
	"testing"

	"tagout/internal/reason"
)

// A full ring loses events and nothing else: every denial is counted, every lost event too.
func TestFullRingLosesNoNumber(t *testing.T) {
	b := newBench(t, nil)
	frame := packet{dst: tWorld, proto: tcp, dport: 80}.fromKid().bytes()
	const flood = 20000 // more than the ring holds, and nobody reads
	for range flood {
		if b.run(t, tagoutProgTagoutKidUp, frame) {
			t.Fatal("a denied packet passed while the ring was full")
		}
	}
	c, err := b.maps.Counters(tMark)
	must(t, err)
	lost, err := b.maps.Lost()
	must(t, err)
	if c.Denied[reason.RawAddress] != flood || c.Kid.DroppedUp.Packets != flood {
		t.Errorf("%d denials and %d dropped packets counted, want %d", c.Denied[reason.RawAddress], c.Kid.DroppedUp.Packets, flood)
	}
	if lost == 0 || lost != c.Unsaid {
		t.Errorf("%d events lost, %d unsaid", lost, c.Unsaid)
	}
	events := follow(t, b.maps)
	for range flood - lost {
		next(t, events)
	}
	if len(events) != 0 {
		t.Errorf("%d events more than denials less lost ones", len(events))
	}
	b.run(t, tagoutProgTagoutKidUp, frame) // room again
	if e := next(t, events); e.Reason != reason.RawAddress || e.Dst != at(tWorld, 80) {
		t.Errorf("event %+v", e)
	}
}

// One kid's flood must not take the other kids' events away.
func TestBudgetOfASession(t *testing.T) {
	b := newBench(t, func(c *constants) { c.budget = 10 })
	frame := packet{dst: tWorld, proto: tcp, dport: 80}.fromKid().bytes()
	const flood = 500
	for range flood {
		b.run(t, tagoutProgTagoutKidUp, frame)
	}
	must(t, b.maps.DeleteKid(rootCgroup, 1)) // the next packet is nobody's: another budget
	b.run(t, tagoutProgTagoutKidUp, frame)
	lost, err := b.maps.Lost()
	must(t, err)
	c, err := b.maps.Counters(tMark)
	must(t, err)
	if c.Denied[reason.RawAddress] != flood || lost != c.Unsaid || lost < flood-20 {
		t.Errorf("%d denials, %d unsaid, %d lost", c.Denied[reason.RawAddress], c.Unsaid, lost)
	}
	events := follow(t, b.maps)
	for range flood - lost {
		if e := next(t, events); e.Mark != tMark {
			t.Errorf("event %+v", e)
		}
	}
	if e := next(t, events); e.Mark != 0 || e.Reason != reason.UnknownSession {
		t.Errorf("the other's event is %+v", e)
	}
}

// What a link says by itself is dropped and counted, but is nobody's attempt.
func TestHousekeepingMakesNoEvent(t *testing.T) {
	b := newBench(t, nil)
	mld := packet{src: addr("fe80::1"), dst: addr("ff02::16"), proto: 0}
	if got := b.judge(t, tagoutProgTagoutLinkUp, mld.bytes()); got != reason.IPv6 {
		t.Errorf("MLD: %v", got)
	}
	b.run(t, tagoutProgTagoutLinkUp, packet{dst: tWorld, proto: tcp, dport: 80}.fromKid().bytes())
	if e := next(t, follow(t, b.maps)); e.Dst != at(tWorld, 80) {
		t.Errorf("first event is %+v", e)
	}
	if lost, err := b.maps.Lost(); err != nil || lost != 0 {
		t.Errorf("%d lost, %v", lost, err)
	}
}

func TestDecodeRefusesShortSamples(t *testing.T) {
	if _, err := decode(make([]byte, 10)); err == nil {
		t.Error("a short sample was taken")
	}
}
