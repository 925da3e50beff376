package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
)

// Listen listens on addr even before addr exists on an interface (IP_FREEBIND, ip(7)), so that the order in
// which daemons and links come up does not matter.
func Listen(ctx context.Context, addr netip.AddrPort) (*net.TCPListener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) error {
		var optErr error
		err := rc.Control(func(fd uintptr) {
			optErr = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1)
		})
		return errors.Join(err, optErr)
	}}
	lc.SetMultipathTCP(false) // a kid speaks plain TCP; MPTCP sockets know no splice and no original destination
	l, err := lc.Listen(ctx, "tcp4", addr.String())
	if err != nil {
		return nil, fmt.Errorf("listening on %s: is another proxy of this instance running? %w", addr, err)
	}
	return l.(*net.TCPListener), nil
}

// Longest and shortest pause of the accept loop when the kernel or the process is out of something.
const (
	acceptPauseMin = 5 * time.Millisecond
	acceptPauseMax = time.Second
)

// acceptLoop hands every connection of l to a goroutine of its own until ctx ends. Running out of file
// descriptors or memory slows it down and never ends it.
func (p *Proxy) acceptLoop(ctx context.Context, l *net.TCPListener, via string) error {
	a := &acceptor{l: l}
	defer a.Close() // nothing is lost
	defer context.AfterFunc(ctx, func() { a.Close() })()
	starved := audit.Starved{Where: l.Addr().String(), Log: p.cfg.Audit.Log}
	pause := acceptPauseMin
	for {
		tc, err := a.accept()
		if err == nil {
			pause = acceptPauseMin
			starved.Accepted()
			if c := p.admit(tc, via); c != nil {
				p.running.Go(func() { p.handle(c) })
			}
			continue
		}
		if ctx.Err() != nil {
			return nil
		}
		if !passing(err) {
			return fmt.Errorf("accepting on %s: %w", l.Addr(), err)
		}
		p.cfg.Metrics.AcceptFailed()
		starved.Failed(err)
		p.cfg.Log.Warn("accepting connections", "error", err, "pause", pause)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
		pause = min(2*pause, acceptPauseMax)
	}
}

// passing says whether an error of accept(2) goes away by itself.
func passing(err error) bool {
	for _, e := range []syscall.Errno{
		unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.ECONNABORTED, unix.EPROTO, unix.EPERM, unix.EINTR,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
