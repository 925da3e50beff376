package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"time"

	"github.com/elazarl/goproxy"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
)

// Proxy is the egress proxy of one instance. Make it with New, give it sessions, then Serve.
type Proxy struct {
	cfg      Config
	ctx      context.Context // ends when Serve does
	cancel   context.CancelFunc
	sessions *table
	resolver *resolver
	web      *http.Server // reads the requests of judged connections
	feed     *feed        // hands those connections to it
	mitm     *goproxy.ProxyHttpServer
	carrying *carrying // is cfg.Tokens
	floods   floods
	memory   memory
	running  sync.WaitGroup // connections
}

// New returns a proxy that knows no session yet and thus denies everything.
func New(cfg Config) (*Proxy, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("setting up the proxy: %w", err)
	}
	p := &Proxy{cfg: cfg, sessions: newTable(), resolver: &resolver{servers: cfg.Resolvers, mark: cfg.Mark}}
	p.carrying = &carrying{Tokens: cfg.Tokens, watched: cfg.Revocations != nil, conns: map[*conn]map[string]*showing{}}
	p.cfg.Tokens = p.carrying
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.feed = newFeed()
	p.mitm = p.newMITM()
	p.web = p.newWebServer()
	return p, nil
}

// Load takes over the sessions that are on disk. What cannot be read or does not compile stays denied and is
// in the error, beside which the rest is in force.
func (p *Proxy) Load(store session.Store) error {
	all, err := store.Load()
	errs := []error{err}
	for _, s := range all {
		_, err := p.Put(s)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Put takes over a session or a newer policy of one. When it returns without an error, the policy is in force
// and what it does not allow is cut: so many connections, and requests of HTTP/2 connections that live on. An
// error changes nothing for a session that is known, and leaves a new one unknown.
func (p *Proxy) Put(s *session.Session) (cut int, err error) {
	if err := s.Check(); err != nil {
		p.recordUnreadable(s.Kid, err)
		return 0, err
	}
	if !p.cfg.OwnsMark(s.Mark) {
		return 0, fmt.Errorf("session %s: mark %#x is not one of this instance", s.ID, s.Mark)
	}
	e, replaced, err := p.sessions.put(s, p.cfg.Virtual)
	for _, old := range replaced {
		n := old.close(reason.Stopped, "another session took its place")
		p.recordPolicy(audit.EventPolicyRemoved, old, audit.OutcomeOK, reason.Stopped, "another session took its place", n)
	}
	switch {
	case errors.Is(err, ErrStale):
	case err != nil:
		p.recordPolicy(audit.EventPolicyLoaded, &entry{doc: s}, audit.OutcomeFail, reason.PolicyNotLoaded, err.Error(), 0)
	default:
		cut = e.judgeAgain()
		e.watch()
		p.recordPolicy(audit.EventPolicyLoaded, e, audit.OutcomeOK, reason.OK, "", cut)
	}
	return cut, err
}

// recordUnreadable tells of a document for a kid that cannot be used. What was in force before stays so.
func (p *Proxy) recordUnreadable(kid string, err error) {
	doc := &session.Session{Kid: kid}
	if e := p.sessions.kid(kid); e != nil {
		doc = e.doc
	}
	p.recordPolicy(audit.EventPolicyLoaded, &entry{doc: doc}, audit.OutcomeFail, reason.PolicyNotLoaded, err.Error(), 0)
}

// Remove forgets the kid's session. When it returns, all its connections are cut. It returns how many there
// were; a kid that is not known is no error.
func (p *Proxy) Remove(kid string) int {
	e := p.sessions.remove(kid)
	if e == nil {
		return 0
	}
	n := e.close(reason.Stopped, "the session was taken away")
	p.recordPolicy(audit.EventPolicyRemoved, e, audit.OutcomeOK, reason.OK, "", n)
	return n
}

// goodbye is how long connections may take to write their last record when the proxy ends.
const goodbye = 5 * time.Second

// Serve serves both listeners until ctx ends; then it closes them, cuts every connection, waits for their
// records and returns nil. A proxy serves once.
func (p *Proxy) Serve(ctx context.Context, explicit, transparent *net.TCPListener) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make(chan error, 3)
	var loops sync.WaitGroup
	loops.Go(func() { errs <- p.acceptLoop(ctx, explicit, viaExplicit); stop() })
	loops.Go(func() { errs <- p.acceptLoop(ctx, transparent, viaTransparent); stop() })
	loops.Go(func() { errs <- p.serveWeb(ctx); stop() })
	loops.Go(func() { p.reap(ctx) })
	loops.Go(func() { p.forget(ctx) })
	if p.cfg.Revocations != nil {
		loops.Go(func() { p.carrying.watch(ctx, p.cfg.Revocations) })
	}
	loops.Go(func() { trimPipes(ctx) })
	<-ctx.Done()
	explicit.Close()    // ends its loop
	transparent.Close() // ends its loop
	for _, e := range p.sessions.all() {
		e.close(reason.Stopped, "the proxy is ending")
	}
	p.cancel()    // what belongs to no session
	p.web.Close() // all of its connections are cut
	loops.Wait()
	p.waitForConns()
	p.floods.tellAll()
	return errors.Join(<-errs, <-errs, <-errs)
}

func (p *Proxy) waitForConns() {
	done := make(chan struct{})
	go func() { p.running.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(goodbye):
		p.cfg.Log.Error("ending with connections that did not end in time")
	}
}

// admit decides in the accept loop whether a connection is served at all. A refusal there costs next to
// nothing, however many there are: no goroutine, and a record for each second instead of each connection.
func (p *Proxy) admit(tc *sock, via string) *conn {
	c := p.newConn(tc, via)
	c.sess = p.sessions.find(c.kid.Addr())
	code := reason.UnknownSession
	if c.sess != nil {
		code = c.sess.join(c, &p.cfg.Limits)
	}
	if code == reason.OK {
		return c
	}
	reset(tc)
	c.cancel()
	p.floods.add(c, code)
	return nil
}

// handle is one connection's whole life, once it was admitted.
func (p *Proxy) handle(c *conn) {
	p.cfg.Metrics.Active(c.via, 1)
	defer p.cfg.Metrics.Active(c.via, -1)
	defer c.cancel()
	defer c.survive()
	defer c.sess.leave(c)
	defer c.letGo()
	defer c.end()
	c.who() // the kernel remembers the process only for so long
	if c.via == viaTransparent {
		p.serveTransparent(c)
	} else {
		p.serveExplicit(c)
	}
}

// survive keeps a bug in the handling of one connection from ending the road of every kid. The connection
// itself is refused.
func (c *conn) survive() {
	bug := recover()
	if bug == nil {
		return
	}
	c.p.cfg.Log.Error("handling a connection", "panic", fmt.Sprint(bug), "conn", c.id, "stack", string(debug.Stack()))
	c.cut(reason.Internal, "a bug in the proxy")
	c.recordRefused(refusal{code: reason.Internal, detail: "a bug in the proxy"})
}

// end closes what is still open and writes the last record.
func (c *conn) end() {
	for _, tc := range c.sockets() {
		tc.Close() // nothing is lost
	}
	c.client.Close() // nothing is lost
	c.p.carrying.forget(c)
	c.recordClosed()
}

// serveTransparent serves a connection that the firewall sent here.
func (p *Proxy) serveTransparent(c *conn) {
	t, err := p.destination(c)
	if err != nil {
		c.refuseInItsWords(*err, nil)
		return
	}
	d := c.aim(t)
	if d.Verdict != policy.Allow {
		c.refuseInItsWords(refuseBy(d), nil)
		return
	}
	p.speak(c, t, d.Rule, nil)
}

// speak goes on in the protocol that the rule names. seen is what the client has sent already.
func (p *Proxy) speak(c *conn, t target, rule *policy.Rule, seen []byte) {
	switch rule.Protocol {
	case policy.TCP:
		p.tunnel(c, t, rule, seen, nil)
	case policy.TLS:
		c.established()
		p.serveTLS(c, t, rule, seen)
	case policy.HTTP:
		c.established()
		c.recordOpened("")
		p.serveRequests(c, &layer{scheme: "http", fixed: t}, c.client, seen)
		c.hangUp()
	default:
		c.refuseInItsWords(refusal{reason.Internal, "unknown protocol " + string(rule.Protocol), rule}, seen)
	}
}

// established answers a CONNECT, where there is one to answer.
func (c *conn) established() {
	if !c.pending {
		return
	}
	c.pending = false
	c.client.Write([]byte("HTTP/1.1 200 Connection established\r\n\r\n")) // the client is gone: the next read says so
}

// tunnel relays a connection as it is. first is sent before the client's next bytes; ahead is those of them that
// were read already, and follows once a TLS server has answered.
func (p *Proxy) tunnel(c *conn, t target, rule *policy.Rule, first, ahead []byte) {
	u, err := c.dial(c.ctx, t, rule, c.sess.doc.Mark)
	if err != nil {
		c.refuseInItsWords(asRefusal(err), first)
		return
	}
	c.established()
	c.recordOpened("")
	c.mu.Lock()
	c.tunnel = u.tcp
	c.mu.Unlock()
	if rule.Protocol == policy.TCP {
		err = c.firstBytes(first, rule)
	}
	if err == nil {
		err = c.pass(u, upward, u.tcp, first)
	}
	if err == nil && rule.Protocol == policy.TLS {
		err = c.watchRetry(u, t.name, ahead)
	}
	if err == nil {
		err = relay(c, u)
	}
	var why refusal
	switch {
	case errors.As(err, &why):
		c.blame(why.code, why.detail)
		c.recordStray(why)
	case err != nil:
		c.say("broken off: " + oneLine(err))
	}
	if err != nil {
		reset(c.client)
		reset(u.tcp)
	}
}

// asRefusal finds the refusal in an error chain; an error without one is a failure to reach the server.
func asRefusal(err error) refusal {
	var x refusal
	if errors.As(err, &x) {
		return x
	}
	return refusal{code: reason.DialFailed, detail: oneLine(err)}
}
