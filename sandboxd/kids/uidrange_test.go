package kids

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
)

// span is a range of the machine's uids.
type span struct {
	kid          string
	first, count uint32
}

// spans reads the uid range of every kid that runs, as the kernel has it.
func (b *box) spans() (out []span) {
	b.t.Helper()
	dirs, err := filepath.Glob(b.layout.V2(b.inst.KidsCgroupRel() + "/*/cgroup.procs"))
	if err != nil {
		b.t.Fatal(err)
	}
	for _, dir := range dirs {
		pids, err := cgroup.Procs(filepath.Dir(dir))
		if err != nil || len(pids) == 0 {
			continue
		}
		s := span{kid: filepath.Base(filepath.Dir(dir))}
		var inside uint32
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", pids[0]))
		if err != nil {
			continue // it has ended
		}
		if _, err := fmt.Sscan(string(raw), &inside, &s.first, &s.count); err != nil || inside != 0 {
			b.t.Fatalf("uid map of %s: %q, %v", s.kid, raw, err)
		}
		out = append(out, s)
	}
	return out
}

// overlap returns two ranges that meet, and whether there are any.
func overlap(all []span) (a, b span, found bool) {
	for i, a := range all {
		for _, b := range all[:i] {
			if a.first < b.first+b.count && b.first < a.first+a.count {
				return a, b, true
			}
		}
	}
	return a, b, false
}

// TestUIDRangesNeverOverlap spawns, destroys and restarts at random, and reads from the kernel who has which range.
func TestUIDRangesNeverOverlap(t *testing.T) {
	b := newBox(t, "tsbuids")
	random := rand.New(rand.NewPCG(7, 7))
	for step := range 60 {
		living := b.List(t.Context())
		switch n := random.IntN(10); {
		case n == 0:
			b.Manager = makeManager(t, b.inst, b.layout, initPath, b.guards, b.audit)
			if err := b.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
		case n < 5 && len(living) > 0 || len(living) > 8:
			if err := b.Destroy(t.Context(), living[random.IntN(len(living))].Name, "test", "at random"); err != nil {
				t.Fatal(err)
			}
		default:
			b.spawn(fmt.Sprintf("k%d", step), plan())
		}
		all := b.spans()
		if x, y, found := overlap(all); found {
			t.Fatalf("step %d: %+v and %+v overlap", step, x, y)
		}
		if want := len(b.List(t.Context())); len(all) != want {
			t.Fatalf("step %d: %d ranges of %d kids: the test would miss some", step, len(all), want)
		}
	}
	if _, _, found := overlap([]span{{"a", 0, 65536}, {"b", 65535, 1}}); !found {
		t.Error("an overlap is not seen: the test shows nothing")
	}
}

// TestRangeOfALostRecordStaysTaken: of a kid of which nothing is known but what the kernel says.
func TestRangeOfALostRecordStaysTaken(t *testing.T) {
	b := newBox(t, "tsblost")
	b.spawn("k1", plan())
	index := b.Manager.kids["k1"].rec.Session.Index
	if err := errors.Join(os.Remove(filepath.Join(b.inst.KidDir("k1"), recordName)), os.Remove(filepath.Join(b.inst.SessionDir(), "k1.json"))); err != nil {
		t.Fatal(err)
	}
	b.guards.set("withdraw", errors.New("it cannot be taken away yet"))
	b.Manager = makeManager(t, b.inst, b.layout, initPath, b.guards, b.audit)
	if err := b.Recover(t.Context()); err == nil {
		t.Error("the teardown went through: the test shows nothing")
	}
	b.spawn("k2", plan())
	if got := b.Manager.kids["k2"].rec.Session.Index; got == index {
		t.Errorf("k2 got the range %d of k1, which may still run", got)
	}
	b.guards.set("withdraw", nil)
}

// TestRangesOfAllKidsOfAllInstances: whatever index and slot.
func TestRangesOfAllKidsOfAllInstances(t *testing.T) {
	t.Parallel()
	end := uint64(0)
	for slot := range instance.Slots {
		inst, err := instance.New("x", slot)
		if err != nil {
			t.Fatal(err)
		}
		for index := 1; index <= instance.MaxKids; index++ {
			first, count := inst.KidUIDRange(index)
			if uint64(first) < end || uint64(first)+uint64(count) > 1<<31 {
				t.Fatalf("slot %d, kid %d: %d and %d more, after %d", slot, index, first, count, end)
			}
			end = uint64(first) + uint64(count)
		}
	}
}
