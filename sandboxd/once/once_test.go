package once

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func open(t *testing.T, dir string, now func() time.Duration) *Store {
	t.Helper()
	s, err := Open(Config{Dir: dir, Wait: 20 * time.Millisecond, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func begin(t *testing.T, s *Store, caller, key, print string) *Ticket {
	t.Helper()
	ticket, answer, err := s.Begin(t.Context(), caller, key, print, false)
	if err != nil || answer != nil {
		t.Fatalf("beginning %s %s: answer %v, %v", caller, key, answer, err)
	}
	return ticket
}

// TestARepeatGetsTheSameAnswer, also from another process, until its time is over (K12).
func TestARepeatGetsTheSameAnswer(t *testing.T) {
	now := time.Hour
	clock := func() time.Duration { return now }
	dir := t.TempDir()
	s := open(t, dir, clock)
	if err := begin(t, s, "a", "k", "p").Keep(Answer{Status: 200, Body: []byte("kid")}); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*Store{s, open(t, dir, clock)} {
		if _, a, err := s.Begin(t.Context(), "a", "k", "p", false); err != nil || a == nil || string(a.Body) != "kid" || a.Status != 200 {
			t.Errorf("repeat: %+v %v", a, err)
		}
		if _, _, err := s.Begin(t.Context(), "a", "k", "other", false); !errors.Is(err, ErrOther) {
			t.Errorf("the key with another request: %v", err)
		}
	}
	begin(t, s, "b", "k", "other").Forget() // a key is the caller's own
	now += Keep
	if _, a, _ := s.Begin(t.Context(), "a", "k", "p", false); a == nil {
		t.Error("forgotten too early")
	}
	now++
	begin(t, s, "a", "k", "other").Forget()
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// TestOnlyOneIsCarriedOut of fifty at once; the others wait for its answer.
func TestOnlyOneIsCarriedOut(t *testing.T) {
	s, err := Open(Config{Dir: t.TempDir(), Wait: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	var tickets, answers atomic.Int32
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			ticket, a, err := s.Begin(context.Background(), "a", "k", "p", false)
			switch {
			case err != nil:
				t.Error(err)
			case ticket != nil:
				tickets.Add(1)
				if err := ticket.Keep(Answer{Status: 201}); err != nil {
					t.Error(err)
				}
			case a.Status == 201:
				answers.Add(1)
			}
		})
	}
	wg.Wait()
	if tickets.Load() != 1 || answers.Load() != 49 {
		t.Errorf("%d carried out, %d answered", tickets.Load(), answers.Load())
	}
}

// TestWhatIsNotKnownIsSaid: while it runs, after the process died over it, where the file is torn.
func TestWhatIsNotKnownIsSaid(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, nil)
	ticket := begin(t, s, "a", "k", "p")
	if _, _, err := s.Begin(t.Context(), "a", "k", "p", false); !errors.Is(err, ErrBusy) {
		t.Errorf("while it runs: %v", err)
	}
	died := open(t, dir, nil)
	if _, _, err := died.Begin(t.Context(), "a", "k", "p", false); !errors.Is(err, ErrUnknown) {
		t.Errorf("after it died: %v", err)
	}
	if r, _, err := died.Begin(t.Context(), "a", "k", "p", true); err != nil || !r.Resumed || r.ID != ticket.ID {
		t.Errorf("resuming: %+v %v", r, err)
	}
	if _, _, err := died.Begin(t.Context(), "a", "k", "other", true); !errors.Is(err, ErrOther) {
		t.Errorf("another request: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, ticket.ID+".json"), []byte(`{"version":1,"ca`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, ".new-1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := open(t, dir, nil).Begin(t.Context(), "a", "k", "p", false); !errors.Is(err, ErrUnknown) {
		t.Errorf("a torn file: %v", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
}

func TestALongAnswerIsSaidToBeLost(t *testing.T) {
	s := open(t, t.TempDir(), nil)
	if err := begin(t, s, "a", "k", "p").Keep(Answer{Status: 200, Body: make([]byte, MaxBody+1)}); err != nil {
		t.Fatal(err)
	}
	if _, a, err := s.Begin(t.Context(), "a", "k", "p", false); err != nil || !a.Lost || a.Body != nil {
		t.Errorf("%+v %v", a, err)
	}
}

func TestNoCallerTakesAllKeys(t *testing.T) {
	s := open(t, t.TempDir(), nil)
	for i := range maxCaller {
		s.entries[fmt.Sprint(i)] = &entry{caller: "a", done: true, began: s.cfg.Now()}
	}
	if _, _, err := s.Begin(t.Context(), "a", "k", "p", false); !errors.Is(err, ErrFull) {
		t.Errorf("one key too many: %v", err)
	}
	begin(t, s, "b", "k", "p").Forget()
}

func TestOddKeysAreRefused(t *testing.T) {
	s := open(t, t.TempDir(), nil)
	for _, key := range []string{"", "a\nb", "é", string(make([]byte, MaxKey+1))} {
		if _, _, err := s.Begin(t.Context(), "a", key, "p", false); !errors.Is(err, ErrKey) {
			t.Errorf("key %q: %v", key, err)
		}
	}
}

// TestADiskThatRefusesStopsTheRequest: what could not be remembered is not carried out.
func TestADiskThatRefusesStopsTheRequest(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, nil)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if ticket, _, err := s.Begin(t.Context(), "a", "k", "p", false); err == nil || ticket != nil {
		t.Errorf("carried out: %v", err)
	}
}
