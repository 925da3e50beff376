package vaddr

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
)

var net20 = netip.MustParsePrefix("198.18.16.0/20")

func TestExact(t *testing.T) {
	t.Parallel()
	a, err := New(net20, []string{"a.test", "b.test"})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"a.test": "198.18.16.16", "b.test": "198.18.16.17"} {
		got, ok := a.Addr(name)
		if !ok || got.String() != want {
			t.Errorf("%s is at %s, want %s", name, got, want)
		}
		if back, ok := a.Name(got); !ok || back != name {
			t.Errorf("%s stands for %q", got, back)
		}
		if again, err := a.Assign(name); err != nil || again != got {
			t.Errorf("assigning %s: %s, %v", name, again, err)
		}
	}
	if c, err := a.Assign("c.test"); err != nil || c.String() != "198.18.24.0" {
		t.Errorf("the first dynamic address is %s, %v", c, err)
	}
	if _, ok := a.Name(netip.MustParseAddr("198.18.16.19")); ok {
		t.Error("a free address has a name")
	}
	if name, ok := a.Name(netip.MustParseAddr("::ffff:198.18.16.16")); !ok || name != "a.test" {
		t.Errorf("mapped address: %q", name)
	}
	if _, ok := a.Name(netip.Addr{}); ok {
		t.Error("the zero address has a name")
	}
}

// TestGrowingMovesNothing: appending names leaves every address that was given out where it was.
func TestGrowingMovesNothing(t *testing.T) {
	t.Parallel()
	names := slices.Collect(numbered(50))
	small, err := New(net20, names[:20])
	if err != nil {
		t.Fatal(err)
	}
	wild, err := small.Assign("w.test")
	if err != nil {
		t.Fatal(err)
	}
	big, err := New(net20, names)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names[:20] {
		before, _ := small.Addr(name)
		if after, ok := big.Addr(name); !ok || after != before {
			t.Errorf("%s moved from %s to %s", name, before, after)
		}
	}
	if err := big.Restore("w.test", wild); err != nil {
		t.Errorf("the wildcard name lost its address: %v", err)
	}
}

func TestFull(t *testing.T) {
	t.Parallel()
	table, err := New(netip.MustParsePrefix("198.18.0.0/26"), []string{"a.test"})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[netip.Addr]bool{}
	for i := range 32 - 1 { // the second half without the broadcast address
		a, err := table.Assign(fmt.Sprintf("h%d.test", i))
		if err != nil || seen[a] {
			t.Fatalf("address %d: %s, %v", i, a, err)
		}
		seen[a] = true
	}
	if a, err := table.Assign("more.test"); !errors.Is(err, ErrFull) {
		t.Fatalf("got %s, %v from a full table", a, err)
	}
	if seen[netip.MustParseAddr("198.18.0.63")] || seen[netip.MustParseAddr("198.18.0.15")] {
		t.Error("a reserved address was given out")
	}
	if _, err := table.Assign("h0.test"); err != nil {
		t.Errorf("a full table forgot a name: %v", err)
	}
}

func TestRestore(t *testing.T) {
	t.Parallel()
	table, err := New(net20, []string{"a.test"})
	if err != nil {
		t.Fatal(err)
	}
	at := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	for range 2 {
		if err := table.Restore("w.test", at("198.18.24.1")); err != nil {
			t.Fatal(err)
		}
	}
	if err := table.Restore("a.test", at("198.18.16.16")); err != nil {
		t.Errorf("restoring an exact host at its own address: %v", err)
	}
	for what, c := range map[string]struct {
		name string
		addr netip.Addr
	}{
		"another address":  {"w.test", at("198.18.24.2")},
		"another name":     {"x.test", at("198.18.24.1")},
		"an exact address": {"x.test", at("198.18.16.16")},
		"a reserved one":   {"x.test", at("198.18.16.1")},
		"the first half":   {"x.test", at("198.18.16.30")},
		"broadcast":        {"x.test", at("198.18.31.255")},
		"outside":          {"x.test", at("198.18.32.20")},
		"IPv6":             {"x.test", at("::ffff:198.18.16.20")},
		"no address":       {"x.test", netip.Addr{}},
		"no name":          {"", at("198.18.24.9")},
	} {
		if err := table.Restore(c.name, c.addr); err == nil {
			t.Errorf("restored %s", what)
		}
	}
	for _, want := range []string{"198.18.24.0", "198.18.24.2"} { // around the restored one
		if a, err := table.Assign("n" + want); err != nil || a != at(want) {
			t.Errorf("assigned %s, %v; want %s", a, err, want)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		net   netip.Prefix
		exact []string
	}{
		"zero":      {},
		"IPv6":      {net: netip.MustParsePrefix("fd00::/64")},
		"too small": {net: netip.MustParsePrefix("198.18.0.0/28")},
		"too many":  {net: netip.MustParsePrefix("198.18.0.0/26"), exact: slices.Collect(numbered(17))},
		"twice":     {net: net20, exact: []string{"a.test", "a.test"}},
		"no name":   {net: net20, exact: []string{""}},
	} {
		if _, err := New(c.net, c.exact); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	if _, err := New(netip.MustParsePrefix("198.18.0.0/26"), slices.Collect(numbered(16))); err != nil {
		t.Errorf("a net that is just big enough: %v", err)
	}
}

func numbered(n int) func(func(string) bool) {
	return func(yield func(string) bool) {
		for i := range n {
			if !yield(fmt.Sprintf("h%d.test", i)) {
				return
			}
		}
	}
}

func TestConcurrent(t *testing.T) {
	t.Parallel()
	table, err := New(net20, nil)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	got := make([][]netip.Addr, 8)
	for g := range got {
		wg.Go(func() {
			for i := range 200 {
				name := fmt.Sprintf("h%d.test", (i*7+g)%200)
				a, err := table.Assign(name)
				if err != nil {
					t.Error(err)
					return
				}
				if back, ok := table.Name(a); !ok || back != name {
					t.Errorf("%s stands for %q, want %s", a, back, name)
				}
				got[g] = append(got[g], a)
			}
		})
	}
	wg.Wait()
	seen := map[netip.Addr]bool{}
	for _, addrs := range got {
		for _, a := range addrs {
			seen[a] = true
		}
	}
	if len(seen) != 200 {
		t.Errorf("%d addresses for 200 names", len(seen))
	}
}
