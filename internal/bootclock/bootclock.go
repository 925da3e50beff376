// Package bootclock reads the clock that deadlines follow: CLOCK_BOOTTIME, which nobody can set, which goes on
// while the machine sleeps and which starts again at each boot.
package bootclock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the time since boot.
func Now() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("reading CLOCK_BOOTTIME: " + err.Error()) // never refused on Linux
	}
	return time.Duration(ts.Nano())
}
