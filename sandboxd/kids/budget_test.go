package kids

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"tagout/internal/wire"
)

func TestBudget(t *testing.T) {
	b := newBox(t, "tsbbudget")
	b.cfg.Budget = Budget{Box: 3, Owner: 2}
	ada, grace := plan(), plan()
	ada.Owner, grace.Owner = "Ada", "Grace"
	first := b.spawn("k1", ada)
	second := b.spawn("k2", ada)
	if len(first.SameCard) != 0 || !slices.Equal(second.SameCard, []string{"k1"}) {
		t.Errorf("the first hears of %v, the second of %v", first.SameCard, second.SameCard)
	}
	refused := func(p Plan, want string) {
		t.Helper()
		if _, err := b.Spawn(t.Context(), Request{Name: "k9", Plan: p}); KindOf(err) != Capacity || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want it refused with %q", err, want)
		}
	}
	refused(ada, "Ada has 2 kids")
	b.spawn("k3", grace)
	refused(grace, "there are 3 kids")
	proof := ada
	proof.Proof = true
	if _, err := b.SpawnProof(t.Context(), "test", proof); err != nil {
		t.Errorf("a proof on a full box: %v", err)
	}
	refused(grace, "there are 3 kids")
	if err := b.Destroy(t.Context(), "k1", "test", "room"); err != nil {
		t.Fatal(err)
	}
	b.spawn("k4", ada) // and its place is free again
	refused(grace, "there are 3 kids")
	b.cfg.Budget = Budget{}
	b.spawn("k9", ada) // control: it is the budget that refuses
}

// TestConcurrentSpawns is K11: 20 at once, two of them with one name. Nobody shares anything with anybody.
func TestConcurrentSpawns(t *testing.T) {
	b := newBox(t, "tsbmany")
	b.cfg.Budget = Budget{Box: 19}
	const n = 20
	kids, errs := make([]wire.Kid, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		name := fmt.Sprintf("k%d", i)
		if i < 2 {
			name = "same"
		}
		wg.Go(func() {
			kids[i], errs[i] = b.Spawn(context.WithoutCancel(t.Context()), Request{Name: name, Purpose: "test", Plan: plan()})
		})
	}
	wg.Wait()
	seen := map[string]string{}
	for i, k := range kids {
		if errs[i] != nil {
			continue
		}
		for _, own := range []string{k.Name, k.Session, k.Cgroup, fmt.Sprint(k.Mark), k.Addr.String()} {
			if other := seen[own]; other != "" {
				t.Errorf("%s and %s share %s", k.Name, other, own)
			}
			seen[own] = k.Name
		}
	}
	if (errs[0] == nil) == (errs[1] == nil) {
		t.Errorf("of one name: %v and %v, want one to win", errs[0], errs[1])
	}
	for i, err := range errs {
		if err != nil && (i > 1 || KindOf(err) != Conflict || !strings.Contains(err.Error(), "the name same is taken")) {
			t.Errorf("spawn %d: %v", i, err)
		}
	}
	b.guards.mu.Lock()
	b.guards.asked, b.guards.calls = 0, nil
	b.guards.mu.Unlock()
	if list := b.List(t.Context()); len(list) != n-1 {
		t.Errorf("%d kids, want %d", len(list), n-1)
	}
	b.guards.mu.Lock()
	defer b.guards.mu.Unlock()
	if b.guards.asked != 1 || slices.Contains(b.guards.calls, "stopped") {
		t.Errorf("for one list the kernel was asked %d times for all, and once for each kid: %v", b.guards.asked, b.guards.calls)
	}
}

// TestEightOfOneCard is K15: what has to differ between kids of one card does.
func TestEightOfOneCard(t *testing.T) {
	b := newBox(t, "tsbeight")
	const script = `od -An -tx1 -N16 /dev/urandom | tr -d ' '; cat /proc/sys/kernel/random/uuid; cat /etc/machine-id; cat /proc/sys/kernel/hostname; hostname`
	seen := map[string]string{}
	for range 8 {
		k := b.spawn("", plan())
		r := b.sh(k.Name, script)
		lines := strings.Fields(r.stdout.String())
		if len(lines) != 5 {
			t.Fatalf("%s: %q %q", k.Name, r.stdout.String(), r.stderr.String())
		}
		if len(lines[0]) != 32 || len(lines[1]) != 36 || len(lines[2]) != 32 || lines[3] != k.Name || lines[4] != k.Name {
			t.Errorf("%s reads %q", k.Name, lines)
		}
		for _, word := range lines[:4] {
			if other := seen[word]; other != "" {
				t.Errorf("%s reads %s, and so did %s", k.Name, word, other)
			}
			seen[word] = k.Name
		}
	}
}
