package dnsfilter

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"sync"

	"tagout/internal/reason"
	"tagout/internal/vaddr"
)

// names keeps the virtual addresses of one session's wildcard names: in the table, and in a file of lines
// "address SP name LF", written before the address is given out. The file needs no fsync: it lies on tmpfs,
// and a session does not survive a reboot.
type names struct {
	path  string
	table *vaddr.Table

	mu     sync.Mutex
	f      *os.File              // nil: closed, or nothing was given out yet; guarded by mu
	good   int64                 // length of the file up to the last whole line; guarded by mu
	given  map[string]netip.Addr // what is in the file; guarded by mu
	closed bool                  // another names owns the file now; guarded by mu
}

// openNames reads the session's file at path, if there is one, into table. Names that keep refuses, and those
// whose address has another meaning now, are forgotten. A file that cannot be understood is an error.
func openNames(path string, table *vaddr.Table, keep func(name string) bool) (*names, error) {
	n := &names{path: path, table: table, given: map[string]netip.Addr{}}
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading virtual addresses: %w", err)
	}
	// A last line without its end was never given out.
	raw = raw[:bytes.LastIndexByte(raw, '\n')+1]
	var out bytes.Buffer
	for line := range strings.Lines(string(raw)) {
		text, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		addr, err := netip.ParseAddr(text)
		if !ok || err != nil || name == "" {
			return nil, fmt.Errorf("reading virtual addresses: %s has a line that is not %q: destroy the kid and spawn it again", path, "address name")
		}
		if keep(name) && table.Restore(name, addr) == nil {
			n.given[name] = addr
			out.WriteString(line)
		}
	}
	return n, n.rewrite(out.Bytes())
}

// rewrite replaces the file with lines.
func (n *names) rewrite(lines []byte) error {
	tmp := n.path + ".new"
	err := os.WriteFile(tmp, lines, 0o600)
	if err == nil {
		err = os.Rename(tmp, n.path)
	}
	if err != nil {
		return fmt.Errorf("writing virtual addresses: %w", err)
	}
	return nil
}

// address returns the address of a wildcard name, giving one out where it has none. An error comes with the
// reason to refuse the lookup with.
func (n *names) address(name string) (netip.Addr, reason.Code, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if addr, ok := n.given[name]; ok {
		return addr, reason.OK, nil
	}
	if n.closed {
		return netip.Addr{}, reason.PolicyNotLoaded, errors.New("the session is being replaced: ask again")
	}
	if len(n.given) >= maxWildcardNames {
		return netip.Addr{}, reason.WildcardLimit, errManyNames
	}
	addr, err := n.table.Assign(name)
	if err != nil {
		return netip.Addr{}, reason.Capacity, err
	}
	// Where writing fails the table keeps the address for the name, and the next lookup writes again.
	if err := n.append(addr.String() + " " + name + "\n"); err != nil {
		return netip.Addr{}, reason.Internal, err
	}
	n.given[name] = addr
	return addr, reason.OK, nil
}

// append writes one line whole or not at all. Callers hold mu.
func (n *names) append(line string) error {
	if n.f == nil {
		f, err := os.OpenFile(n.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			return fmt.Errorf("keeping a virtual address: %w", err)
		}
		info, err := f.Stat()
		if err != nil {
			f.Close() // already failing
			return fmt.Errorf("keeping a virtual address: %w", err)
		}
		n.f, n.good = f, info.Size()
	}
	written, err := n.f.WriteString(line)
	if err != nil {
		if written > 0 {
			err = errors.Join(err, n.f.Truncate(n.good))
		}
		return fmt.Errorf("keeping a virtual address: %w", err)
	}
	n.good += int64(written)
	return nil
}

// name returns the name that was given addr.
func (n *names) name(addr netip.Addr) (string, bool) {
	name, ok := n.table.Name(addr)
	if !ok {
		return "", false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	_, ok = n.given[name]
	return name, ok
}

// close gives the file free; nothing is given out any more.
func (n *names) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = true
	if n.f != nil {
		n.f.Close() // every line was written with its own call
		n.f = nil
	}
}
