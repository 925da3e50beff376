package instance

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"tagout/internal/testroot"
)

func TestLockIsForOneAtATime(t *testing.T) {
	testroot.Require(t)
	unlock, err := Lock(t.Context(), "tlocka")
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 3*lockRetry)
	defer cancel()
	if _, err := Lock(short, "tlocka"); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a second lock: %v", err)
	}
	other, err := Lock(t.Context(), "tlockb")
	if err != nil {
		t.Fatalf("another instance's lock: %v", err)
	}
	other()
	got := make(chan error, 1)
	go func() {
		again, err := Lock(t.Context(), "tlocka")
		if err == nil {
			again()
		}
		got <- err
	}()
	unlock()
	select {
	case err := <-got:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("nobody got the lock that was given back")
	}
}

// TestClaimNewIsForOne: of many that want the instance for themselves, one gets it.
func TestClaimNewIsForOne(t *testing.T) {
	testroot.Require(t)
	var mu sync.Mutex
	var won []Instance
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			inst, err := ClaimNew("tclaimnew")
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				won = append(won, inst)
			case !errors.Is(err, ErrExists):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(won) == 0 {
		t.Fatal("nobody got the instance")
	}
	if len(won) != 1 {
		t.Errorf("%d got the instance", len(won))
	}
	if err := won[0].Release(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(won[0].RunDir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("run directory: %v", err)
	}
}

func TestAKilledClaimLeavesNothing(t *testing.T) {
	testroot.Require(t)
	inst, err := ClaimNew("tclaimold")
	if err != nil {
		t.Fatal(err)
	}
	if err := inst.Release(); err != nil {
		t.Fatal(err)
	}
	torn := filepath.Join(slotDir(), ".new-999999999")
	if err := os.WriteFile(torn, []byte("tclai"), 0o600); err != nil {
		t.Fatal(err)
	}
	if inst, err = ClaimNew("tclaimold"); err != nil {
		t.Fatal(err)
	}
	if err := inst.Release(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(torn); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the half-written claim is still there: %v", err)
	}
}
