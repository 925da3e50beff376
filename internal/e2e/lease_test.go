package e2e

import (
	"fmt"
	"testing"
	"time"

	"tagout/bpf"
	"tagout/internal/bootclock"
	"tagout/internal/config"
	"tagout/internal/instance"
	"tagout/internal/lease"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// startLeased is start with other terms of the leases; zero: the default.
func startLeased(t *testing.T, terms lease.Terms) *testenv.Box {
	t.Helper()
	box := testenv.StartWith(t, func(b *config.Box) { b.Leases = terms })
	box.SetSecret(secret, box.Net.Secret(), "api.vendor.test:443")
	return box
}

// uploading starts a kid that sends ticks and bulk data, and returns how many bytes have arrived so far.
func uploading(t *testing.T, box *testenv.Box, tag string) (wire.Kid, func() int64) {
	t.Helper()
	kid := box.Spawn(card, hostile(t, box))
	running(t, box, kid.Name, "/workspace/hostile", "agent", "-parts", "ticks,bulk", "-bulk-rate", "2000000", "-tag", tag)
	arrived := func() int64 {
		var n int64
		for _, s := range box.Net.Sink.Streams(tag) {
			n += s.Bytes
		}
		return n
	}
	box.Until(soon, "bytes arrive", func() error {
		if n := arrived(); n < 1<<20 {
			return fmt.Errorf("%d bytes", n)
		}
		return nil
	})
	return kid, arrived
}

// until waits until a time of the boot clock. What is tested here is what has happened by then.
func until(when time.Duration) {
	for bootclock.Now() < when {
		time.Sleep(time.Until(time.Now().Add(when - bootclock.Now())))
	}
}

// TestAFrozenKillswitchdClosesTheNetwork (S13): within the kernel's lease no byte of a kid passes any more, of an
// established upload neither, with nobody doing anything. When killswitchd goes on, so do the kids.
func TestAFrozenKillswitchdClosesTheNetwork(t *testing.T) {
	t.Parallel()
	const term = 3 * time.Second
	box := startLeased(t, lease.Terms{Kernel: term, Watchdog: lease.WatchdogBound.Most, Absent: lease.AbsentBound.Most})
	kid, arrived := uploading(t, box, "frozen")
	maps, err := bpf.Open(box.Inst.PinDir())
	if err != nil {
		t.Fatal(err)
	}
	defer maps.Close() // a test
	box.Freeze(instance.Killswitchd)
	defer box.Thaw(instance.Killswitchd)
	over, err := maps.Lease(kid.Mark)
	if now := bootclock.Now(); err != nil || over > now+term {
		t.Fatalf("the lease runs out in %v, %v; want %v at most", over-now, err, term)
	}
	until(over)
	box.Until(soon, "the road is silent", func() error {
		before := arrived()
		time.Sleep(300 * time.Millisecond) // silence can only be seen by listening for a while
		if n := arrived() - before; n > 0 {
			return fmt.Errorf("%d bytes", n)
		}
		return nil
	})
	c, err := maps.Counters(kid.Mark)
	if err != nil {
		t.Fatal(err)
	}
	// A packet is judged first and noted then; in between its processor may be taken away.
	if late := c.LastPass - over; late > 100*time.Millisecond {
		t.Errorf("a packet passed %v after the lease had run out", late)
	}
	if c.Upstream.DroppedUp.Packets+c.Kid.DroppedUp.Packets == 0 {
		t.Error("nothing was dropped: the test shows nothing")
	}
	t.Logf("last packet %v before the lease ran out, %v after the freeze at most", over-c.LastPass, term)

	n := arrived()
	box.Thaw(instance.Killswitchd)
	box.Until(soon, "bytes arrive again", func() error {
		if arrived() == n {
			return fmt.Errorf("%d bytes still", n)
		}
		return nil
	})
}

// TestALongLeaseKeepsTheNetworkOpen is the control of the test above: the same, with a lease that does not run out
// meanwhile.
func TestALongLeaseKeepsTheNetworkOpen(t *testing.T) {
	t.Parallel()
	box := startLeased(t, lease.Terms{Kernel: lease.KernelBound.Most, Watchdog: lease.WatchdogBound.Most, Absent: lease.AbsentBound.Most})
	_, arrived := uploading(t, box, "open")
	box.Freeze(instance.Killswitchd)
	defer box.Thaw(instance.Killswitchd)
	until(bootclock.Now() + 4*time.Second) // longer than the lease of the other test
	n := arrived()
	box.Until(soon, "bytes go on arriving", func() error {
		if arrived() < n+1<<20 {
			return fmt.Errorf("%d bytes after %d", arrived(), n)
		}
		return nil
	})
}
