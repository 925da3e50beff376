package bpf

import (
	"maps"
	"testing"

	"golang.org/x/sys/unix"
)

// entries counts what the maps hold beside what they hold from the start.
func (m *Maps) entries(t *testing.T) map[string]int {
	t.Helper()
	out := map[string]int{}
	for _, name := range []string{tagoutMapKidCgroups, tagoutMapKidLinks, tagoutMapPorts, tagoutMapSessions, tagoutMapLeases, tagoutMapStopped, tagoutMapRevoked, tagoutMapCounters} {
		table, err := m.table(name)
		must(t, err)
		var key, value []byte
		it := table.Iterate()
		for it.Next(&key, &value) {
			out[name]++
		}
		must(t, it.Err())
	}
	return out
}

// TestStoppedMarks: all that are stopped, by either of a stop's two writes, and none that is not.
func TestStoppedMarks(t *testing.T) {
	_, m := installed(t, "tbpfmarks")
	want := map[uint32]bool{}
	for i := range uint32(100) {
		mark := uint32(tMark) + 1 + i
		must(t, m.PutSession(mark, SessionEntry{State: StateActive, Addr: tKid.Next()}))
		if i%3 == 0 {
			must(t, m.StopSession(mark))
			want[mark] = true
		}
	}
	const early, late = tMark + 200, tMark + 2
	must(t, m.put(tagoutMapStopped, uint32(early), bootNow())) // its session is not there yet
	must(t, m.stopEntry(late))                                 // the other write failed
	want[early], want[late] = true, true
	got, err := m.StoppedMarks()
	must(t, err)
	if !maps.Equal(got, want) {
		t.Errorf("%d are stopped, want %d: %v", len(got), len(want), got)
	}
}

func TestSweepForgetsWhatIsNotKept(t *testing.T) {
	s, m := installed(t, "tbpfsweep")
	must(t, m.PutKid(0, 4321, tMark))
	kept := m.entries(t)
	const lost = tMark + 1
	must(t, m.PutSession(lost, SessionEntry{State: StateActive, Addr: tKid.Next()}))
	must(t, m.GrantLease(lost, soonOver()))
	must(t, m.PutKid(cgroupID(t, s.kid)+1, 4322, lost))
	must(t, m.AllowPort(lost, unix.IPPROTO_TCP, tPort))
	must(t, m.StopSession(lost))
	must(t, m.RevokeSecrets(lost))
	must(t, m.Sweep(func(mark uint32) bool { return mark == tMark }))
	after := m.entries(t)
	for name := range after {
		if after[name] != kept[name] {
			t.Errorf("%s holds %d entries, want %d", name, after[name], kept[name])
		}
	}
	if e, err := m.Session(tMark); err != nil || e.State != StateActive {
		t.Errorf("the session that was kept: %+v, %v", e, err)
	}
	must(t, m.Sweep(func(uint32) bool { return false }))
	if left := m.entries(t); left[tagoutMapCounters] != 2 || len(left) != 1 {
		t.Errorf("left, beside the counters of the box and of nobody: %v", left)
	}
}
