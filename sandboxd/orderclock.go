package sandboxd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"tagout/internal/atomicfile"
	"tagout/internal/authority"
	"tagout/internal/bootclock"
	"tagout/internal/reason"
)

// orderClock tells the time by which approvals of the machine's network are judged. It is the wall clock, but never earlier
// than the wall clock once was plus the time that has passed since by the boot clock: setting the clock back lets no approval
// live longer, not across a restart of sandboxd either. A clock that was wrongly ahead and was put right stays ahead here
// until the next boot, and approvals are refused as expired until then: that fails closed, and nothing else asks this clock.
type orderClock struct {
	file string // on a file system that a boot empties, or else with another boot's name in it
	boot string // this boot's name
	wall func() time.Time
	now  func() time.Duration // CLOCK_BOOTTIME

	mu   sync.Mutex
	seen anchor // guarded by mu
	err  error  // why no time can be told; guarded by mu
}

// anchor is what the wall clock said at a moment of the boot clock.
type anchor struct {
	Boot string        `json:"boot_id"`
	Wall time.Time     `json:"wall"`
	At   time.Duration `json:"boot_ns"`
}

// stepped is how far the wall clock may run ahead of the boot clock before the difference is kept.
const stepped = time.Second

// newOrderClock goes on from what a predecessor kept in file.
func newOrderClock(file string) *orderClock {
	c := &orderClock{file: file, wall: time.Now, now: bootclock.Now}
	if c.boot, c.err = bootclock.Boot(); c.err == nil {
		c.err = c.open()
	}
	return c
}

func (c *orderClock) open() error {
	if err := atomicfile.Sweep(c.file); err != nil {
		return err
	}
	raw, err := os.ReadFile(c.file)
	if errors.Is(err, fs.ErrNotExist) {
		return c.keep()
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, &c.seen); err != nil {
		return fmt.Errorf("%s: %w: remove it when the clock is right", c.file, err)
	}
	if c.seen.Boot != c.boot {
		return c.keep()
	}
	return nil
}

// keep notes what the wall clock says.
func (c *orderClock) keep() error {
	c.seen = anchor{Boot: c.boot, Wall: c.wall().UTC().Round(0), At: c.now()} // without Go's own monotonic reading
	raw, err := json.Marshal(c.seen)
	if err != nil {
		return err
	}
	return atomicfile.Write(c.file, raw, 0o600, -1, -1)
}

// Now returns the time. The error is an *authority.Refusal: without a time nothing is approved.
func (c *orderClock) Now() (time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wall, passed := c.wall(), c.seen.Wall.Add(c.now()-c.seen.At)
	if c.err == nil && wall.After(passed.Add(stepped)) {
		c.err = c.keep()
	}
	if c.err != nil {
		return time.Time{}, &authority.Refusal{Code: reason.OrderNotKept, Text: fmt.Sprintf("nothing is approved, because how late it is cannot be kept: %v: put that right and restart sandboxd", c.err)}
	}
	if passed.After(wall) {
		return passed, nil
	}
	return wall, nil
}
