package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// plainServer answers the requests of each connection with what answer says. more is false after the last one.
func plainServer(t testing.TB, answer func(conn, request int) (said string, more bool)) (at netip.AddrPort, conns *atomic.Int64) {
	conns = new(atomic.Int64)
	return listen(t, serverAddr, 0, func(c net.Conn) {
		n := int(conns.Add(1))
		br := bufio.NewReader(c)
		for i := 1; ; i++ {
			if _, err := http.ReadRequest(br); err != nil {
				return
			}
			said, more := answer(n, i)
			io.WriteString(c, said)
			if !more {
				return
			}
		}
	}), conns
}

func said(body string) string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

// A connection to the server is used again, and a server that hung up meanwhile costs no request.
func TestLineIsUsedAgain(t *testing.T) {
	w := newWorld(t)
	at, conns := plainServer(t, func(n, i int) (string, bool) { return said(fmt.Sprintf("%d.%d", n, i)), i < 3 })
	w.allow(rule(apiHost, at.Port(), policy.HTTP))
	c := w.dialName(apiHost, at.Port())
	host := fmt.Sprintf("%s:%d", apiHost, at.Port())
	for _, want := range []string{"1.1", "1.2", "1.3", "2.1", "2.2", "2.3", "3.1"} {
		resp := ask(t, c, get(host, "/v1/x"), 1)[0]
		if body, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK || string(body) != want {
			t.Fatalf("%d %q, want %q", resp.StatusCode, body, want)
		}
	}
	if n := conns.Load(); n != 3 {
		t.Errorf("%d connections", n)
	}
}

// What a server sends before it is asked is nobody's answer.
func TestUnaskedAnswerIsDropped(t *testing.T) {
	for _, apart := range []bool{false, true} {
		t.Run(fmt.Sprintf("apart=%v", apart), func(t *testing.T) {
			w := newWorld(t)
			sent := make(chan struct{}, 8)
			at := listen(t, serverAddr, 0, func(c net.Conn) {
				br := bufio.NewReader(c)
				for {
					if _, err := http.ReadRequest(br); err != nil {
						return
					}
					if apart {
						io.WriteString(c, said("asked"))
						io.WriteString(c, said("unasked"))
					} else {
						io.WriteString(c, said("asked")+said("unasked"))
					}
					sent <- struct{}{}
				}
			})
			w.allow(rule(apiHost, at.Port(), policy.HTTP))
			c := w.dialName(apiHost, at.Port())
			for range 4 {
				resp := ask(t, c, get(fmt.Sprintf("%s:%d", apiHost, at.Port()), "/v1/x"), 1)[0]
				if body, _ := io.ReadAll(resp.Body); string(body) != "asked" {
					t.Fatalf("the answer is %q", body)
				}
				<-sent
			}
		})
	}
}

// An answer's head may only be so long, and interim answers only so many.
func TestLineBoundsTheHead(t *testing.T) {
	for name, head := range map[string]string{
		"long":    "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2*maxResponseHead) + "\r\nContent-Length: 0\r\n\r\n",
		"interim": strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 100) + said("x"),
		"no HTTP": "SSH-2.0-OpenSSH\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			at, _ := plainServer(t, func(int, int) (string, bool) { return head, true })
			w.allow(rule(apiHost, at.Port(), policy.HTTP))
			c := w.dialName(apiHost, at.Port())
			resp := ask(t, c, get(fmt.Sprintf("%s:%d", apiHost, at.Port()), "/v1/x"), 1)[0]
			if resp.StatusCode < 400 {
				t.Errorf("answered %d", resp.StatusCode)
			}
			if r := w.records.wait(t, "the request", func(r audit.Record) bool { return r.Event == audit.EventRequest }); r.Reason != reason.DialFailed {
				t.Errorf("recorded %v", r.Reason)
			}
		})
	}
	t.Run("a few", func(t *testing.T) {
		w := newWorld(t)
		at, _ := plainServer(t, func(int, int) (string, bool) {
			return strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 3) + said("x"), true
		})
		w.allow(rule(apiHost, at.Port(), policy.HTTP))
		c := w.dialName(apiHost, at.Port())
		if resp := ask(t, c, get(fmt.Sprintf("%s:%d", apiHost, at.Port()), "/v1/x"), 1)[0]; resp.StatusCode != http.StatusOK {
			t.Errorf("answered %d", resp.StatusCode)
		}
	})
}

// A kid that is gone is not waited for: the server sees the end of a request that it has not answered.
func TestLineEndsWithTheClient(t *testing.T) {
	w := newWorld(t)
	asked, over := make(chan struct{}), make(chan struct{})
	at := listen(t, serverAddr, 0, func(c net.Conn) {
		http.ReadRequest(bufio.NewReader(c))
		close(asked)
		io.Copy(io.Discard, c)
		close(over)
	})
	w.allow(rule(apiHost, at.Port(), policy.HTTP))
	c := w.dialName(apiHost, at.Port())
	io.WriteString(c, get(fmt.Sprintf("%s:%d", apiHost, at.Port()), "/v1/x"))
	<-asked
	c.SetLinger(0)
	c.Close()
	select {
	case <-over:
	case <-time.After(patience):
		t.Error("the server still has the request")
	}
}

// sockPair returns both ends of a connection.
func sockPair(t *testing.T) (*sock, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	s, err := dialSock(l.Addr().(*net.TCPAddr).AddrPort(), time.Now().Add(patience), func(int) error { return nil }, func(*sock) func() bool { return func() bool { return true } })
	must(t, err)
	t.Cleanup(func() { s.Close() })
	c, err := l.Accept()
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return s, c
}

// A sock says what went wrong in the words of the net package, by which TLS and HTTP tell what passes from what does not.
func TestSockErrors(t *testing.T) {
	s, peer := sockPair(t)
	s.SetDeadline(time.Unix(1, 0))
	for op, do := range map[string]func([]byte) (int, error){"read": s.Read, "write": s.Write} {
		for _, size := range []int{1, 2 * smallWrite} {
			_, err := do(make([]byte, size))
			var ne net.Error
			if !errors.As(err, &ne) || !ne.Timeout() || !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s of %d behind the deadline: %v", op, size, err)
			}
			if te, ok := err.(interface{ Temporary() bool }); !ok || !te.Temporary() {
				t.Errorf("%s of %d behind the deadline does not pass: %v", op, size, err)
			}
		}
	}
	s.SetDeadline(time.Time{})
	if _, err := s.Write([]byte("x")); err != nil {
		t.Errorf("once the deadline is gone: %v", err)
	}
	io.ReadFull(peer, make([]byte, 1))
	peer.(*net.TCPConn).SetLinger(0)
	peer.Close()
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("after a reset: %v", err)
	}
	if _, err := s.Write(make([]byte, 1)); !errors.Is(err, unix.EPIPE) {
		t.Errorf("writing after a reset: %v", err)
	}
	s.Close()
	for op, do := range map[string]func([]byte) (int, error){"read": s.Read, "write": s.Write} {
		if _, err := do(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s when closed: %v", op, err)
		}
	}
}

// Writes of every size arrive whole, at a reader that takes its time.
func TestSockWritesWhole(t *testing.T) {
	s, peer := sockPair(t)
	const pieces = 2000
	sizes := []int{1, 100, smallWrite, smallWrite + 1, 3 * smallWrite}
	var want int64
	for i := range pieces {
		want += int64(sizes[i%len(sizes)])
	}
	var got int64
	var wg sync.WaitGroup
	wg.Go(func() { got, _ = io.Copy(io.Discard, peer) })
	block := make([]byte, 3*smallWrite)
	for i := range pieces {
		if _, err := s.Write(block[:sizes[i%len(sizes)]]); err != nil {
			t.Fatal(err)
		}
	}
	must(t, s.CloseWrite())
	wg.Wait()
	if got != want {
		t.Errorf("%d bytes of %d", got, want)
	}
}

// A dial that nobody answers ends by its deadline, and by whoever gives it up.
func TestDialSockEnds(t *testing.T) {
	full := backlogged(t)
	none := func(int) error { return nil }
	start := time.Now()
	_, err := dialSock(full, start.Add(50*time.Millisecond), none, func(*sock) func() bool { return func() bool { return true } })
	var ne net.Error
	if !errors.As(err, &ne) || !ne.Timeout() {
		t.Errorf("by its deadline: %v", err)
	}
	_, err = dialSock(full, start.Add(time.Hour), none, func(s *sock) func() bool {
		go s.Close() // as context.AfterFunc does: it waits until the dial lets go of the socket
		return func() bool { return false }
	})
	if err == nil {
		t.Error("given up, and connected")
	}
	if took := time.Since(start); took > patience {
		t.Errorf("took %s", took)
	}
}

// backlogged returns the address of a socket whose queue of connections is full: it answers no more SYNs.
func backlogged(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	must(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	must(t, unix.Listen(fd, 0))
	sa, err := unix.Getsockname(fd)
	must(t, err)
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(sa.(*unix.SockaddrInet4).Port))
	for range 8 {
		s, err := dialSock(at, time.Now().Add(20*time.Millisecond), func(int) error { return nil }, func(*sock) func() bool { return func() bool { return true } })
		if err != nil {
			return at
		}
		t.Cleanup(func() { s.Close() })
	}
	t.Fatal("the queue does not fill")
	return at
}
