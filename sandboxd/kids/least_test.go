package kids

import (
	"testing"

	"tagout/internal/card"
)

// leastCard gives a kid the least of everything that a card can give.
const leastCard = `apiVersion: tagout/v1
kind: Card
name: least
task: Live on little.
image: host
limits: {pids: 16, memory: 16MiB, cpus: 0.05, openFiles: 64, diskRate: 1MiB}
stop: {authority: Whoever calls it, maxTime: 10s}
`

// TestTheLeastThatACardGivesIsEnough (K17): what a card may say makes a kid that works, and what does not is refused with a
// reason and leaves nothing, cgroups neither. That the card's limits end there is tested with the cards.
func TestTheLeastThatACardGivesIsEnough(t *testing.T) {
	c, err := card.Parse("least.yaml", []byte(leastCard))
	if err != nil {
		t.Fatal(err)
	}
	b := newBox(t, "tsbleast")
	p := plan()
	p.Limits.PIDs, p.Limits.Memory, p.Limits.CPUs, p.Limits.OpenFiles = c.Limits.PIDs, c.Limits.Memory, c.Limits.CPUs, c.Limits.OpenFiles
	p.Limits.DiskRate = c.Limits.DiskRate
	b.spawn("k1", p)
	for range 5 {
		if r := b.sh("k1", "cat /proc/self/status | grep -c Uid; echo well"); r.stdout.String() != "1\nwell\n" {
			t.Errorf("a command: %q %q %+v", r.stdout.String(), r.stderr.String(), r.exit)
		}
	}
	if err := b.Destroy(t.Context(), "k1", "test", "done"); err != nil {
		t.Fatal(err)
	}
	b.wantNothingLeft()
	p.Limits.PIDs = 8 // no card gives so little, and this is why
	b.spawn("k1", p)
	if r := b.sh("k1", "cat /proc/self/status | grep -c Uid"); r.exit.Code == 0 {
		t.Errorf("with half of that: %q %+v: the card's least could be less", r.stdout.String(), r.exit)
	}
	if err := b.Destroy(t.Context(), "k1", "test", "done"); err != nil {
		t.Fatal(err)
	}
	p.Limits.Memory = 1 << 20
	if k, err := b.Spawn(t.Context(), Request{Name: "k1", Purpose: "test", Plan: p}); err == nil {
		t.Errorf("a kid that can do nothing: %+v", k)
	}
	b.wantNothingLeft()
}
