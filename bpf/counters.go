package bpf

import (
	"fmt"
	"time"

	"tagout/internal/reason"
)

// Count is packets and bytes, IP header included. A GSO packet counts once.
type Count struct {
	Packets, Bytes uint64
}

// Traffic is what one point saw of a session. Up leads away from the kid.
type Traffic struct {
	PassedUp, PassedDown, DroppedUp, DroppedDown Count
	LastPass                                     time.Duration // CLOCK_BOOTTIME of the last packet that passed; 0 = none
}

// Counters are exact since the session was added. The same packet is seen at Kid and at Link, so points are
// not to be added up; kids whose packets no cgroup hook sees have only Link.
type Counters struct {
	Kid      Traffic       // the kid's own sockets
	Link     Traffic       // the kid's link; ARP is not counted when it passes
	Upstream Traffic       // the sockets of proxy and dnsfilter that carry the session's mark
	LastPass time.Duration // the latest of the three

	Denied  map[reason.Code]uint64 // refused calls and packets dropped on their way up, at all points
	Refused uint64                 // calls (connect, sendmsg, socket) among them
	Quiet   map[reason.Code]uint64 // housekeeping of the link among them: nobody's attempt
	Unsaid  uint64                 // denials among them that no event tells of
}

// Counters returns the counters of a session; those of mark 0 belong to traffic that no session is known for,
// those of the box mark to the daemons' own. It fails with ErrNoSession where there are none.
func (m *Maps) Counters(mark uint32) (Counters, error) {
	var raw tagoutTally
	there, err := m.get(tagoutMapCounters, mark, &raw)
	if err != nil {
		return Counters{}, err
	}
	if !there {
		return Counters{}, fmt.Errorf("counters of %#x: %w", mark, ErrNoSession)
	}
	c := Counters{
		Kid: raw.traffic(0), Link: raw.traffic(1), Upstream: raw.traffic(2),
		Denied: byReason(raw.Denied), Quiet: byReason(raw.Quiet), Refused: raw.Refused, Unsaid: raw.Unsaid,
	}
	c.LastPass = max(c.Kid.LastPass, c.Link.LastPass, c.Upstream.LastPass)
	return c, nil
}

func byReason(counts [32]uint64) map[reason.Code]uint64 {
	out := map[reason.Code]uint64{}
	for code, n := range counts {
		if n > 0 {
			out[reason.Code(code)] = n
		}
	}
	return out
}

// Attempts returns, for each mark that has counters, how many attempts were denied since the session was added,
// by reason; housekeeping of the link is not among them. An attempt is in it before its event is in the ring.
func (m *Maps) Attempts() (map[uint32]map[reason.Code]uint64, error) {
	t, err := m.table(tagoutMapCounters)
	if err != nil {
		return nil, err
	}
	out := map[uint32]map[reason.Code]uint64{}
	var mark uint32
	var raw tagoutTally
	it := t.Iterate()
	for it.Next(&mark, &raw) {
		by := byReason(raw.Denied)
		for code, quiet := range byReason(raw.Quiet) {
			if by[code] -= min(by[code], quiet); by[code] == 0 {
				delete(by, code)
			}
		}
		out[mark] = by
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("reading BPF map %s: %w", tagoutMapCounters, err)
	}
	return out, nil
}

func (t *tagoutTally) traffic(point int) Traffic {
	p := &t.Points[point]
	const up, down = 0, 1
	return Traffic{
		PassedUp:    Count{p.PassedPackets[up], p.PassedBytes[up]},
		PassedDown:  Count{p.PassedPackets[down], p.PassedBytes[down]},
		DroppedUp:   Count{p.DroppedPackets[up], p.DroppedBytes[up]},
		DroppedDown: Count{p.DroppedPackets[down], p.DroppedBytes[down]},
		LastPass:    time.Duration(p.LastPass), // boot time
	}
}

// Lost returns how many events were not delivered since the installation: the ring was full, or a session was
// over its budget. The denials themselves are in Counters and, as long as there is room, in Floods.
func (m *Maps) Lost() (uint64, error) {
	ring, err := m.LostInRing()
	if err != nil {
		return 0, err
	}
	budget, err := m.lostEvents(1)
	return ring + budget, err
}

// LostInRing returns how many events among the lost ones found the ring full: nobody read it fast enough.
func (m *Maps) LostInRing() (uint64, error) { return m.lostEvents(0) }

func (m *Maps) lostEvents(why uint32) (uint64, error) {
	var n uint64
	_, err := m.get(tagoutMapLost, why, &n)
	return n, err
}
