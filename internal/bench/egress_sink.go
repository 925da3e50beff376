package bench

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"

	"tagout/internal/practice"
)

// sink is the server at the far end of every tunnel. It reads a ClientHello (one TLS record), answers it with a
// record, and then reads one byte that says what is asked: see the load command.
type sink struct {
	at netip.AddrPort
	l  net.Listener

	mu    sync.Mutex
	conns map[net.Conn]struct{} // guarded by mu
}

// newSink listens inside the practice internet.
func newSink(n *practice.Internet, at netip.AddrPort) (*sink, error) {
	s := &sink{at: at, conns: map[net.Conn]struct{}{}}
	err := n.Do(func() error {
		var err error
		s.l, err = net.Listen("tcp4", at.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	go s.accept()
	return s, nil
}

func (s *sink) accept() {
	for {
		c, err := s.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // out of descriptors: the clients see that nobody answers
		}
		s.mu.Lock()
		s.conns[c] = struct{}{}
		s.mu.Unlock()
		go func() {
			serveSink(c)
			s.mu.Lock()
			delete(s.conns, c)
			s.mu.Unlock()
			c.Close()
		}()
	}
}

// hangUp ends every tunnel that stands.
func (s *sink) hangUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.Close()
	}
}

func (s *sink) close() error {
	err := s.l.Close()
	s.hangUp()
	return err
}

// helloAnswer is a TLS record with an alert in it (RFC 8446, 6): proxies that wait for a server's first words get some.
var helloAnswer = []byte{21, 3, 3, 0, 2, 1, 90}

func serveSink(c net.Conn) {
	var head [5]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return
	}
	rest := make([]byte, int(binary.BigEndian.Uint16(head[3:])))
	if _, err := io.ReadFull(c, rest); err != nil {
		return
	}
	if _, err := c.Write(helloAnswer); err != nil {
		return
	}
	if _, err := io.ReadFull(c, head[:1]); err != nil {
		return
	}
	switch head[0] { // 'o': nothing more is asked
	case 'e':
		for {
			n, err := c.Read(head[:])
			if err != nil {
				return
			}
			if _, err := c.Write(head[:n]); err != nil {
				return
			}
		}
	case 'p':
		swallow(c)
	}
}

// swallow acknowledges each piece with a byte.
func swallow(c net.Conn) {
	buf := make([]byte, 256<<10)
	if _, err := io.ReadFull(c, buf[:8]); err != nil {
		return
	}
	for piece := int64(binary.BigEndian.Uint64(buf)); ; {
		for left := piece; left > 0; {
			n, err := c.Read(buf[:min(left, int64(len(buf)))])
			if err != nil {
				return
			}
			left -= int64(n)
		}
		if _, err := c.Write(buf[:1]); err != nil {
			return
		}
	}
}
