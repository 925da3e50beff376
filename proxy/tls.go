package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// serveTLS reads the ClientHello, holds it against the name, and relays or inspects.
func (p *Proxy) serveTLS(c *conn, t target, rule *policy.Rule, seen []byte) {
	h, raw, ahead, err := c.readHello(seen)
	if err == nil {
		if code, detail := h.judge(t.name); code != reason.OK {
			err = &helloError{code, detail}
		}
		if why := c.strayName(h.serverName, rule); why != nil {
			err = *why
		}
	}
	if err != nil {
		x := helloRefusal(err, rule)
		if len(raw) == 0 { // nothing was said: there is nothing to answer
			c.recordRefused(x)
			reset(c.client)
			return
		}
		c.refuseInItsWords(x, raw)
		return
	}
	c.letGo()
	if rule.Inspect {
		p.inspect(c, t, append(raw, ahead...))
		return
	}
	p.tunnel(c, t, rule, raw, ahead)
}

// readHello reads the client's whole ClientHello, as it came in raw; ahead is what was read behind it. With an
// error, which is a *helloError, a refusal or what the socket says, raw is everything that was read.
func (c *conn) readHello(seen []byte) (h *hello, raw, ahead []byte, err error) {
	c.client.SetReadDeadline(time.Now().Add(c.p.cfg.Limits.Hello)) // closed: the read says so
	defer c.client.SetReadDeadline(time.Time{})                    // closed: whoever is next finds out
	var a helloAssembler
	buf := make([]byte, 4<<10)
	for next := seen; ; {
		if len(next) > 0 && !c.hold(len(next)) {
			return nil, append(a.raw, next...), nil, refusal{code: reason.Capacity, detail: "the kid's connections keep too much waiting"}
		}
		done, err := a.feed(next)
		if err != nil {
			return nil, a.raw, nil, err
		}
		if done {
			h, err := parseHello(a.msg)
			return h, a.raw[:a.pos:a.pos], a.raw[a.pos:], err
		}
		n, err := c.client.Read(buf)
		if n == 0 && err != nil {
			return nil, a.raw, nil, err
		}
		next = buf[:n]
	}
}

func helloRefusal(err error, rule *policy.Rule) refusal {
	var he *helloError
	var full refusal
	switch {
	case errors.As(err, &full):
		full.rule = rule
		return full
	case errors.As(err, &he):
		return refusal{he.code, he.detail, rule}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return refusal{reason.Idle, "no whole ClientHello came in time", rule}
	case errors.Is(err, io.EOF):
		return refusal{reason.NotTLS, "closed before a whole ClientHello", rule}
	}
	return refusal{reason.NotTLS, "broken off before a whole ClientHello: " + oneLine(err), rule}
}

// inspect ends the client's TLS here, with a certificate for the name, and judges every request inside.
func (p *Proxy) inspect(c *conn, t target, raw []byte) {
	leaf, err := p.cfg.CA.leaf(t.name)
	if err != nil {
		c.refuseInItsWords(refusal{code: reason.Internal, detail: oneLine(err)}, raw)
		return
	}
	c.recordOpened("inspected")
	l := &layer{c: c, scheme: "https", fixed: t, done: make(chan struct{})}
	tc := tls.Server(&replayConn{Conn: c.client, first: raw}, &tls.Config{
		Certificates: []tls.Certificate{*leaf}, MinVersion: tls.VersionTLS12,
		NextProtos: protocols(true), SessionTicketsDisabled: true,
	})
	ctx, cancel := context.WithTimeout(c.ctx, p.cfg.Limits.Hello)
	err = tc.HandshakeContext(ctx)
	cancel()
	if err != nil {
		c.say("the client did not finish the handshake: does it trust the instance's CA, and speak HTTP? " + oneLine(err))
		c.hangUp()
		return
	}
	if l.h2 = tc.ConnectionState().NegotiatedProtocol == "h2"; l.h2 {
		p.serveH2(l, tc)
	} else {
		p.serveRequests(c, l, tc, nil)
	}
	tc.SetWriteDeadline(time.Now().Add(sniffTime)) // closed: nothing to say goodbye to
	tc.CloseWrite()                                // the client is gone
	c.hangUp()
}

// replayConn gives back what was read too early.
type replayConn struct {
	net.Conn
	first []byte
}

func (r *replayConn) Read(p []byte) (int, error) {
	if len(r.first) > 0 {
		n := copy(p, r.first)
		r.first = r.first[n:]
		return n, nil
	}
	return r.Conn.Read(p)
}
