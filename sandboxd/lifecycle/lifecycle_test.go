package lifecycle

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"tagout/internal/wire"
)

// TestEveryWayOut walks every pair of states: exactly what the table allows happens, and nothing else changes.
func TestEveryWayOut(t *testing.T) {
	for _, from := range States() {
		for _, to := range States() {
			s := State{now: from, cause: "before"}
			err := s.EnterFor(to, "after")
			switch {
			case from == to:
				if err != nil || s.Cause() != "before" {
					t.Errorf("%s to itself: %v, cause %q", from, err, s.Cause())
				}
			case slices.Contains(Next(from), to):
				if err != nil || s.Now() != to || s.Cause() != "after" {
					t.Errorf("%s to %s: %v, it is %s for %q", from, to, err, s.Now(), s.Cause())
				}
			default:
				var refused *Refused
				if !errors.As(err, &refused) || s.Now() != from || s.Cause() != "before" {
					t.Errorf("%s to %s: %v, it is %s for %q", from, to, err, s.Now(), s.Cause())
				}
			}
		}
	}
}

// TestPromises are what the table is for, whatever else is added to it.
func TestPromises(t *testing.T) {
	for _, s := range States() {
		if s != wire.KidDestroying && !slices.Contains(Next(s), wire.KidDestroying) {
			t.Errorf("a kid that is %s cannot be destroyed", s)
		}
		if slices.Contains(Next(s), wire.KidSpawning) {
			t.Errorf("a kid that is %s is made again", s)
		}
	}
	dead := []wire.KidState{wire.KidExited, wire.KidOOM, wire.KidStopped, wire.KidDestroying}
	for _, s := range dead {
		for _, to := range Next(s) {
			if !slices.Contains(dead, to) {
				t.Errorf("a kid that is %s becomes %s: nothing restarts by itself", s, to)
			}
		}
	}
}

// TestRandomLives: whatever is tried in whatever order, a kid that was stopped or is dead never runs again.
func TestRandomLives(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 7))
		s, over := New(), false
		for range 20 {
			if r.IntN(6) == 0 {
				s.Stop()
				over = true
			} else {
				s.Enter(States()[r.IntN(len(States()))]) // often refused
			}
			over = over || !s.Alive() && !s.Is(wire.KidSpawning)
			if over && s.Alive() {
				t.Fatalf("seed %d: the kid is %s again", seed, s.Now())
			}
		}
	}
}

func TestStop(t *testing.T) {
	for _, from := range States() {
		s := State{now: from}
		want := wire.KidStopped
		if from == wire.KidDestroying || from == wire.KidOOM {
			want = from
		}
		if !s.Stop() || s.Stop() || !s.Stopped() || s.Now() != want {
			t.Errorf("a stop of a kid that is %s makes it %s, stopped %v", from, s.Now(), s.Stopped())
		}
	}
}

// TestTheDocumentedTable: docs/kids.md shows these transitions, all of them.
func TestTheDocumentedTable(t *testing.T) {
	raw, err := os.ReadFile("../../docs/kids.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range States() {
		var to []string
		for _, n := range Next(s) {
			to = append(to, string(n))
		}
		if s == wire.KidDestroying {
			to = []string{"(gone)"}
		}
		row := fmt.Sprintf("| `%s` | %s |", s, strings.Join(to, ", "))
		if !strings.Contains(string(raw), row) {
			t.Errorf("docs/kids.md lacks the row %s", row)
		}
	}
}
