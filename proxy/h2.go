package proxy

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"

	"tagout/internal/reason"
)

// h2Streams is how many requests a kid may have open on one connection.
const h2Streams = 100

// h2Buffers is what a connection with HTTP/2 may make the proxy keep.
const h2Buffers = h2FromKid + h2FromServer

// serveH2 serves a connection on which the client chose HTTP/2, inside inspected TLS. When it returns, the
// handlers of all its requests have ended.
func (p *Proxy) serveH2(l *layer, tc *tls.Conn) {
	defer l.closeIdle()
	if !l.c.hold(h2Buffers) {
		l.c.full()
		return
	}
	if n, err := readPreface(tc, p.cfg.Limits.Hello); err != nil {
		detail := "no HTTP/2 where HTTP/2 was agreed on: " + oneLine(err)
		if n == 0 { // nothing was asked for
			l.c.say(detail)
		} else {
			l.c.recordUnjudged(refusal{code: reason.Malformed, detail: detail}, 1)
		}
		return
	}
	tap := newH2Tap(tc, l)
	p.feedWeb(l, tap)
	l.c.cancel() // the connection is gone: so is what was asked for on it
	l.handlers.wait()
	l.recordUnjudged(tap)
}

// readPreface makes sure that the client speaks HTTP/2 (RFC 9113, 3.4): the HTTP server would take anything else
// for HTTP/1.1, of which no head was checked. n is how many bytes came, whatever the error.
func readPreface(tc *tls.Conn, patience time.Duration) (n int, err error) {
	got := make([]byte, len(http2.ClientPreface))
	if err := tc.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return 0, err
	}
	if n, err = io.ReadFull(tc, got); err != nil {
		return n, err
	}
	if string(got) != http2.ClientPreface {
		return n, errors.New("another beginning")
	}
	return n, tc.SetReadDeadline(time.Time{})
}

// recordUnjudged writes about requests that the HTTP/2 server refused for their form before they came to the
// judge, and about frames for which it gave the connection up; one record for all of them.
func (l *layer) recordUnjudged(tap *h2Tap) {
	opened, refused, goAway := tap.seen()
	n := opened - l.served.Load()
	why := refusal{code: reason.Malformed, detail: fmt.Sprintf("%d of %d requests: the head is too long or against RFC 9113", n, opened)}
	switch {
	case goAway != "":
		why.detail = fmt.Sprintf("frames against RFC 9113 (%s), %d of %d requests not judged", goAway, n, opened)
	case n <= 0:
		return
	case tap.leaving():
		why.code, why.detail = reason.Idle, "asked for while the connection was being closed"
	case refused >= n:
		why.code, why.detail = reason.Capacity, fmt.Sprintf("%d requests too many at once", n)
	}
	l.c.recordUnjudged(why, max(n, 1))
}

// h2Head reads what an HTTP/2 request says about itself. The server has checked its form (RFC 9113, 8.2 and
// 8.3); what is left are the places where two readers could disagree.
func h2Head(r *http.Request) head {
	f := head{method: r.Method, target: r.RequestURI, host: r.Host}
	hosts := r.Header["Host"]
	delete(r.Header, "Host")
	refuse := func(code reason.Code, detail string) head {
		f.code, f.detail = code, detail
		return f
	}
	switch {
	case f.host == "":
		return refuse(reason.HostMismatch, "no :authority")
	case len(hosts) > 1:
		return refuse(reason.AmbiguousHTTP, fmt.Sprintf("Host %d times", len(hosts)))
	case len(hosts) == 1 && secureHost(hosts[0]) != secureHost(f.host):
		return refuse(reason.HostMismatch, fmt.Sprintf(":authority says %q, Host says %q", clip(f.host, 255), clip(hosts[0], 255)))
	case !httpguts.ValidHostHeader(f.host):
		return refuse(reason.NameInvalid, fmt.Sprintf(":authority %q", clip(f.host, 255)))
	case f.method != http.MethodConnect && f.target != "*" && !strings.HasPrefix(f.target, "/"):
		return refuse(reason.AmbiguousHTTP, "a :path that is not one")
	}
	for i := range len(f.target) {
		if b := f.target[i]; b <= 0x20 || b >= 0x7f || b == '#' {
			return refuse(reason.AmbiguousHTTP, "a byte in :path that belongs in no path")
		}
	}
	return f
}

// secureHost is an authority without the port that https implies.
func secureHost(authority string) string {
	return strings.TrimSuffix(lowerASCII(authority), ":443")
}
