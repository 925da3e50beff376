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
	"sync"
	"sync/atomic"
	"time"

	"github.com/elazarl/goproxy"
	"golang.org/x/net/http/httpguts"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// exchange is one request and its answer.
type exchange struct {
	c       *conn
	layer   *layer
	head    head
	path    string // as judged
	target  target
	rule    *policy.Rule
	start   time.Time
	refused *refusal
	swapped []secret // what was put into the request; masked in the answer
	status  int
	up      atomic.Int64 // bytes of the bodies
	down    atomic.Int64
	broken  error                   // why the answer's body ended early
	torn    atomic.Pointer[string]  // how the request's body ended early; nil where it did not
	leak    atomic.Pointer[refusal] // a token stood in what followed the head; nil where none did
	held    int                     // bytes booked on the session for the body; owned by the goroutine that judges
	ended   atomic.Pointer[refusal] // why it was ended from outside

	mu     sync.Mutex
	out    *responder         // guarded by mu; nil before it is served and once it is over
	cancel context.CancelFunc // ends the request upstream
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

// serveRequest is called by the HTTP servers for every request of every layer: in order within a layer of
// HTTP/1.1, at the same time within one of HTTP/2.
func (p *Proxy) serveRequest(w http.ResponseWriter, r *http.Request) {
	l := r.Context().Value(layerKey{}).(*layer)
	x := &exchange{c: l.c, layer: l, start: time.Now()}
	l.begin()
	defer l.finish()
	var ok bool
	if x.head, ok = l.headOf(r); !ok {
		x.head.code, x.head.detail = reason.Internal, "a request that the head checker did not see"
	}
	if l.explicit() && x.head.code == reason.OK && x.head.method == http.MethodConnect {
		p.serveConnect(x, w)
		return
	}
	defer x.forget()
	defer x.record()
	if r.Method == http.MethodConnect { // never a tunnel inside a judged connection, whatever the policy says
		why := p.judge(x, r)
		if why == nil {
			why = &refusal{code: reason.MethodDenied, detail: r.Method, rule: x.rule}
		}
		x.c.release(x)
		x.status = x.refuse(*why).StatusCode
		writeProblem(w, x.problem(*why), !l.h2)
		return
	}
	if r.URL.Scheme == "" { // goproxy carries requests with an absolute target; the judge fills in the right one
		r.URL.Scheme, r.URL.Host = "http", "unjudged.invalid"
	}
	out := &responder{ResponseWriter: w, x: x}
	ctx, cancel := context.WithCancel(context.WithValue(r.Context(), exchangeKey{}, x))
	x.begin(out, cancel)
	if r = r.WithContext(ctx); x.fitsLine(r) {
		p.carry(out, x, r)
	} else {
		p.mitm.ServeHTTP(out, r)
	}
	x.over()
	if out.hijacked {
		l.Close()
		return
	}
	if x.broken != nil {
		panic(http.ErrAbortHandler) // an answer that ended early must not look complete
	}
}

func (x *exchange) begin(out *responder, cancel context.CancelFunc) {
	x.mu.Lock()
	x.out, x.cancel = out, cancel
	x.mu.Unlock()
}

func (x *exchange) over() {
	x.c.release(x)
	x.c.giveBack(x.held)
	x.mu.Lock()
	x.out = nil
	x.mu.Unlock()
	x.cancel()
}

// abort ends one request of an HTTP/2 connection: towards the server at once, and towards the kid with a reset
// of the stream, or with the reason while no answer has begun.
func (x *exchange) abort() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.out == nil {
		return
	}
	x.cancel()
	if x.out.begun.Load() {
		http.NewResponseController(x.out.ResponseWriter).SetWriteDeadline(time.Unix(1, 0)) // over already: then it is reset
	}
}

// judge decides about one request by the policy in force and rewrites it to what goes upstream. What it
// judges is what it sends.
func (p *Proxy) judge(x *exchange, r *http.Request) *refusal {
	if x.head.code != reason.OK {
		return &refusal{code: x.head.code, detail: x.head.detail}
	}
	if x.path = r.URL.EscapedPath(); x.path == "" {
		x.path = "/"
	}
	if why := x.c.strayName(x.head.method+" "+x.head.host+" "+x.head.authority, nil); why != nil { // whatever else is wrong with it
		return why
	}
	if why := x.aim(); why != nil {
		return why
	}
	d := x.c.admit(x)
	x.rule = d.Rule // of several rules for the host and port, the one that takes this request
	if d.Verdict != policy.Allow {
		why := refuseBy(d)
		return &why
	}
	if why := x.c.sess.limits(x.rule, rateRequests); why != nil {
		return why
	}
	x.c.recordOpened("")
	x.rewrite(r)
	return x.swapTokens(r)
}

// aim finds out where the request goes.
func (x *exchange) aim() *refusal {
	host := x.head.host
	if x.head.authority != "" {
		host = x.head.authority
	}
	name, port, err := policy.Authority(host)
	if err != nil {
		why := refuseBy(nameRefusal(err))
		return &why
	}
	if !x.layer.explicit() {
		x.target = x.layer.fixed
		if name != x.target.name || port != 0 && port != x.target.port {
			return &refusal{code: reason.HostMismatch, detail: fmt.Sprintf("the request says %s, the connection goes to %s port %d",
				clip(host, 255), x.target.name, x.target.port)}
		}
		return nil
	}
	if x.head.authority == "" {
		return &refusal{code: reason.HostAddress, detail: "this is a proxy: use CONNECT or an absolute URI"}
	}
	if port == 0 {
		port = 80
	}
	x.target = target{name, port}
	return nil
}

// judge asks a policy about the request. Nil rules deny.
func (x *exchange) judge(r *rules) policy.Decision {
	d := r.connect(x.target)
	if d.Verdict != policy.Allow {
		return d
	}
	if why := x.checkProtocol(d.Rule); why != nil {
		return policy.Decision{Rule: d.Rule, Reason: why.code, Detail: why.detail}
	}
	return r.policy.Request(x.target.name, x.target.port, x.head.method, x.path)
}

// checkProtocol makes sure that the request came in the way in which the rule wants it.
func (x *exchange) checkProtocol(rule *policy.Rule) *refusal {
	secure := x.layer.scheme == "https"
	switch {
	case secure && (rule.Protocol != policy.TLS || !rule.Inspect):
		return &refusal{reason.NotHTTP, "the rule does not say inspected TLS", rule}
	case !secure && rule.Protocol == policy.TLS:
		return &refusal{reason.NotTLS, "the rule says TLS: use https", rule}
	case !secure && rule.Protocol != policy.HTTP:
		return &refusal{reason.NotHTTP, "the rule says " + string(rule.Protocol) + ": use CONNECT", rule}
	}
	return nil
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
	trailers := x.layer.h2 && httpguts.HeaderValuesContainsToken(r.Header["Te"], "trailers")
	for _, name := range []string{"Keep-Alive", "TE", "Http2-Settings", "Proxy-Authorization", "Proxy-Connection"} {
		r.Header.Del(name)
	}
	if trailers { // gRPC servers ask for it
		r.Header.Set("TE", "trailers")
	}
	if !x.head.tunnel {
		r.Header.Del("Upgrade")
	}
	r.Header.Del("Sec-Websocket-Extensions") // they hide what is in the frames
	if _, ok := r.Header["User-Agent"]; !ok {
		r.Header["User-Agent"] = []string{""} // or the client would put in its own
	}
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &countedBody{ReadCloser: r.Body, x: x}
	}
}

// refuse remembers the refusal and returns the response that tells it.
func (x *exchange) refuse(why refusal) *http.Response {
	if why.rule == nil {
		why.rule = x.rule
	}
	x.refused = &why
	prob := x.problem(why)
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

// problem puts a refusal of the request into words for the kid.
func (x *exchange) problem(why refusal) problem {
	t := x.target
	if t.name == "" {
		t = x.c.aimedAt()
	}
	return x.c.problem(why, t)
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
	w.Write(prob.body()) // the client is gone
}

// cause says why Tagout itself ended a request that it had let pass, or what in the request made it end; nil
// where neither did.
func (x *exchange) cause() *refusal {
	if why := x.ended.Load(); why != nil {
		return why
	}
	if x.rule != nil {
		if detail, yes := x.c.sess.usage.usedUp(x.rule); yes {
			return &refusal{reason.ByteLimit, detail, x.rule}
		}
	}
	return x.fault()
}

// record writes what became of the request; once, when it is over.
func (x *exchange) record() {
	outcome, code, detail := audit.OutcomeAllow, reason.OK, ""
	switch why := x.cause(); {
	case x.refused != nil:
		outcome, code, detail = x.refused.outcome(), x.refused.code, x.refused.detail
	case x.broken != nil && why != nil:
		outcome, code, detail = why.outcome(), why.code, "the answer was cut: "+why.detail
	case x.broken != nil:
		detail = "the answer ended early: " + oneLine(x.broken)
	default:
		if why := x.fault(); why != nil { // the answer had begun by then, and came to its end
			outcome, code, detail = why.outcome(), why.code, "after the answer had begun: "+why.detail
		}
	}
	x.c.p.cfg.Metrics.Request(outcome, code)
	r := x.c.record(audit.EventRequest, outcome, code, x.unsaid(detail))
	if x.target.name != "" {
		r.Dst.Name, r.Dst.Port = x.target.name, x.target.port
	}
	if x.rule != nil {
		r.Rule = x.rule.Line
	}
	r.Bytes = &audit.Bytes{Up: x.up.Load(), Down: x.down.Load()}
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

// unsaid is text that may quote what a server said, without the secrets that the request carried.
func (x *exchange) unsaid(text string) string {
	if text == "" {
		return ""
	}
	return newMask(x.swapped).text(text)
}

// countedBody counts what is read of a request's body, and notices when it ends early.
type countedBody struct {
	io.ReadCloser
	x      *exchange
	ended  bool        // owned by whoever reads
	closed atomic.Bool // nobody wants the rest
}

// Read implements io.Reader. After the end it does not ask again: the HTTP client does, and the HTTP server closes the
// body as soon as the answer begins, which may be before that.
func (b *countedBody) Read(p []byte) (int, error) {
	if b.ended {
		return 0, io.EOF
	}
	n, err := b.ReadCloser.Read(p)
	b.x.up.Add(int64(n))
	b.ended = errors.Is(err, io.EOF)
	if err != nil && !errors.Is(err, io.EOF) && !b.closed.Load() {
		b.x.tear(err)
	}
	return n, err
}

// Close implements io.Closer.
func (b *countedBody) Close() error {
	b.closed.Store(true)
	return b.ReadCloser.Close()
}

// tear notes that the kid did not send the body that it announced. With HTTP/1.1 the head checker knows the rest;
// with HTTP/2 only what the server says, unless Tagout itself ended it.
func (x *exchange) tear(err error) {
	how := "the request's body ended early"
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
	case x.layer.h2 && x.ended.Load() == nil && x.c.ctx.Err() == nil:
		how += ": " + oneLine(err)
	default:
		return
	}
	x.torn.CompareAndSwap(nil, &how)
}

// fault says what was wrong with the request's body, or with what followed it on a WebSocket; nil where nothing was.
func (x *exchange) fault() *refusal {
	if why := x.leak.Load(); why != nil {
		return why
	}
	if !x.layer.h2 {
		if why := x.layer.bodyFault(); why != nil {
			return why
		}
	}
	if how := x.torn.Load(); how != nil {
		return &refusal{code: reason.Malformed, detail: *how}
	}
	return nil
}

// webLog takes what the HTTP libraries have to say.
func webLog(l *slog.Logger, level slog.Level) *log.Logger {
	return slog.NewLogLogger(l.Handler(), level)
}
