package killswitch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/session"
	"tagout/internal/testroot"
)

// inNetns runs fn on a thread of its own in a new network namespace whose loopback is up. The thread, and the
// namespace with it, end with fn.
func inNetns(t *testing.T, fn func() error) {
	t.Helper()
	testroot.Require(t)
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = loopbackUp()
		}
		if err == nil {
			err = fn()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) // only for the ioctl
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}

// queued is a connection over loopback whose marked sender has more than 1 MB under way to a receiver that
// does not read.
type queued struct {
	sender int // file descriptor, -1 once closed
	reader net.Conn
	sent   int
}

// queue makes one. from is the sender's address; mark is its SO_MARK.
func queue(from string, mark int) (*queued, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close() // one connection is all
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	addr := netip.MustParseAddrPort(l.Addr().String())
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4<<20),
		unix.Bind(fd, &unix.SockaddrInet4{Addr: netip.MustParseAddr(from).As4()}),
		unix.Connect(fd, &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())}),
		unix.SetNonblock(fd, true),
	)
	if err != nil {
		return nil, err
	}
	q := &queued{sender: fd}
	if q.reader, err = l.Accept(); err != nil {
		return nil, err
	}
	for block := make([]byte, 64<<10); ; {
		n, err := unix.Write(fd, block)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			return nil, err
		}
		q.sent += n
	}
	if q.sent < 1<<20 {
		return nil, fmt.Errorf("only %d bytes could be queued", q.sent)
	}
	return q, nil
}

// hangUp closes the sender, as its death would: the kernel goes on sending what is queued.
func (q *queued) hangUp() { unix.Close(q.sender); q.sender = -1 } // seen at the reader

func (q *queued) close() {
	if q.sender >= 0 {
		q.hangUp()
	}
	q.reader.Close() // a test
}

// drain reads what still arrives.
func (q *queued) drain() (int64, error) {
	if err := q.reader.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return 0, err
	}
	return io.Copy(io.Discard, q.reader)
}

// TestDestroyEndsWhatIsQueued is S08's last part: the queue of a socket, orphaned or not, dies with it. The
// control connection shows that without it the kernel delivers everything, long after its process is gone.
func TestDestroyEndsWhatIsQueued(t *testing.T) {
	inNetns(t, func() error {
		const marked, other = 0x54100007, 0x54100008
		var conns []*queued
		defer func() {
			for _, q := range conns {
				q.close()
			}
		}()
		for _, c := range []struct {
			from string
			mark int
		}{{"127.0.0.1", marked}, {"127.0.0.1", marked}, {"127.0.0.7", 0}, {"127.0.0.1", other}} {
			q, err := queue(c.from, c.mark)
			if err != nil {
				return err
			}
			conns = append(conns, q)
		}
		orphan, open, byAddr, control := conns[0], conns[1], conns[2], conns[3]
		orphan.hangUp()
		control.hangUp()
		n, err := NetlinkSockets{}.Destroy(context.Background(), []uint32{marked}, []netip.Addr{netip.MustParseAddr("127.0.0.7")})
		if err != nil {
			return err
		}
		if n != 3 { // two by mark, and the reader's end of the one from 127.0.0.7
			t.Errorf("%d sockets destroyed, want 3", n)
		}
		for name, q := range map[string]*queued{"orphan": orphan, "open": open} {
			if got, err := q.drain(); got >= int64(q.sent) || !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("%s: %d of %d bytes arrived, %v", name, got, q.sent, err)
			}
		}
		if _, err := byAddr.drain(); !errors.Is(err, unix.ECONNABORTED) {
			t.Errorf("by address: %v", err)
		}
		if got, err := control.drain(); got != int64(control.sent) || err != nil {
			t.Errorf("without SOCK_DESTROY %d of %d bytes arrived, %v", got, control.sent, err)
		}
		return nil
	})
}

// TestDestroyOfSecretsAlone: a mark with the bit means the sockets that carry a secret, one without means all.
func TestDestroyOfSecretsAlone(t *testing.T) {
	inNetns(t, func() error {
		const plain = 0x54100007
		for _, c := range []struct {
			ask, want int
		}{{plain | session.SecretBit, 1}, {plain, 2}} {
			var conns []*queued
			for _, mark := range []int{plain, plain | session.SecretBit, plain + 1, (plain + 1) | session.SecretBit} {
				q, err := queue("127.0.0.1", mark)
				if err != nil {
					return err
				}
				conns = append(conns, q)
			}
			n, err := NetlinkSockets{}.Destroy(context.Background(), []uint32{uint32(c.ask)}, nil)
			if n != c.want || err != nil {
				t.Errorf("mark %#x: %d sockets destroyed, want %d; %v", c.ask, n, c.want, err)
			}
			for _, q := range conns {
				q.close()
			}
		}
		return nil
	})
}

// TestDestroySeesBothFamilies: a listener for both families has sockets of IPv6 also for peers that speak IPv4.
func TestDestroySeesBothFamilies(t *testing.T) {
	inNetns(t, func() error {
		l, err := net.Listen("tcp", "[::]:0")
		if err != nil {
			return err
		}
		defer l.Close()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 7)}}
		client, err := d.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", l.Addr().(*net.TCPAddr).Port))
		if err != nil {
			return err
		}
		defer client.Close()
		server, err := l.Accept()
		if err != nil {
			return err
		}
		defer server.Close()
		// A mark beside the address, which no socket has: either is enough.
		n, err := NetlinkSockets{}.Destroy(context.Background(), []uint32{0x54100007}, []netip.Addr{netip.MustParseAddr("127.0.0.7")})
		if n != 1 || err != nil {
			t.Errorf("%d destroyed, %v", n, err)
		}
		if _, err := server.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) {
			t.Errorf("the server's socket: %v", err)
		}
		return nil
	})
}

func TestDestroyUDP(t *testing.T) {
	inNetns(t, func() error {
		const marked = 0x54100007
		server, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			return err
		}
		defer server.Close() // a test
		client, err := net.DialUDP("udp4", nil, server.LocalAddr().(*net.UDPAddr))
		if err != nil {
			return err
		}
		defer client.Close() // a test
		raw, err := client.SyscallConn()
		if err != nil {
			return err
		}
		var markErr error
		if err := raw.Control(func(fd uintptr) { markErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, marked) }); err != nil || markErr != nil {
			return errors.Join(err, markErr)
		}
		if n, err := (NetlinkSockets{}).Destroy(context.Background(), []uint32{marked}, nil); n != 1 || err != nil {
			t.Errorf("%d destroyed, %v", n, err)
		}
		if _, err := client.Write([]byte("x")); err == nil {
			t.Error("the client's socket still sends")
		}
		// Unconnected ones serve everybody (dnsfilter's) and stay.
		if n, err := (NetlinkSockets{}).Destroy(context.Background(), []uint32{marked, 0}, []netip.Addr{netip.MustParseAddr("127.0.0.1")}); n != 0 || err != nil {
			t.Errorf("%d destroyed, %v", n, err)
		}
		return nil
	})
}

func TestDestroyOfNothing(t *testing.T) {
	inNetns(t, func() error {
		n, err := NetlinkSockets{}.Destroy(context.Background(), []uint32{1, 2, 3}, []netip.Addr{netip.MustParseAddr("198.19.0.3"), netip.MustParseAddr("198.19.1.9")})
		if n != 0 {
			t.Errorf("%d destroyed", n)
		}
		return err
	})
}
