package proxy

import (
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sock is a TCP socket over IPv4, of a kid or to a server. It is what net.TCPConn is, opened with a third of its
// system calls: a short tunnel is made of little else. Its files are of the runtime's poller like net's.
//
// Calls that never wait go to the kernel without telling the scheduler (RawSyscall): they take as long as some
// code of ours would, and a scheduler that is told takes the processor away from a goroutine in the longer ones.
type sock struct {
	file   *os.File
	raw    syscall.RawConn
	remote netip.AddrPort
	kept   bool // owned by the reaper: keepAlive is set
}

// newSock takes over fd, a connected, non-blocking socket.
func newSock(fd int, remote netip.AddrPort) (*sock, error) {
	file := os.NewFile(uintptr(fd), "tcp")
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close() // already failing
		return nil, err
	}
	return &sock{file: file, raw: raw, remote: remote}, nil
}

// asNet puts an error of a file into the form that the net package gives it: libraries ask it whether it will pass.
func asNet(op string, err error) error {
	pe, ok := err.(*fs.PathError)
	if !ok {
		return err // nil, and the end of the stream
	}
	if err = pe.Err; errors.Is(err, os.ErrClosed) {
		err = net.ErrClosed
	}
	return &net.OpError{Op: op, Net: "tcp", Err: err}
}

// Read implements net.Conn.
func (s *sock) Read(p []byte) (int, error) {
	n, err := s.file.Read(p)
	if err != nil {
		err = asNet("read", err)
	}
	return n, err
}

// smallWrite is what the kernel sends in no more time than a goroutine may take anyway.
const smallWrite = 16 << 10

// Write implements net.Conn.
func (s *sock) Write(p []byte) (int, error) {
	if len(p) <= smallWrite {
		return s.writeSmall(p)
	}
	n, err := s.file.Write(p)
	if err != nil {
		err = asNet("write", err)
	}
	return n, err
}

func (s *sock) writeSmall(p []byte) (n int, err error) {
	var e syscall.Errno
	err = s.raw.Write(func(fd uintptr) bool {
		for n < len(p) {
			var sent uintptr
			sent, _, e = unix.RawSyscall6(unix.SYS_SENDTO, fd, uintptr(unsafe.Pointer(&p[n])), uintptr(len(p)-n), unix.MSG_NOSIGNAL, 0, 0)
			switch e {
			case 0:
				n += int(sent)
			case unix.EINTR:
			default:
				return e != unix.EAGAIN
			}
		}
		return true
	})
	switch {
	case err != nil:
		return n, waitError("write", err)
	case n < len(p):
		return n, &net.OpError{Op: "write", Net: "tcp", Err: e}
	}
	return n, nil
}

// waitError is asNet for what syscall.RawConn says: that the deadline has passed, or else that the file is closed.
func waitError(op string, err error) error {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		err = net.ErrClosed
	}
	return &net.OpError{Op: op, Net: "tcp", Err: err}
}

// Close implements net.Conn.
func (s *sock) Close() error { return asNet("close", s.file.Close()) }

// SetDeadline implements net.Conn.
func (s *sock) SetDeadline(t time.Time) error { return asNet("set", s.file.SetDeadline(t)) }

// SetReadDeadline implements net.Conn.
func (s *sock) SetReadDeadline(t time.Time) error { return asNet("set", s.file.SetReadDeadline(t)) }

// SetWriteDeadline implements net.Conn.
func (s *sock) SetWriteDeadline(t time.Time) error { return asNet("set", s.file.SetWriteDeadline(t)) }

// LocalAddr implements net.Conn. Nobody asks the kernel for it.
func (s *sock) LocalAddr() net.Addr { return &net.TCPAddr{} }

// RemoteAddr implements net.Conn.
func (s *sock) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(s.remote) }

// SyscallConn implements syscall.Conn.
func (s *sock) SyscallConn() (syscall.RawConn, error) { return s.raw, nil }

// control runs fn on the descriptor. The error is fn's, or says that the socket is closed.
func (s *sock) control(fn func(fd int) error) error {
	var err error
	if closed := s.raw.Control(func(fd uintptr) { err = fn(int(fd)) }); closed != nil {
		return waitError("control", closed)
	}
	return err
}

// CloseWrite sends the end of the stream.
func (s *sock) CloseWrite() error {
	return s.control(func(fd int) error { return errno(unix.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_WR, 0)) })
}

// reset closes with a RST: nothing that is still queued in the kernel is sent.
func reset(s *sock) {
	s.control(func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}) // closed already
	s.Close() // closed already
}

func errno(_, _ uintptr, e syscall.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

// The times that net.Dialer and net.ListenConfig take too.
const (
	keepAliveIdle  = 15 // seconds
	keepAliveEvery = 15 // seconds
	keepAliveCount = 9
)

// keepAlive has the kernel find out when the other end is gone. Accepted sockets inherit it, dialled ones get it from
// the reaper: most do not live that long.
func keepAlive(fd int) error {
	return errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepAliveIdle),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepAliveEvery),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPCNT, keepAliveCount),
	)
}

// clientSpeaks says that data follows the connect(2) of fd at once. The last packet of the handshake then goes with it,
// which spares this end a packet and the server a waking (TCP_QUICKACK, tcp(7)). It holds for that packet only.
func clientSpeaks(fd int) {
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 0) // without it there is a packet more
}

// acceptor takes connections from a listener. It is safe for concurrent use, but for accept.
type acceptor struct {
	l *net.TCPListener

	mu     sync.Mutex
	file   *os.File        // guarded by mu: the listening socket once more; nil before the first connection is waited for
	raw    syscall.RawConn // owned by accept
	closed bool            // guarded by mu
}

// open makes the listening socket ready. What is set on it its connections inherit (tcp(7)).
func (a *acceptor) open() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return net.ErrClosed
	}
	file, err := a.l.File()
	if err != nil {
		return err
	}
	if a.raw, err = file.SyscallConn(); err == nil {
		var optErr error
		err = a.raw.Control(func(fd uintptr) {
			optErr = errors.Join(unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1), keepAlive(int(fd)))
		})
		err = errors.Join(err, optErr)
	}
	if err != nil {
		a.raw = nil
		file.Close() // already failing
		return err
	}
	a.file = file
	return nil
}

// Close ends accept, and not the listener.
func (a *acceptor) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	if a.file == nil {
		return nil
	}
	return a.file.Close()
}

// accept waits for the next connection.
func (a *acceptor) accept() (*sock, error) {
	if a.raw == nil {
		if err := a.open(); err != nil {
			return nil, err
		}
	}
	var from unix.RawSockaddrInet4
	var e syscall.Errno
	var fd uintptr
	err := a.raw.Read(func(l uintptr) bool {
		size := uint32(unix.SizeofSockaddrInet4)
		fd, _, e = unix.RawSyscall6(unix.SYS_ACCEPT4, l, uintptr(unsafe.Pointer(&from)), uintptr(unsafe.Pointer(&size)),
			unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
		return e != unix.EAGAIN
	})
	switch {
	case err != nil:
		return nil, waitError("accept", err)
	case e != 0:
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: e}
	}
	return newSock(int(fd), netip.AddrPortFrom(netip.AddrFrom4(from.Addr), hostOrder(from.Port)))
}

// hostOrder turns a port round, which stands in network order in a sockaddr.
func hostOrder(port uint16) uint16 {
	b := (*[2]byte)(unsafe.Pointer(&port))
	return uint16(b[0])<<8 | uint16(b[1])
}

// dialSock connects to an IPv4 address, until deadline. prepare is run on the socket before anything is sent.
// Whoever wants to end it early closes, in a goroutine of its own, the socket that early is told of: it is told only
// where there is waiting.
func dialSock(to netip.AddrPort, deadline time.Time, prepare func(fd int) error, early func(*sock) (stop func() bool)) (*sock, error) {
	fd, _, e := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if e != 0 {
		return nil, os.NewSyscallError("socket", e)
	}
	if err := errors.Join(prepare(int(fd)), unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)); err != nil {
		unix.Close(int(fd)) // already failing
		return nil, err
	}
	addr := unix.RawSockaddrInet4{Family: unix.AF_INET, Port: hostOrder(to.Port()), Addr: to.Addr().As4()}
	e = connectOnce(fd, &addr)
	if e != 0 && e != unix.EINPROGRESS && e != unix.EINTR {
		unix.Close(int(fd)) // already failing
		return nil, dialError(to, e)
	}
	s, err := newSock(int(fd), to)
	if err != nil || e == 0 {
		return s, err
	}
	if err := s.connected(&addr, deadline, early); err != nil {
		s.Close() // already failing
		return nil, dialError(to, err)
	}
	return s, nil
}

func dialError(to netip.AddrPort, err error) error {
	return &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(to), Err: err}
}

func connectOnce(fd uintptr, addr *unix.RawSockaddrInet4) syscall.Errno {
	_, _, e := unix.RawSyscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(addr)), unix.SizeofSockaddrInet4)
	return e
}

// connected waits for the server's answer. A server that is near has given it by now: then there is no waiting.
// Asking once more is how connect(2) tells what became of it.
func (s *sock) connected(addr *unix.RawSockaddrInet4, deadline time.Time, early func(*sock) (stop func() bool)) error {
	asked, told := false, syscall.Errno(0)
	stop := func() bool { return true }
	defer func() { stop() }()
	err := s.raw.Write(func(fd uintptr) bool {
		if told = connectOnce(fd, addr); told == unix.EISCONN {
			told = 0
		}
		if told != unix.EALREADY && told != unix.EINPROGRESS && told != unix.EINTR {
			return true
		}
		if !asked {
			asked = true
			s.SetWriteDeadline(deadline) // closed: the wait says so
			stop = early(s)
		}
		return false
	})
	if err != nil {
		return err
	}
	if told != 0 {
		return os.NewSyscallError("connect", told)
	}
	if asked {
		return s.SetWriteDeadline(time.Time{})
	}
	return nil
}
