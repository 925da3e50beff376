package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/elazarl/goproxy"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// exchange is one request and its answer.
type exchange struct {
	c       *conn
	layer   *layer
	head    head
	target  target
	rule    *policy.Rule
	start   time.Time
	refused *refusal
	swapped []secret // what was put into the request; masked in the answer
	status  int
	up      int64 // bytes of the bodies
	down    int64
	broken  error // why the answer's body ended early
}

type exchangeKey struct{}

// newMITM returns the goproxy that carries judged requests: its request hook is the judge, and what passes
// goes out through the layer's own client.
func (p *Proxy) newMITM() *goproxy.ProxyHttpServer {
	g := goproxy.NewProxyHttpServer()
	g.Logger = webLog(p.cfg.Log, slog.LevelDebug) // about clients, and those have records
	// Every request brings its own round tripper. goproxy's own ways out, whose sockets would carry no mark,
	// are closed one by one.
	g.Tr = &http.Transport{DialContext: noWayOut}
	g.ConnectDial = nil
	g.ConnectDialWithReq = func(r *http.Request, network, addr string) (net.Conn, error) {
		return noWayOut(r.Context(), network, addr)
	}
	g.OnRequest().HandleConnect(goproxy.AlwaysReject)
	g.KeepAcceptEncoding = true
	g.OnRequest().DoFunc(func(r *http.Request, ctx *goproxy.ProxyCtx) (*http.Request, *http.Response) {
		x := r.Context().Value(exchangeKey{}).(*exchange)
		ctx.RoundTripper = goproxy.RoundTripperFunc(func(r *http.Request, _ *goproxy.ProxyCtx) (*http.Response, error) {
			return x.send(r), nil
		})
		if why := p.judge(x, r); why != nil {
			return r, x.refuse(*why)
		}
		return r, nil
	})
	return g
}

func noWayOut(context.Context, string, string) (net.Conn, error) {
	return nil, errors.New("a connection that was never judged")
}

// serveRequest is called by the HTTP server for every request of every layer, in order within a layer.
func (p *Proxy) serveRequest(w http.ResponseWriter, r *http.Request) {
	l := r.Context().Value(layerKey{}).(*layer)
	x := &exchange{c: l.c, layer: l, start: time.Now()}
	var ok bool
	if x.head, ok = l.take(); !ok {
		x.head.code, x.head.detail = reason.Internal, "a request that the head checker did not see"
	}
	defer l.finish()
	if l.explicit() && x.head.code == reason.OK && x.head.method == http.MethodConnect {
		p.serveConnect(x, w)
		return
	}
	defer x.record()
	if r.Method == http.MethodConnect { // never a tunnel inside a judged connection, whatever the policy says
		why := p.judge(x, r)
		if why == nil {
			why = &refusal{code: reason.MethodDenied, detail: r.Method, rule: x.rule}
		}
		x.status = x.refuse(*why).StatusCode
		writeProblem(w, l.c.problem(*why), true)
		return
	}
	out := &responder{ResponseWriter: w, x: x}
	r = r.WithContext(context.WithValue(r.Context(), exchangeKey{}, x))
	if r.URL.Scheme == "" { // goproxy carries requests with an absolute target; the judge fills in the right one
		r.URL.Scheme, r.URL.Host = "http", "unjudged.invalid"
	}
	p.mitm.ServeHTTP(out, r)
	if out.hijacked {
		l.Close() //nolint:errcheck // a layer's Close cannot fail
		return
	}
	if x.broken != nil {
		panic(http.ErrAbortHandler) // an answer that ended early must not look complete
	}
}

// judge decides about one request by the policy in force and rewrites it to what goes upstream. What it
// judges is what it sends.
func (p *Proxy) judge(x *exchange, r *http.Request) *refusal {
	if x.head.code != reason.OK {
		return &refusal{code: x.head.code, detail: x.head.detail}
	}
	d := x.aim()
	if d.Verdict != policy.Allow {
		why := refuseBy(d)
		return &why
	}
	x.rule = d.Rule
	if why := x.checkProtocol(); why != nil {
		return why
	}
	path := r.URL.EscapedPath()
	if path == "" {
		path = "/"
	}
	d = x.c.sess.request(x.target, x.head.method, path)
	if d.Verdict != policy.Allow {
		why := refuseBy(d)
		return &why
	}
	x.rule = d.Rule // of several rules for the host and port, the one that takes this request
	x.c.recordOpened("")
	x.rewrite(r)
	return x.swapTokens(r)
}

// aim finds out where the request goes and asks whether the connection may go there.
func (x *exchange) aim() policy.Decision {
	host := x.head.host
	if x.head.authority != "" {
		host = x.head.authority
	}
	name, port, err := policy.Authority(host)
	if err != nil {
		return nameRefusal(err)
	}
	if !x.layer.explicit() {
		x.target = x.layer.fixed
		if name != x.target.name || port != 0 && port != x.target.port {
			return policy.Decision{Reason: reason.HostMismatch, Detail: fmt.Sprintf("the request says %s, the connection goes to %s port %d",
				clip(host, 255), x.target.name, x.target.port)}
		}
		return x.c.aim(x.target)
	}
	if x.head.authority == "" {
		return policy.Decision{Reason: reason.HostAddress, Detail: "this is a proxy: use CONNECT or an absolute URI"}
	}
	if port == 0 {
		port = 80
	}
	x.target = target{name, port}
	return x.c.aim(x.target)
}

// checkProtocol makes sure that the request came in the way in which the rule wants it.
func (x *exchange) checkProtocol() *refusal {
	secure := x.layer.scheme == "https"
	switch {
	case secure && (x.rule.Protocol != policy.TLS || !x.rule.Inspect):
		return &refusal{reason.NotHTTP, "the rule does not say inspected TLS", x.rule}
	case !secure && x.rule.Protocol == policy.TLS:
		return &refusal{reason.NotTLS, "the rule says TLS: use https", x.rule}
	case !secure && x.rule.Protocol != policy.HTTP:
		return &refusal{reason.NotHTTP, "the rule says " + string(x.rule.Protocol) + ": use CONNECT", x.rule}
	}
	return nil
}

// request asks the policy in force.
func (e *entry) request(t target, method, path string) policy.Decision {
	r := e.current()
	if r == nil {
		return policy.Decision{Reason: reason.PolicyNotLoaded}
	}
	return r.policy.Request(t.name, t.port, method, path)
}

// rewrite makes r the request that goes upstream: to the judged target, under the judged name, without what
// concerns only this hop (RFC 9110, 7.6.1).
func (x *exchange) rewrite(r *http.Request) {
	scheme, usual := "http", uint16(80)
	if x.layer.scheme == "https" {
		scheme, usual = "https", 443
	}
	port := strconv.Itoa(int(x.target.port))
	r.URL = &url.URL{
		Scheme: scheme, Host: net.JoinHostPort(x.target.name, port),
		Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery, ForceQuery: r.URL.ForceQuery,
	}
	r.Host = x.target.name
	if x.target.port != usual {
		r.Host = r.URL.Host
	}
	for _, option := range strings.Split(strings.Join(r.Header.Values("Connection"), ","), ",") {
		if option = strings.TrimSpace(option); !strings.EqualFold(option, "upgrade") {
			r.Header.Del(option)
		}
	}
	for _, name := range []string{"Keep-Alive", "TE", "Http2-Settings", "Proxy-Authorization", "Proxy-Connection"} {
		r.Header.Del(name)
	}
	if !x.head.tunnel {
		r.Header.Del("Upgrade")
	}
	if _, ok := r.Header["User-Agent"]; !ok {
		r.Header["User-Agent"] = []string{""} // or the client would put in its own
	}
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &countedBody{ReadCloser: r.Body, n: &x.up}
	}
}

// refuse remembers the refusal and returns the response that tells it.
func (x *exchange) refuse(why refusal) *http.Response {
	if why.rule == nil {
		why.rule = x.rule
	}
	x.refused = &why
	prob := x.c.problem(why)
	if x.target.name != "" {
		prob.Name, prob.Port = x.target.name, x.target.port
	}
	body := prob.body()
	return &http.Response{
		StatusCode: prob.Status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{
			"Content-Type":   {"application/problem+json"},
			"Content-Length": {strconv.Itoa(len(body))},
			"Cache-Control":  {"no-store"},
		},
		ContentLength: int64(len(body)), Body: io.NopCloser(bytes.NewReader(body)),
	}
}

// writeProblem answers with a problem through the HTTP server.
func writeProblem(w http.ResponseWriter, prob problem, hangUp bool) {
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	if hangUp {
		h.Set("Connection", "close")
	}
	w.WriteHeader(prob.Status)
	w.Write(prob.body()) //nolint:errcheck // the client is gone
}

// record writes what became of the request; once, when it is over.
func (x *exchange) record() {
	outcome, code, detail := audit.OutcomeAllow, reason.OK, ""
	if x.refused != nil {
		outcome, code, detail = x.refused.outcome(), x.refused.code, x.refused.detail
	} else if x.broken != nil {
		detail = "the answer ended early: " + oneLine(x.broken)
	}
	x.c.p.cfg.Metrics.Request(outcome, code)
	r := x.c.record(audit.EventRequest, outcome, code, detail)
	if x.target.name != "" {
		r.Dst.Name, r.Dst.Port = x.target.name, x.target.port
	}
	if x.rule != nil {
		r.Rule = x.rule.Line
	}
	r.Bytes = &audit.Bytes{Up: x.up, Down: x.down}
	path, _, _ := strings.Cut(x.head.target, "?") // queries carry what nobody wants in a log
	for key, value := range map[string]string{
		"method": clip(x.head.method, 40), "path": clip(path, 512), "host": clip(x.head.host, 255),
		"secrets": secretNames(x.swapped), "duration_ms": millis(time.Since(x.start)),
	} {
		if value != "" {
			r.Fields[key] = value
		}
	}
	if x.status != 0 {
		r.Fields["status"] = strconv.Itoa(x.status)
	}
	x.c.p.cfg.Audit.Log(r)
}

// countedBody counts what is read of a request's body.
type countedBody struct {
	io.ReadCloser
	n *int64
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	*b.n += int64(n)
	return n, err
}

// webLog takes what the HTTP libraries have to say.
func webLog(l *slog.Logger, level slog.Level) *log.Logger {
	return slog.NewLogLogger(l.Handler(), level)
}
