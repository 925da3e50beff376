// Package vaddr gives out the virtual addresses that stand for (session, name). One Table serves one session.
// Exact host rules get their addresses by their place in the session's list of names, so that every daemon that
// has the session's document knows them without asking; names that match wildcards get the next free address
// of the other half from whoever owns the table. An address never changes its name while the table lives. The package does no I/O: keeping what
// Assign gave out is the caller's business, and Restore brings it back.
package vaddr

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
)

// reserved is how many addresses at the start of the net are never given out: the network address and
// whatever the instance may need later.
const reserved = 16

// ErrFull is returned by Assign when the net has no free address left.
var ErrFull = errors.New("no virtual address is left in this session")

// Table maps names to virtual addresses and back. It is safe for concurrent use. Names are canonical
// (policy.Name); the table compares them as bytes.
type Table struct {
	first uint32 // the first address that Assign may give out
	end   uint32 // the first one behind the last; the net's broadcast address is left out

	mu    sync.RWMutex
	next  uint32 // everything from first up to here is taken
	names map[netip.Addr]string
	addrs map[string]netip.Addr
}

// New returns the table of a session in net, an IPv4 prefix: the names get the first half of it, one address
// each in the order given, and Assign has the second half. Appending to names never moves an address, so a
// session whose policy grows keeps the answers that its kid remembers. It fails where the net is not IPv4 or
// too small, and where a name is empty or there twice.
func New(net netip.Prefix, names []string) (*Table, error) {
	if !net.IsValid() || !net.Addr().Is4() {
		return nil, fmt.Errorf("making virtual addresses in %s: not an IPv4 net", net)
	}
	net = net.Masked()
	base, size := toUint(net.Addr()), uint64(1)<<(32-net.Bits())
	half := size / 2
	if half < reserved+uint64(len(names)) {
		return nil, fmt.Errorf("making virtual addresses for %d names in %s: the net is too small", len(names), net)
	}
	t := &Table{
		first: uint32(uint64(base) + half),
		end:   uint32(uint64(base) + size - 1), // a prefix ends within 32 bits
		names: make(map[netip.Addr]string, len(names)),
		addrs: make(map[string]netip.Addr, len(names)),
	}
	t.next = t.first
	for i, name := range names {
		if _, twice := t.addrs[name]; name == "" || twice {
			return nil, fmt.Errorf("making virtual addresses in %s: host name %q is empty or there twice", net, name)
		}
		t.set(name, toAddr(base+reserved+uint32(i)))
	}
	return t, nil
}

// Addr returns the address that stands for name.
func (t *Table) Addr(name string) (netip.Addr, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	a, ok := t.addrs[name]
	return a, ok
}

// Name returns the name that addr stands for.
func (t *Table) Name(addr netip.Addr) (string, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	name, ok := t.names[addr.Unmap()]
	return name, ok
}

// Assign returns the address of name, taking the lowest free one where it has none yet. The error is ErrFull.
func (t *Table) Assign(name string) (netip.Addr, error) {
	if name == "" {
		return netip.Addr{}, errors.New("assigning a virtual address: an empty host name")
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if a, ok := t.addrs[name]; ok {
		return a, nil
	}
	for ; t.next < t.end; t.next++ {
		a := toAddr(t.next)
		if _, taken := t.names[a]; taken {
			continue // restored
		}
		t.next++
		t.set(name, a)
		return a, nil
	}
	return netip.Addr{}, ErrFull
}

// Restore gives name the address that an earlier Assign gave it. Restoring what is there already is no error;
// anything that would change a name's or an address's meaning is, and so is an address that Assign cannot
// have given out.
func (t *Table) Restore(name string, a netip.Addr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if old, ok := t.addrs[name]; ok && old == a {
		return nil
	}
	switch old, has := t.addrs[name]; {
	case name == "":
		return errors.New("restoring a virtual address: an empty host name")
	case has:
		return fmt.Errorf("restoring %s at %s: it is at %s already", name, a, old)
	case !a.Is4() || toUint(a) < t.first || toUint(a) >= t.end:
		return fmt.Errorf("restoring %s at %s: outside the addresses that are assigned", name, a)
	}
	if other, taken := t.names[a]; taken {
		return fmt.Errorf("restoring %s at %s: it stands for %s already", name, a, other)
	}
	t.set(name, a)
	return nil
}

// set needs mu, or a table that nobody else knows yet.
func (t *Table) set(name string, a netip.Addr) {
	t.names[a] = name
	t.addrs[name] = a
}

func toUint(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

func toAddr(n uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], n)
	return netip.AddrFrom4(b)
}
