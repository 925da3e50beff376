package bpf

import (
	"errors"
	"fmt"
)

// Sweep forgets every session that keep does not want, with its kids, ports, reach, lease, stop and counters: what nobody can
// name any more, because whoever made it was killed and what was noted of it is lost. Entries that point to a
// session go before it. A session that is being stopped meanwhile ends unknown, which is denied all the same.
func (m *Maps) Sweep(keep func(mark uint32) bool) error {
	errs := []error{
		sweep(m, tagoutMapExecTold, func(mark uint32, _ uint64) bool { return keep(mark) }),
		sweep(m, tagoutMapExecCounts, func(mark uint32, _ tagoutExecCount) bool { return keep(mark) }),
		sweep(m, tagoutMapKidCgroups, func(_ uint64, mark uint32) bool { return keep(mark) }),
		sweep(m, tagoutMapKidLinks, func(_ uint32, mark uint32) bool { return keep(mark) }),
		sweep(m, tagoutMapPorts, func(key tagoutPortKey, _ uint8) bool { return keep(key.Mark) }),
		sweep(m, tagoutMapReach, func(key tagoutReachKey, _ uint8) bool { return keep(key.Mark) }),
		sweep(m, tagoutMapSessions, func(mark uint32, _ tagoutSession) bool { return keep(mark) }),
		sweep(m, tagoutMapLeases, func(mark uint32, _ uint64) bool { return keep(mark) }),
		sweep(m, tagoutMapStopped, func(mark uint32, _ uint64) bool { return keep(mark) }),
		sweep(m, tagoutMapRevoked, func(mark uint32, _ uint64) bool { return keep(mark) }),
		// Those of no session (0) and of the box itself are there from the start.
		sweep(m, tagoutMapCounters, func(mark uint32, _ tagoutTally) bool { return mark&sequenceMask == 0 || keep(mark) }),
	}
	return errors.Join(errs...)
}

// sequenceMask is the part of a mark that tells an instance's sessions apart; it is 0 in the box's own.
const sequenceMask = 1<<20 - 1

// sweep removes the entries of one map that keep does not want.
func sweep[K, V any](m *Maps, name string, keep func(K, V) bool) error {
	t, err := m.table(name)
	if err != nil {
		return err
	}
	var keys []K
	var key K
	var value V
	it := t.Iterate()
	for it.Next(&key, &value) {
		if !keep(key, value) {
			keys = append(keys, key)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("reading BPF map %s: %w", name, err)
	}
	for i := range keys {
		if err := m.remove(name, &keys[i]); err != nil {
			return err
		}
	}
	return nil
}
