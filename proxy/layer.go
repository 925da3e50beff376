package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// layer is a judged stretch of a connection: HTTP/1.1 as the client speaks it to the proxy (explicit), in the
// clear, or inside inspected TLS. It is the net.Conn that the HTTP server reads.
type layer struct {
	*headConn
	c      *conn
	scheme string // of the requests: "http" or "https"; "" for explicit, where each request says it
	fixed  target // where all requests go; zero for explicit
	client *http.Transport

	once sync.Once
	done chan struct{}
}

type layerKey struct{}

// explicit says whether clients talk to the proxy as a proxy here.
func (l *layer) explicit() bool { return l.fixed == target{} }

// Close tells that the HTTP server is done. The sockets belong to the conn, which closes them.
func (l *layer) Close() error {
	l.once.Do(func() {
		l.wake()
		close(l.done)
	})
	return nil
}

// feed hands layers to the HTTP server as a listener.
type feed struct {
	next   chan *layer
	closed chan struct{}
	once   sync.Once
}

func newFeed() *feed { return &feed{next: make(chan *layer), closed: make(chan struct{})} }

func (f *feed) Accept() (net.Conn, error) {
	select {
	case l := <-f.next:
		return l, nil
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
	return &http.Server{
		Handler:           http.HandlerFunc(p.serveRequest),
		ReadHeaderTimeout: p.cfg.Limits.Hello,
		IdleTimeout:       p.cfg.Limits.KeepAlive,
		MaxHeaderBytes:    maxHead + 4<<10,                   // the head checker refuses before this does
		ErrorLog:          webLog(p.cfg.Log, slog.LevelWarn), // bugs, mostly: clients' faults are in the records
		BaseContext:       func(net.Listener) context.Context { return p.ctx },
		ConnContext: func(ctx context.Context, nc net.Conn) context.Context {
			return context.WithValue(ctx, layerKey{}, nc.(*layer))
		},
		DisableGeneralOptionsHandler: true, // OPTIONS * is judged like the rest
	}
}

func (p *Proxy) serveWeb(ctx context.Context) error {
	err := p.web.Serve(p.feed)
	if ctx.Err() != nil || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// serveRequests lets the HTTP server read requests from nc until it is done with it. seen is what was read
// from nc already.
func (p *Proxy) serveRequests(c *conn, l *layer, nc net.Conn, seen []byte) {
	l.c, l.headConn, l.done = c, newHeadConn(nc, seen), make(chan struct{})
	l.client = p.newClient(c)
	defer l.client.CloseIdleConnections()
	select {
	case p.feed.next <- l:
		<-l.done
	case <-p.ctx.Done():
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
	p.serveRequests(c, &layer{}, c.client, nil)
	c.hangUp()
}

// serveConnect judges a CONNECT and goes on in the protocol that its rule names.
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
	if d.Verdict != policy.Allow {
		if d.Detail == "" {
			d.Detail = clip(x.head.target, 255)
		}
		c.recordRefused(refuseBy(d))
		writeProblem(w, c.problem(refuseBy(d)), true)
		return
	}
	nc, rw, err := w.(http.Hijacker).Hijack()
	if err != nil {
		c.recordRefused(refusal{code: reason.Internal, detail: err.Error()})
		return
	}
	defer nc.Close() //nolint:errcheck // a layer's Close cannot fail
	early, err := rw.Reader.Peek(rw.Reader.Buffered())
	if err != nil {
		c.recordRefused(refusal{code: reason.Internal, detail: err.Error()})
		return
	}
	c.pending = true
	p.speak(c, target{name, port}, d.Rule, append(early, x.layer.rest()...))
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
