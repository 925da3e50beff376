package dnsfilter

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// Bounds of DNS over TCP (RFC 7766).
const (
	tcpIdle     = 10 * time.Second
	tcpWrite    = 5 * time.Second
	tcpPerKid   = 16
	tcpTotal    = 512
	udpRcvBytes = 1 << 20 // the kernel may give less
)

// listen binds TCP first: it is not shared, so a second filter on the same address fails here.
func (f *Filter) listen(ctx context.Context) error {
	lc := net.ListenConfig{Control: sockopts(false)}
	l, err := lc.Listen(ctx, "tcp4", f.cfg.Listen.String())
	if err != nil {
		return fmt.Errorf("binding %s/tcp: is another resolver there? %w", f.cfg.Listen, err)
	}
	f.tcp = l.(*net.TCPListener)                      // made as TCP
	port := l.Addr().(*net.TCPAddr).AddrPort().Port() // made as TCP
	addr := netip.AddrPortFrom(f.cfg.Listen.Addr(), port)
	lc.Control = sockopts(true)
	for range f.cfg.Sockets {
		c, err := lc.ListenPacket(ctx, "udp4", addr.String())
		if err != nil {
			f.closeSockets()
			return fmt.Errorf("binding %s/udp: is another resolver there? %w", addr, err)
		}
		f.udp = append(f.udp, c.(*net.UDPConn)) // made as UDP
	}
	return nil
}

// sockopts lets the gateway address be bound before its interface exists (IP_FREEBIND, ip(7)) and, for UDP,
// lets the kernel spread queries over several sockets (SO_REUSEPORT, socket(7)).
func sockopts(udp bool) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		ctlErr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_FREEBIND, 1)
			if err == nil && udp {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			}
			if err == nil && udp {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, udpRcvBytes)
			}
		})
		return errors.Join(ctlErr, err)
	}
}

// serveUDP answers on one socket until ctx ends; then it returns nil.
func (f *Filter) serveUDP(ctx context.Context, c *net.UDPConn) error {
	b, err := newBatch(c)
	if err != nil {
		return err
	}
	for {
		n, err := b.receive()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			if transient(err) {
				continue
			}
			return err
		}
		for i := range n {
			raw, src := b.query(i)
			q := query{raw: raw, src: src, kid: f.sessions.byAddr(src.Addr())}
			reply := f.fast(&q, b.space(i))
			if reply == nil {
				reply = f.handle(&q)
			}
			if len(reply) > 0 {
				b.reply(i, reply)
			}
		}
		if err := b.send(); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// transient says whether an error of a socket is about one datagram or connection and not the socket.
func transient(err error) bool {
	for _, e := range []error{unix.ECONNREFUSED, unix.ECONNABORTED, unix.ECONNRESET, unix.EHOSTUNREACH, unix.ENETUNREACH,
		unix.EINTR, unix.EPERM, unix.ENOBUFS, unix.ENOMEM, unix.EMFILE, unix.ENFILE, unix.EPROTO} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// serveTCP accepts connections until ctx ends; then it returns nil.
func (f *Filter) serveTCP(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	starved := audit.Starved{Where: f.tcp.Addr().String() + "/tcp", Log: f.cfg.Audit.Log}
	for {
		c, err := f.tcp.Accept()
		if ctx.Err() != nil {
			if err == nil {
				c.Close() // nothing was written
			}
			return nil
		}
		if err != nil {
			if !transient(err) {
				return err
			}
			starved.Failed(err)
			select { // out of descriptors or memory: others have to give some back first
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		starved.Accepted()
		wg.Go(func() { f.serveConn(c) })
	}
}

// serveConn answers the queries of one connection, one after the other, until it is idle for too long, ends
// or breaks, or its session is removed.
func (f *Filter) serveConn(c net.Conn) {
	defer c.Close()                                // every reply was written
	ap := c.RemoteAddr().(*net.TCPAddr).AddrPort() // accepted as TCP
	q := query{src: netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), tcp: true}
	if !f.conns.add(q.src.Addr(), c) {
		q.kid = f.sessions.byAddr(q.src.Addr())
		f.record(&q, refused(reason.Capacity, "too many DNS connections are open"))
		return
	}
	defer f.conns.remove(q.src.Addr(), c)
	buf := make([]byte, 2+64<<10)
	for {
		n, err := readMessage(c, buf)
		// Looked up for every query: the session may have been removed or replaced meanwhile.
		q.kid = f.sessions.byAddr(q.src.Addr())
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && n > 0 {
				f.drop(&q, "a message that was cut off")
			}
			return
		}
		q.raw = buf[2 : 2+n]
		reply := f.handle(&q)
		if reply == nil {
			return
		}
		framed := binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(reply)), uint16(len(reply))) // dns.MaxMsgSize
		if err := c.SetWriteDeadline(time.Now().Add(tcpWrite)); err != nil {
			return
		}
		if _, err := c.Write(append(framed, reply...)); err != nil {
			return
		}
	}
}

// readMessage reads one length-prefixed message into buf[2:] and returns its length. On an error n says how
// many bytes of it had come; none is an idle connection's end.
func readMessage(c net.Conn, buf []byte) (n int, err error) {
	if err := c.SetReadDeadline(time.Now().Add(tcpIdle)); err != nil {
		return 0, err
	}
	if n, err = io.ReadFull(c, buf[:2]); err != nil {
		return n, err
	}
	want := int(binary.BigEndian.Uint16(buf))
	if n, err = io.ReadFull(c, buf[2:2+want]); err != nil {
		return n + 2, err
	}
	return n, nil
}

// connSet is the open TCP connections, by the kid's address.
type connSet struct {
	mu    sync.Mutex
	open  map[netip.Addr]map[net.Conn]struct{} // guarded by mu
	total int                                  // guarded by mu
}

// add says whether there is room for one more.
func (s *connSet) add(addr netip.Addr, c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.total >= tcpTotal || len(s.open[addr]) >= tcpPerKid {
		return false
	}
	if s.open[addr] == nil {
		s.open[addr] = map[net.Conn]struct{}{}
	}
	s.open[addr][c] = struct{}{}
	s.total++
	return true
}

func (s *connSet) remove(addr netip.Addr, c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open[addr], c)
	if len(s.open[addr]) == 0 {
		delete(s.open, addr)
	}
	s.total--
}

// cut closes the connections of one address.
func (s *connSet) cut(addr netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open[addr] {
		c.Close() // cut on purpose
	}
}

func (s *connSet) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, set := range s.open {
		for c := range set {
			c.Close() // the daemon ends
		}
	}
}

var _ Recorder = (*audit.Logger)(nil)
