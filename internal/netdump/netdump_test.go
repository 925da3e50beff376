package netdump

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// interrupted is a dump that is interrupted n times, each time with a list that lacks something, and then whole.
func interrupted(n int) (dump func() ([]string, error), calls *int) {
	calls = new(int)
	return func() ([]string, error) {
		if *calls++; *calls <= n {
			return []string{"a"}, netlink.ErrDumpInterrupted
		}
		return []string{"a", "b"}, nil
	}, calls
}

func TestWhole(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 1, 7, attempts - 1} {
		dump, calls := interrupted(n)
		if got, err := Whole(dump); err != nil || !slices.Equal(got, []string{"a", "b"}) || *calls != n+1 {
			t.Errorf("interrupted %d times: %v, %v after %d calls", n, got, err, *calls)
		}
	}
}

// TestNeverHalf: a list that was never whole is not handed out, and the error says what to do.
func TestNeverHalf(t *testing.T) {
	t.Parallel()
	dump, calls := interrupted(attempts)
	got, err := Whole(dump)
	if got != nil || !errors.Is(err, netlink.ErrDumpInterrupted) || *calls != attempts {
		t.Fatalf("%v, %v after %d calls", got, err, *calls)
	}
	if !strings.Contains(err.Error(), "ip monitor link") {
		t.Errorf("the error does not say how to find the cause: %v", err)
	}
}

// TestOtherErrorsAreNotRetried, nor are they mended by what came with them.
func TestOtherErrorsAreNotRetried(t *testing.T) {
	t.Parallel()
	calls := 0
	got, err := Whole(func() ([]string, error) { calls++; return []string{"a"}, unix.EPERM })
	if got != nil || err != unix.EPERM || calls != 1 {
		t.Errorf("%v, %v after %d calls", got, err, calls)
	}
}
