package proxy

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"

	"tagout/internal/reason"
)

// h2Streams is how many requests a kid may have open on one connection.
const h2Streams = 100

// h2Buffers is what a connection with HTTP/2 may make the proxy keep.
const h2Buffers = h2FromKid + h2FromServer

// h2Conn is the socket below a TLS connection that the HTTP server reads as HTTP/2. The server wants the
// *tls.Conn itself, so its layer hangs here.
type h2Conn struct {
	*replayConn
	layer *layer
}

// Close tells that the HTTP server is done: the socket belongs to the conn, which closes it. Before that it
// breaks a handshake off that takes too long.
func (h *h2Conn) Close() error {
	if h.layer.h2 {
		return h.layer.Close()
	}
	return h.replayConn.Close()
}

// serveH2 serves a connection on which the client chose HTTP/2, inside inspected TLS. When it returns, the
// handlers of all its requests have ended.
func (p *Proxy) serveH2(l *layer, tc *tls.Conn) {
	defer l.closeIdle()
	if !l.c.hold(h2Buffers) {
		l.c.full()
		return
	}
	p.feedWeb(l, tc)
	l.c.cancel() // the connection is gone: so is what was asked for on it
	l.handlers.wait()
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
