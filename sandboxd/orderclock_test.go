package sandboxd

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tagout/internal/authority"
	"tagout/internal/reason"
)

// clocks are both clocks of a machine, as a test sets them.
type clocks struct {
	wall time.Time
	boot time.Duration
}

func (c *clocks) pass(d time.Duration) { c.wall, c.boot = c.wall.Add(d), c.boot+d }

// open is a sandboxd that starts.
func (c *clocks) open(t *testing.T, file, boot string) *orderClock {
	t.Helper()
	o := &orderClock{file: file, boot: boot, wall: func() time.Time { return c.wall }, now: func() time.Duration { return c.boot }}
	o.err = o.open()
	return o
}

func tells(t *testing.T, what string, c *orderClock, want time.Time) {
	t.Helper()
	if got, err := c.Now(); err != nil || !got.Equal(want) {
		t.Errorf("%s: %v, %v, want %v", what, got, err, want)
	}
}

// TestNoStepOfTheClockMakesAnApprovalLiveLonger, back or forth, over restarts.
func TestNoStepOfTheClockMakesAnApprovalLiveLonger(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "clock")
	noon := time.Date(2031, 5, 4, 12, 0, 0, 0, time.UTC)
	m := &clocks{wall: noon, boot: time.Hour}
	c := m.open(t, file, "boot1")
	tells(t, "at first", c, noon)
	m.pass(3 * time.Minute)
	tells(t, "later", c, noon.Add(3*time.Minute))
	m.wall = noon // set back, as if the approval of noon were new
	tells(t, "set back", c, noon.Add(3*time.Minute))
	m.pass(time.Minute)
	tells(t, "set back, a minute later", c, noon.Add(4*time.Minute))
	tells(t, "set back, after a restart", m.open(t, file, "boot1"), noon.Add(4*time.Minute))
	m.wall = noon.Add(time.Hour) // set forward: what was good until then is over
	tells(t, "set forward", c, noon.Add(time.Hour))
	m.wall = noon
	tells(t, "and back", c, noon.Add(time.Hour))
	tells(t, "and back, after a restart", m.open(t, file, "boot1"), noon.Add(time.Hour))
	tells(t, "another boot", m.open(t, file, "boot2"), noon)
	// The control: the wall clock alone would call an approval of noon fresh.
	if !m.wall.Before(noon.Add(authority.HostLife)) {
		t.Error("the clock was not set back: the test shows nothing")
	}
}

// TestAClockThatCannotBeKeptApprovesNothing.
func TestAClockThatCannotBeKeptApprovesNothing(t *testing.T) {
	t.Parallel()
	m := &clocks{wall: time.Date(2031, 5, 4, 12, 0, 0, 0, time.UTC), boot: time.Hour}
	broken := filepath.Join(t.TempDir(), "clock")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	gone := filepath.Join(t.TempDir(), "nowhere", "clock")
	for name, file := range map[string]string{"a file that cannot be read": broken, "no place to write": gone} {
		_, err := m.open(t, file, "boot1").Now()
		var no *authority.Refusal
		if !errors.As(err, &no) || no.Code != reason.OrderNotKept {
			t.Errorf("%s: %v", name, err)
		}
	}
	later := m.open(t, filepath.Join(t.TempDir(), "clock"), "boot1")
	later.file = gone
	m.wall = m.wall.Add(time.Hour)
	if _, err := later.Now(); err == nil {
		t.Error("a step forward that cannot be kept: a time was told")
	}
}
