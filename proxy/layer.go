package proxy

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// layer is a judged stretch of a connection: HTTP as the client speaks it to the proxy (explicit), in the
// clear, or inside inspected TLS. With HTTP/1.1 it is the net.Conn that the HTTP server reads; with HTTP/2 that
// is an h2Tap.
type layer struct {
	*headConn
	c      *conn
	scheme string // of the requests: "http" or "https"; "" for explicit, where each request says it
	fixed  target // where all requests go; zero for explicit
	h2     bool

	handlers tally        // of HTTP/2 requests
	served   atomic.Int64 // HTTP/2 requests that came to the judge
	next     *onward      // written before done is closed: where a CONNECT leads

	mu      sync.Mutex
	clients map[string]*http.Transport // guarded by mu: by road
	lines   map[string]*line           // guarded by mu: by road, those that are idle

	once sync.Once
	done chan struct{}
}

// onward is a CONNECT that may pass. The connection's own goroutine goes on with it: the HTTP server, its
// goroutine and its buffers are not kept for as long as the tunnel lives.
type onward struct {
	target target
	rule   *policy.Rule
	seen   []byte // what the client has sent behind the head
}

type layerKey struct{}

// explicit says whether clients talk to the proxy as a proxy here.
func (l *layer) explicit() bool { return l.fixed == target{} }

// Close tells that the HTTP server is done. The sockets belong to the conn, which closes them.
func (l *layer) Close() error {
	l.once.Do(func() {
		if !l.h2 {
			l.wake()
		}
		close(l.done)
	})
	return nil
}

// client returns the HTTP client for requests that go by that road.
func (l *layer) client(key string) *http.Transport {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.clients[key] == nil {
		if l.clients == nil {
			l.clients = map[string]*http.Transport{}
		}
		l.clients[key] = l.c.p.newClient(l.c, l.h2, isSecret(key))
	}
	return l.clients[key]
}

func (l *layer) closeIdle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.clients {
		t.CloseIdleConnections()
	}
	for _, ln := range l.lines {
		ln.nc.Close() // nothing is lost
	}
}

// headOf returns what the request says about itself; false where nobody checked it.
func (l *layer) headOf(r *http.Request) (head, bool) {
	if l.h2 {
		return h2Head(r), true
	}
	return l.take()
}

// begin and finish frame the handling of a request.
func (l *layer) begin() {
	if l.h2 {
		l.served.Add(1)
		l.handlers.enter()
	}
}

func (l *layer) finish() {
	if l.h2 {
		l.handlers.leave()
	} else {
		l.headConn.finish()
	}
}

// feed hands layers to the HTTP server as a listener.
type feed struct {
	next   chan net.Conn // a *layer, or an *h2Tap
	closed chan struct{}
	once   sync.Once
}

func newFeed() *feed { return &feed{next: make(chan net.Conn), closed: make(chan struct{})} }

func (f *feed) Accept() (net.Conn, error) {
	select {
	case c := <-f.next:
		return c, nil
	case <-f.closed:
		return nil, net.ErrClosed
	}
}

func (f *feed) Close() error {
	f.once.Do(func() { close(f.closed) })
	return nil
}

func (f *feed) Addr() net.Addr { return &net.TCPAddr{} }

// newWebServer returns the server that reads the requests of all layers.
func (p *Proxy) newWebServer() *http.Server {
	s := &http.Server{
		Handler:           http.HandlerFunc(p.serveRequest),
		ReadHeaderTimeout: p.cfg.Limits.Hello,
		IdleTimeout:       p.cfg.Limits.KeepAlive,
		MaxHeaderBytes:    maxHead + 4<<10,                   // the head checker refuses before this does
		ErrorLog:          webLog(p.cfg.Log, slog.LevelWarn), // bugs, mostly: clients' faults are in the records
		BaseContext:       func(net.Listener) context.Context { return p.ctx },
		ConnContext: func(ctx context.Context, nc net.Conn) context.Context {
			return context.WithValue(ctx, layerKey{}, layerOf(nc))
		},
		DisableGeneralOptionsHandler: true, // OPTIONS * is judged like the rest
		Protocols:                    new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: h2Streams, MaxReceiveBufferPerStream: h2Stream, MaxReceiveBufferPerConnection: h2FromKid,
		},
	}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true) // of an h2Tap, whose TLS has been taken off; elsewhere the head checker refuses it
	return s
}

func layerOf(nc net.Conn) *layer {
	if tap, ok := nc.(*h2Tap); ok {
		return tap.layer
	}
	return nc.(*layer)
}

// feedWeb lets the HTTP server read requests from nc, which is l's, until it is done with it.
func (p *Proxy) feedWeb(l *layer, nc net.Conn) {
	select {
	case p.feed.next <- nc:
		<-l.done
	case <-p.ctx.Done():
	}
}

func (p *Proxy) serveWeb(ctx context.Context) error {
	err := p.web.Serve(p.feed)
	if ctx.Err() != nil || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// h1Buffers is what a connection with HTTP/1.1 may need: a head, and buffers towards both sides.
const h1Buffers = maxHead + 32<<10

// serveRequests lets the HTTP server read requests from nc until it is done with it. seen is what was read
// from nc already.
func (p *Proxy) serveRequests(c *conn, l *layer, nc net.Conn, seen []byte) {
	l.c, l.headConn, l.done = c, newHeadConn(nc, seen), make(chan struct{})
	defer l.closeIdle()
	if !c.hold(h1Buffers) {
		c.full()
		return
	}
	p.feedWeb(l, l)
	if why := l.bodyFault(); why != nil {
		c.blame(why.code, why.detail)
	}
	l.recordUnserved()
}

// recordUnserved writes about requests that passed the head checker and never came to the judge.
func (l *layer) recordUnserved() {
	for {
		f, ok := l.take()
		if !ok {
			return
		}
		x := &exchange{c: l.c, layer: l, head: f, start: l.c.start}
		why := refusal{code: f.code, detail: f.detail}
		if f.code == reason.OK {
			why = refusal{code: reason.Internal, detail: "not served: the connection ended first, or the HTTP server refused the head"}
		}
		x.refused = &why
		x.record()
	}
}

// serveExplicit serves a client that knows it talks to a proxy.
func (p *Proxy) serveExplicit(c *conn) {
	l := &layer{}
	p.serveRequests(c, l, c.client, nil)
	c.letGo()
	next := l.next
	if next == nil {
		c.hangUp()
		return
	}
	c.pending = true
	p.speak(c, next.target, next.rule, next.seen)
}

// serveConnect judges a CONNECT and leaves it to serveExplicit to go on in the protocol that its rule names.
func (p *Proxy) serveConnect(x *exchange, w http.ResponseWriter) {
	c := x.c
	name, port, err := policy.Authority(x.head.target)
	d := policy.Decision{}
	switch {
	case err != nil:
		d = nameRefusal(err)
	case port == 0:
		d.Reason, d.Detail = reason.NameInvalid, "CONNECT without a port"
	default:
		d = c.aim(target{name, port})
	}
	if why := c.strayName(x.head.target, nil); why != nil { // whatever else is wrong with it
		d = policy.Decision{Reason: why.code, Detail: why.detail}
	}
	if d.Verdict == policy.Allow { // a refusal says more now than it can inside the tunnel
		if why := p.claim(c.ctx, c.sess.current(), c.sess.doc.Mark, name); why != nil {
			d = policy.Decision{Rule: d.Rule, Reason: why.code, Detail: why.detail}
		}
	}
	if d.Verdict != policy.Allow {
		if d.Detail == "" {
			d.Detail = clip(x.head.target, 255)
		}
		c.recordRefused(refuseBy(d))
		writeProblem(w, c.problem(refuseBy(d), c.aimedAt()), true)
		return
	}
	nc, rw, err := w.(http.Hijacker).Hijack()
	if err != nil {
		c.recordRefused(refusal{code: reason.Internal, detail: err.Error()})
		return
	}
	defer nc.Close() // a layer's Close cannot fail
	early, err := rw.Reader.Peek(rw.Reader.Buffered())
	if err != nil {
		c.recordRefused(refusal{code: reason.Internal, detail: err.Error()})
		return
	}
	x.layer.next = &onward{target{name, port}, d.Rule, append(bytes.Clone(early), x.layer.rest()...)}
}

// nameRefusal turns the error of policy.Authority into a decision.
func nameRefusal(err error) policy.Decision {
	d := policy.Decision{Reason: reason.NameInvalid, Detail: err.Error()}
	var ne *policy.NameError
	if errors.As(err, &ne) {
		d.Reason = ne.Reason
	}
	return d
}
