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
		Denied: map[reason.Code]uint64{}, Refused: raw.Refused, Unsaid: raw.Unsaid,
	}
	c.LastPass = max(c.Kid.LastPass, c.Link.LastPass, c.Upstream.LastPass)
	for code, n := range raw.Denied {
		if n > 0 {
			c.Denied[reason.Code(code)] = n //nolint:gosec // below 32
		}
	}
	return c, nil
}

func (t *tagoutTally) traffic(point int) Traffic {
	p := &t.Points[point]
	const up, down = 0, 1
	return Traffic{
		PassedUp:    Count{p.PassedPackets[up], p.PassedBytes[up]},
		PassedDown:  Count{p.PassedPackets[down], p.PassedBytes[down]},
		DroppedUp:   Count{p.DroppedPackets[up], p.DroppedBytes[up]},
		DroppedDown: Count{p.DroppedPackets[down], p.DroppedBytes[down]},
		LastPass:    time.Duration(p.LastPass), //nolint:gosec // boot time
	}
}

// Lost returns how many events were not delivered since the installation: the ring was full, or a session was
// over its budget. The denials themselves are in Counters.
func (m *Maps) Lost() (uint64, error) {
	var sum uint64
	for i := range uint32(2) {
		var n uint64
		if _, err := m.get(tagoutMapLost, i, &n); err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}
