package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Session states. Anything else denies, as StateStopped does.
const (
	StateActive  = uint32(tagoutSessionStateSTATE_ACTIVE)
	StateStopped = uint32(tagoutSessionStateSTATE_STOPPED)
)

var (
	// ErrStopped means that the session was stopped: a stop is for good, a mark is never used again.
	ErrStopped = errors.New("the session is stopped")
	// ErrNoSession means that no session has this mark.
	ErrNoSession = errors.New("no session has this mark")
)

// SessionEntry is what the programs know of a session.
type SessionEntry struct {
	State uint32
	Addr  netip.Addr // the kid's own IPv4 address
	// OpensPerSecond bounds its new connections on average; twice as many may come at once. 0: no bound.
	OpensPerSecond int
	// HostNetwork: the kid lives in the machine's own network namespace and reaches what AllowReach says, nothing else.
	HostNetwork bool
}

// hostNetwork is SESSION_HOST_NETWORK of maps.h; a test compares the two.
const hostNetwork = 1

func (e SessionEntry) raw() tagoutSession {
	raw := tagoutSession{State: e.State, Addr: wire(e.Addr)}
	if e.HostNetwork {
		raw.Flags = hostNetwork
	}
	if n := e.OpensPerSecond; n > 0 {
		raw.OpenEvery = uint32(max(time.Second/time.Duration(n), 1))
		raw.OpenBurst = uint32(min(2*int64(n), math.MaxUint32))
	}
	return raw
}

// opensPerSecond is what raw gave for the interval.
func opensPerSecond(every uint32) int {
	if every == 0 {
		return 0
	}
	return int(uint32(time.Second) / every)
}

// PutSession adds or changes a session. A session that was stopped, even before it was added, stays so: making
// it active fails with ErrStopped. It passes nothing before it has a lease (GrantLease).
func (m *Maps) PutSession(mark uint32, e SessionEntry) error {
	if mark == 0 || !e.Addr.Is4() {
		return fmt.Errorf("adding session %#x: mark 0, or an address that is not IPv4", mark)
	}
	if e.State != StateActive {
		if err := m.put(tagoutMapStopped, mark, bootNow()); err != nil {
			return err
		}
	}
	var when uint64
	stopped, err := m.get(tagoutMapStopped, mark, &when)
	if err != nil {
		return err
	}
	if stopped && e.State == StateActive {
		return fmt.Errorf("adding session %#x: %w", mark, ErrStopped)
	}
	if err := m.needCounters(mark); err != nil {
		return err
	}
	raw := e.raw()
	return m.put(tagoutMapSessions, mark, &raw)
}

func (m *Maps) needCounters(mark uint32) error {
	var c tagoutTally
	if there, err := m.get(tagoutMapCounters, mark, &c); err != nil || there {
		return err
	}
	t, err := m.table(tagoutMapCounters)
	if err != nil {
		return err
	}
	return makeCounters(t, mark)
}

// DeleteSession forgets the session, its lease, its stops and its counters; its mark is unknown from then on. Deleting
// twice is not an error. Its ports are ForgetPorts' business.
func (m *Maps) DeleteSession(mark uint32) error {
	if err := m.remove(tagoutMapSessions, mark); err != nil {
		return err // the stop must outlast the session
	}
	return errors.Join(m.remove(tagoutMapLeases, mark), m.remove(tagoutMapStopped, mark), m.remove(tagoutMapRevoked, mark), m.remove(tagoutMapCounters, mark))
}

// StopSession denies the session everything from now on, established flows included, for good. It works for
// marks that are not known yet, and succeeds when either of its two writes does.
func (m *Maps) StopSession(mark uint32) error {
	first := m.put(tagoutMapStopped, mark, bootNow())
	second := m.stopEntry(mark)
	if first != nil && second != nil {
		return fmt.Errorf("stopping session %#x: %w", mark, errors.Join(first, second))
	}
	return nil
}

func (m *Maps) stopEntry(mark uint32) error {
	e, err := m.Session(mark)
	if err != nil {
		return err
	}
	t, err := m.table(tagoutMapSessions)
	if err != nil {
		return err
	}
	e.State = StateStopped
	raw := e.raw()
	return t.Update(mark, &raw, ebpf.UpdateExist)
}

// RevokeSecrets drops, from now on and for good, every packet of the session's upstream sockets that carry a secret.
// Its other sockets go on. It works for marks that are not known yet.
func (m *Maps) RevokeSecrets(mark uint32) error { return m.put(tagoutMapRevoked, mark, bootNow()) }

// Secrets says whether the session's secrets are revoked, and when (CLOCK_BOOTTIME) a packet of a socket that carries
// one last left the box; 0 = never.
func (m *Maps) Secrets(mark uint32) (revoked bool, last time.Duration, err error) {
	var when uint64
	if revoked, err = m.get(tagoutMapRevoked, mark, &when); err != nil {
		return false, 0, err
	}
	var raw tagoutTally
	if _, err = m.get(tagoutMapCounters, mark, &raw); err != nil {
		return false, 0, err
	}
	return revoked, time.Duration(raw.LastSecret), nil // boot time
}

// StopAll sets or clears the global flag. While it is set no session of the instance passes anything.
func (m *Maps) StopAll(on bool) error {
	var flag uint32
	if on {
		flag = 1
	}
	return m.put(tagoutMapStopAll, uint32(0), flag)
}

// StoppedAll says whether the global flag is set.
func (m *Maps) StoppedAll() (bool, error) {
	var flag uint32
	_, err := m.get(tagoutMapStopAll, uint32(0), &flag)
	return err != nil || flag != 0, err
}

// Session returns the entry as the programs judge it, except for the global flag and the lease. It fails with ErrNoSession.
func (m *Maps) Session(mark uint32) (SessionEntry, error) {
	var raw tagoutSession
	there, err := m.get(tagoutMapSessions, mark, &raw)
	if err != nil {
		return SessionEntry{}, err
	}
	if !there {
		return SessionEntry{}, fmt.Errorf("session %#x: %w", mark, ErrNoSession)
	}
	var when uint64
	stopped, err := m.get(tagoutMapStopped, mark, &when)
	if err != nil {
		return SessionEntry{}, err
	}
	e := SessionEntry{State: raw.State, Addr: addr4(raw.Addr), OpensPerSecond: opensPerSecond(raw.OpenEvery), HostNetwork: raw.Flags&hostNetwork != 0}
	if stopped {
		e.State = StateStopped
	}
	return e, nil
}

// StoppedMarks returns the marks of all sessions that Session calls stopped, in a few system calls however many there
// are.
func (m *Maps) StoppedMarks() (map[uint32]bool, error) {
	out := map[uint32]bool{}
	err := eachOf(m, tagoutMapStopped, func(mark uint32, _ uint64) { out[mark] = true })
	if err != nil {
		return nil, err
	}
	err = eachOf(m, tagoutMapSessions, func(mark uint32, s tagoutSession) {
		if s.State != StateActive {
			out[mark] = true
		}
	})
	return out, err
}

// eachOf calls fn with all entries of a hash map, read in one call where nothing changes it meanwhile.
func eachOf[K, V any](m *Maps, name string, fn func(K, V)) error {
	t, err := m.table(name)
	if err != nil {
		return err
	}
	keys, values := make([]K, t.MaxEntries()), make([]V, t.MaxEntries())
	var at ebpf.MapBatchCursor
	for {
		n, err := t.BatchLookup(&at, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("reading BPF map %s: %w", name, err)
		}
		for i := range n {
			fn(keys[i], values[i])
		}
		if err != nil {
			return nil // that was all
		}
	}
}

// Sessions returns the marks of all sessions, in no order.
func (m *Maps) Sessions() ([]uint32, error) {
	t, err := m.table(tagoutMapSessions)
	if err != nil {
		return nil, err
	}
	var out []uint32
	var mark uint32
	var raw tagoutSession
	it := t.Iterate()
	for it.Next(&mark, &raw) {
		out = append(out, mark)
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("reading BPF map %s: %w", tagoutMapSessions, err)
	}
	return out, nil
}

func addr4(raw uint32) netip.Addr {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], raw)
	return netip.AddrFrom4(b)
}

// bootNow reads CLOCK_BOOTTIME, the clock of the programs.
func bootNow() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 1 // the value only informs; the entry is what stops
	}
	return uint64(ts.Nano()) // positive
}
