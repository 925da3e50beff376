package practice

import (
	"net"
	"net/netip"
	"sync"
	"time"
)

// keepContacts bounds how many contacts are kept in full; all of them are counted.
const keepContacts = 4096

// Contact is one connection or datagram that reached the attacker. Any contact at all is a leak.
type Contact struct {
	At    time.Duration // CLOCK_MONOTONIC
	Proto string        // tcp or udp
	Local string        // address and port that were reached
	From  string
	Bytes int64 // payload, including what is still arriving
}

// Attacker listens on every port that an agent would try and never sends a byte.
type Attacker struct {
	mu       sync.Mutex
	contacts []*Contact        // guarded by mu, as are the contacts
	total    int               // guarded by mu
	bytes    int64             // guarded by mu
	conns    map[net.Conn]bool // guarded by mu
	closed   bool              // guarded by mu
}

// AttackerTCP and AttackerUDP are the ports on which the attacker listens, on IPv4 and IPv6.
func AttackerTCP() []uint16 { return []uint16{53, 80, 443, 853, 7000, PortOther} }
func AttackerUDP() []uint16 { return []uint16{53, 443} }

func (n *Internet) startAttacker() error {
	a := &Attacker{conns: map[net.Conn]bool{}}
	n.Attacker = a
	n.undo = append(n.undo, a.close)
	addrs := []netip.Addr{n.EvilAddr()}
	if haveIPv6() {
		addrs = append(addrs, n.EvilAddr6())
	}
	for _, at := range addrs {
		for _, port := range AttackerTCP() {
			if err := n.lureTCP(at, port); err != nil {
				return err
			}
		}
		for _, port := range AttackerUDP() {
			if err := n.lureUDP(at, port); err != nil {
				return err
			}
		}
	}
	// A port of an allowed name that no card allows: whoever reaches it got past the port check.
	return n.lureTCP(n.APIAddr(), PortOther)
}

// Total returns how many contacts there were and how many bytes they brought.
func (a *Attacker) Total() (contacts int, bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.total, a.bytes
}

// Contacts returns the first few thousand contacts.
func (a *Attacker) Contacts() []Contact {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]Contact, len(a.contacts))
	for i, c := range a.contacts {
		out[i] = *c
	}
	return out
}

func (n *Internet) lureTCP(at netip.Addr, port uint16) error {
	l, err := n.listen(at, port)
	if err != nil {
		return err
	}
	n.undo = append(n.undo, closing(l))
	go accept(l, n.Attacker.take)
	return nil
}

func (n *Internet) lureUDP(at netip.Addr, port uint16) error {
	pc, err := n.listenPacket(at, port)
	if err != nil {
		return err
	}
	n.undo = append(n.undo, closing(pc))
	go func() {
		buf := make([]byte, 64<<10)
		for {
			size, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			n.Attacker.add(n.Attacker.contact("udp", pc.LocalAddr(), from), size)
		}
	}()
	return nil
}

func (a *Attacker) contact(proto string, local, from net.Addr) *Contact {
	c := &Contact{At: Now(), Proto: proto, Local: local.String(), From: from.String()}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.total++
	if len(a.contacts) < keepContacts {
		a.contacts = append(a.contacts, c)
	}
	return c
}

func (a *Attacker) add(c *Contact, bytes int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c.Bytes += int64(bytes)
	a.bytes += int64(bytes)
}

// take reads a connection until the other side gives up; it reports false after close.
func (a *Attacker) take(conn net.Conn) bool {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return false
	}
	a.conns[conn] = true
	a.mu.Unlock()
	c := a.contact("tcp", conn.LocalAddr(), conn.RemoteAddr())
	go func() {
		buf := make([]byte, 32<<10)
		for {
			n, err := conn.Read(buf)
			a.add(c, n)
			if err != nil {
				break
			}
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.conns, conn)
		conn.Close() // at its end
	}()
	return true
}

func (a *Attacker) close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	for c := range a.conns {
		c.Close() // at its end
	}
	return nil
}
