package bpf

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"tagout/internal/reason"
)

// Flood is how many denials towards one destination have no event: the session was over its budget, or the
// ring was full. PID, UID and Comm are those of the first of them.
type Flood struct {
	Mark   uint32 // 0 where no session is known
	Hook   Hook
	Reason reason.Code
	Family uint8 // as in Event
	Proto  uint8
	Dst    netip.AddrPort
	PID    int
	UID    uint32
	Comm   string
	Count  uint64
}

// TakeFloods returns the floods since the last call and forgets them. They are the readable part: where there
// are more destinations than the map holds the oldest are missing, and only Attempts has their number.
func (m *Maps) TakeFloods() ([]Flood, error) {
	t, err := m.table(tagoutMapFloods)
	if err != nil {
		return nil, err
	}
	keys, err := floodKeys(t)
	if err != nil {
		return nil, err
	}
	out := make([]Flood, 0, len(keys))
	for i := range keys {
		var v tagoutFlood
		err := t.LookupAndDelete(&keys[i], &v)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			continue // pushed out meanwhile
		}
		if err != nil {
			return out, fmt.Errorf("taking from BPF map %s: %w", tagoutMapFloods, err)
		}
		out = append(out, flood(&keys[i], &v))
	}
	return out, nil
}

// floodKeys lists what is there. A flood that goes on can move keys under the listing and end it early; the
// rest is found the next time.
func floodKeys(t *ebpf.Map) ([]tagoutFloodKey, error) {
	var keys []tagoutFloodKey
	var key tagoutFloodKey
	var v tagoutFlood
	it := t.Iterate()
	for it.Next(&key, &v) {
		keys = append(keys, key)
	}
	if err := it.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return nil, fmt.Errorf("reading BPF map %s: %w", tagoutMapFloods, err)
	}
	return keys, nil
}

func flood(key *tagoutFloodKey, v *tagoutFlood) Flood {
	return Flood{
		Mark: key.Mark, Hook: Hook(key.Hook), Reason: reason.Code(key.Reason), Family: key.Family, Proto: key.Proto,
		Dst: addrPort(key.Family, key.Dst, key.Dport), PID: int(v.Pid), UID: v.Uid, Comm: comm(v.Comm), Count: v.Count,
	}
}
