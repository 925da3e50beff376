package control

import (
	"context"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// ReceivedAt returns when the first byte of the request that carries ctx was read from the socket, with a
// monotonic clock reading; ok is false outside a control server. A deadline that is counted from an order
// starts here, so that parsing it is not free.
func ReceivedAt(ctx context.Context) (t time.Time, ok bool) {
	c, ok := ctx.Value(arrivalKey{}).(*arrivalConn)
	if !ok {
		return time.Time{}, false
	}
	first := c.first.Load()
	if first == nil {
		return time.Time{}, false
	}
	return *first, true
}

type arrivalKey struct{}

// arrivalListener hands out connections that note when a request begins to arrive.
type arrivalListener struct{ net.Listener }

func (l arrivalListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &arrivalConn{Conn: c}, nil
}

type arrivalConn struct {
	net.Conn
	first atomic.Pointer[time.Time] // nil while no byte of the current request has come
	next  atomic.Pointer[time.Time] // when the first byte of the next request came, where it came during the current one
}

// Read notes when a request begins. net/http watches a connection while it answers by reading one byte, which is the next
// request's, and reads everything else into a buffer.
func (c *arrivalConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n == 0 {
		return n, err
	}
	now := time.Now()
	if len(p) == 1 {
		c.next.CompareAndSwap(nil, &now)
	}
	c.first.CompareAndSwap(nil, &now)
	return n, err
}

// noteState starts the next request's clock when a connection has finished with one.
func noteState(c net.Conn, s http.ConnState) {
	if ac, ok := c.(*arrivalConn); ok && s == http.StateIdle {
		ac.first.Store(ac.next.Swap(nil))
	}
}
