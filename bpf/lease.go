package bpf

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
)

// GrantLease lets the session pass until a time on CLOCK_BOOTTIME. Only whoever makes the session calls it, once:
// from then on RenewLeases keeps the lease, or nobody does and it runs out. A session without a lease passes
// nothing.
func (m *Maps) GrantLease(mark uint32, until time.Duration) error {
	if mark == 0 || until < 0 {
		return fmt.Errorf("giving session %#x a lease until %v: neither can be used", mark, until)
	}
	return m.put(tagoutMapLeases, mark, uint64(until)) // not negative
}

// RenewLeases moves the end of every lease that there is to a time on CLOCK_BOOTTIME, and returns how many it moved.
// It makes none: a session that is destroyed meanwhile stays without. It also revives nothing, because a stop is
// not in the lease. After an error the others are renewed all the same.
func (m *Maps) RenewLeases(until time.Duration) (int, error) {
	t, err := m.table(tagoutMapLeases)
	if err != nil {
		return 0, err
	}
	var marks []uint32
	var mark uint32
	var old uint64
	it := t.Iterate()
	for it.Next(&mark, &old) {
		marks = append(marks, mark)
	}
	var errs []error
	// Sessions that go while we look can end the look early. Whoever was missed is found at the next renewal.
	if err := it.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		errs = append(errs, fmt.Errorf("reading BPF map %s: %w", tagoutMapLeases, err))
	}
	n := 0
	for _, mark := range marks {
		err := t.Update(mark, uint64(until), ebpf.UpdateExist) // a time since boot
		switch {
		case err == nil:
			n++
		case !errors.Is(err, ebpf.ErrKeyNotExist):
			errs = append(errs, fmt.Errorf("renewing the lease of session %#x: %w", mark, err))
		}
	}
	return n, errors.Join(errs...)
}

// Lease returns the time on CLOCK_BOOTTIME at which the session's lease runs out; 0 where it has none.
func (m *Maps) Lease(mark uint32) (time.Duration, error) {
	var until uint64
	_, err := m.get(tagoutMapLeases, mark, &until)
	return time.Duration(until), err // written by us
}

// MarkOf returns the mark of the session for which a cgroup stands, by the cgroup's id. It fails with ErrNoSession.
func (m *Maps) MarkOf(cgroupID uint64) (uint32, error) {
	var mark uint32
	there, err := m.get(tagoutMapKidCgroups, cgroupID, &mark)
	if err == nil && !there {
		err = fmt.Errorf("cgroup %d: %w", cgroupID, ErrNoSession)
	}
	return mark, err
}
