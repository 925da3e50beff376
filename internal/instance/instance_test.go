package instance

import (
	"net/netip"
	"strings"
	"testing"
)

func TestNothingOfTwoSlotsOverlaps(t *testing.T) {
	uids := map[uint32]int{}
	links := map[string]bool{}
	for a := range Slots {
		i, err := New("a", a)
		if err != nil {
			t.Fatal(err)
		}
		for b := range a {
			j, _ := New("b", b)
			for _, nets := range [][2]netip.Prefix{{i.KidNet(), j.KidNet()}, {i.VirtualNet(), j.VirtualNet()}, {i.PracticeNet(), j.PracticeNet()}} {
				if nets[0].Overlaps(nets[1]) {
					t.Errorf("slots %d and %d share %v and %v", a, b, nets[0], nets[1])
				}
			}
			if i.OwnsMark(j.SessionMark(1)) || i.BoxMark() == j.BoxMark() || i.LinkPrefix() == j.LinkPrefix() {
				t.Errorf("slots %d and %d share marks or links", a, b)
			}
		}
		for n := 1; n <= MaxKids; n++ {
			first, length := i.KidUIDRange(n)
			if prev, taken := uids[first]; taken || length != 1<<16 || first+length-1 > 1<<31 {
				t.Fatalf("slot %d kid %d: uids %d+%d clash with slot %d or end too high", a, n, first, length, prev)
			}
			uids[first] = a
			host, kid := i.KidAddrs(n)
			if !i.KidNet().Contains(host) || !i.KidNet().Contains(kid) || kid == i.Gateway() || host.Next() != kid {
				t.Fatalf("slot %d kid %d: addresses %v and %v", a, n, host, kid)
			}
			if p := netip.PrefixFrom(host, 31); p.Masked().Addr() != host {
				t.Fatalf("slot %d kid %d: %v does not begin a /31", a, n, host)
			}
			if l := i.KidLink(n); len(l) > 15 || links[l] {
				t.Fatalf("link name %q is too long or taken", l)
			}
			links[i.KidLink(n)] = true
		}
		for _, d := range Daemons() {
			if uid := i.UID(d); uid != 0 && (uid < uidBase || uint32(uid) >= kidUIDBase) {
				t.Errorf("uid %d of %s is outside the daemons' range", uid, d)
			}
		}
	}
}

func TestNames(t *testing.T) {
	for _, bad := range []string{"", "A", "1a", "a-b", "a/b", "..", "a b", strings.Repeat("a", 13), "a\n"} {
		if CheckName(bad) == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	for _, good := range []string{"main", "t1", "abcdefghijkl"} {
		if err := CheckName(good); err != nil {
			t.Error(err)
		}
	}
}

func TestMarks(t *testing.T) {
	i, _ := New("a", 3)
	if m := i.SessionMark(1<<20 - 1); !i.OwnsMark(m) || m>>24 != markPrefix {
		t.Errorf("mark %#x left its slot", m)
	}
	if i.SessionMark(1) == i.BoxMark() {
		t.Error("the first session has the box's own mark")
	}
}
