package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/sys/unix"

	"tagout/internal/session"
)

// line is a connection to the server of an HTTP/1.1 layer, for one rule, on which requests without a body are sent
// one after the other by the goroutine that has them. http.Transport, which everything else goes through, hands
// each request and each answer to a goroutine of its own: twice the waking for the same bytes.
type line struct {
	nc    net.Conn // TLS, where the layer has it
	tcp   *countedConn
	br    *bufio.Reader
	bw    *bufio.Writer
	limit *limitedReader
	idle  time.Time   // since when; zero for a line that was never used
	lapse *time.Timer // closes it when it has been idle for too long; nil where it may stay
}

// limitedReader bounds what is read of one answer's head.
type limitedReader struct {
	r    io.Reader
	left int64
}

var errLongHead = fmt.Errorf("the head of the answer is longer than %d bytes", maxResponseHead)

func (l *limitedReader) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errLongHead
	}
	n, err := l.r.Read(p[:min(int64(len(p)), l.left)])
	l.left -= int64(n)
	return n, err
}

// fitsLine says whether the request can go by a line: the layer knows its server, and nothing but an answer follows.
func (x *exchange) fitsLine(r *http.Request) bool {
	return !x.layer.h2 && !x.layer.explicit() && !x.head.tunnel && (r.Method == http.MethodGet || r.Method == http.MethodHead) &&
		(r.Body == nil || r.Body == http.NoBody) && len(r.TransferEncoding) == 0 && len(r.Header["Expect"]) == 0 && len(r.Header["Upgrade"]) == 0
}

// carry does for a request that fits a line what goproxy does for the others.
func (p *Proxy) carry(w *responder, x *exchange, r *http.Request) {
	var resp *http.Response
	if why := p.judge(x, r); why != nil {
		resp = x.refuse(*why)
	} else {
		r.RequestURI = "" // what goes upstream stands in r.URL
		r.Header.Del("Connection")
		r.Header.Del("Proxy-Authenticate")
		resp = x.send(r)
	}
	defer resp.Body.Close() // read to its end, or given up
	h := w.Header()
	maps.Copy(h, resp.Header)
	announced := len(resp.Trailer)
	for name := range resp.Trailer {
		h.Add("Trailer", name)
	}
	w.WriteHeader(resp.StatusCode)
	if resp.Body != http.NoBody {
		w.ReadFrom(resp.Body) // the client is gone, or the answer is broken, which the body knows
	}
	if len(resp.Trailer) > 0 {
		w.Flush() // or a short body would be sent with its length, and no trailer
	}
	for name, values := range resp.Trailer {
		if len(resp.Trailer) != announced {
			name = http.TrailerPrefix + name
		}
		h[name] = values
	}
}

// roundTrip sends a judged request and returns its answer.
func (x *exchange) roundTrip(r *http.Request) (*http.Response, error) {
	if !x.fitsLine(r) {
		return x.layer.client(x.road()).RoundTrip(r)
	}
	if err := checkFields(r.Header); err != nil {
		return nil, err
	}
	key := x.road()
	for {
		l := x.layer.takeLine(key)
		used := l != nil
		if !used {
			var err error
			if l, err = x.openLine(r.Context()); err != nil {
				return nil, err
			}
		}
		resp, begun, err := l.ask(x, r, key)
		if err == nil {
			return resp, nil
		}
		l.nc.Close() // already failing
		if ours := new(refusal); !used || begun || r.Context().Err() != nil || errors.As(err, ours) {
			return nil, err
		}
		// The server hung up before it could have seen the request: once more on a new line, as http.Transport does
		// with these methods.
	}
}

// road tells the sockets apart that a request may share with others: those of its rule, and never one that carries
// secrets with one that does not (see mark).
func (x *exchange) road() string {
	key := ruleKey(x.rule)
	if len(x.swapped) > 0 {
		key += secretRoad
	}
	return key
}

// secretRoad ends the key of a road for secrets.
const secretRoad = "\x00secret"

func isSecret(road string) bool { return strings.HasSuffix(road, secretRoad) }

// mark is what the exchange's upstream socket is marked with. One that carries a secret says so from before its first
// packet: when the session's secrets are revoked, the kernel drops whatever of it has not left yet, however long ago
// credd gave the secret out.
func (x *exchange) mark() uint32 {
	mark := x.c.sess.doc.Mark
	if len(x.swapped) > 0 {
		mark |= session.SecretBit
	}
	return mark
}

// checkFields makes sure that no field, a secret that was put into it included, can end early.
func checkFields(h http.Header) error {
	for name, values := range h {
		if !httpguts.ValidHeaderFieldName(name) {
			return fmt.Errorf("a field of the request has an invalid name")
		}
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return fmt.Errorf("field %s of the request has an invalid value", clip(name, 60))
			}
		}
	}
	return nil
}

func (x *exchange) openLine(ctx context.Context) (*line, error) {
	tcp, err := x.c.dialFor(ctx)
	if err != nil {
		return nil, err
	}
	l := &line{nc: tcp, tcp: tcp}
	if x.layer.scheme == "https" {
		if l.nc, err = x.c.secure(ctx, tcp, false); err != nil {
			return nil, err
		}
	}
	l.limit = &limitedReader{r: l.nc}
	l.br, l.bw = bufio.NewReader(l.limit), bufio.NewWriter(l.nc)
	return l, nil
}

// ask sends r and reads the head of the answer. begun says whether any of it came.
func (l *line) ask(x *exchange, r *http.Request, key string) (resp *http.Response, begun bool, err error) {
	stop := context.AfterFunc(r.Context(), func() { l.nc.Close() })
	defer func() {
		if err != nil {
			stop()
		}
	}()
	if err = r.Write(l.bw); err == nil {
		err = l.bw.Flush()
	}
	if err != nil {
		return nil, false, err
	}
	l.limit.left = maxResponseHead
	if _, err = l.br.Peek(1); err != nil {
		return nil, false, err
	}
	for range maxInterim {
		if resp, err = http.ReadResponse(l.br, r); err != nil {
			return nil, true, err
		}
		if resp.StatusCode >= http.StatusOK || resp.StatusCode == http.StatusSwitchingProtocols {
			l.limit.left = math.MaxInt64
			l.follow(x, r, resp, key, stop)
			return resp, true, nil
		}
	}
	return nil, true, errors.New("too many interim answers")
}

// maxInterim is how many 1xx answers may precede one.
const maxInterim = 6

// follow gives the line back to the layer once the answer has been read to its end; where it is not, or the server
// says so, the line is closed.
func (l *line) follow(x *exchange, r *http.Request, resp *http.Response, key string, stop func() bool) {
	again := !resp.Close && !r.Close && resp.StatusCode != http.StatusSwitchingProtocols
	b := &lineBody{ReadCloser: resp.Body, end: func(whole bool) {
		if stop() && whole && again && l.br.Buffered() == 0 {
			l.idle = time.Now()
			x.layer.putLine(key, l)
			return
		}
		l.nc.Close() // nothing is lost
	}}
	if resp.Body == http.NoBody && again {
		b.finish(true)
		return
	}
	resp.Body = b
}

// lineBody tells once how the body was left.
type lineBody struct {
	io.ReadCloser
	end func(whole bool)
}

func (b *lineBody) finish(whole bool) {
	if b.end != nil {
		b.end(whole)
		b.end = nil
	}
}

// Read implements io.Reader.
func (b *lineBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.finish(errors.Is(err, io.EOF))
	}
	return n, err
}

// Close implements io.Closer. What was not read is not waited for.
func (b *lineBody) Close() error {
	b.finish(false)
	return nil
}

// quiet says whether nothing has come since the last answer: neither the end, nor bytes that nobody asked for, which
// would be taken for the next answer.
func (l *line) quiet() bool {
	if time.Since(l.idle) > upstreamIdle {
		return false
	}
	var b [1]byte
	err := l.tcp.u.tcp.control(func(fd int) error {
		_, _, err := unix.Recvfrom(fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return err
	})
	if !errors.Is(err, unix.EAGAIN) {
		return false
	}
	// What TLS has read ahead is not in the kernel any more.
	l.tcp.dry = true
	_, err = l.br.Peek(1)
	l.tcp.dry = false
	return errors.Is(err, os.ErrDeadlineExceeded)
}

// takeLine returns the layer's idle line for the rule, nil where there is none that can be used.
func (l *layer) takeLine(key string) *line {
	l.mu.Lock()
	ln := l.lines[key]
	delete(l.lines, key)
	if ln != nil && ln.lapse != nil {
		ln.lapse.Stop()
	}
	l.mu.Unlock()
	if ln != nil && !ln.quiet() {
		ln.nc.Close() // nothing is lost
		return nil
	}
	return ln
}

// dropLine closes a line that is still idle.
func (l *layer) dropLine(key string, ln *line) {
	l.mu.Lock()
	idle := l.lines[key] == ln
	if idle {
		delete(l.lines, key)
	}
	l.mu.Unlock()
	if idle {
		ln.nc.Close() // nothing is lost
	}
}

func (l *layer) putLine(key string, ln *line) {
	l.mu.Lock()
	old := l.lines[key]
	if l.lines == nil {
		l.lines = map[string]*line{}
	}
	l.lines[key] = ln
	if isSecret(key) {
		ln.lapse = time.AfterFunc(secretIdle, func() { l.dropLine(key, ln) })
	}
	l.mu.Unlock()
	if old != nil {
		old.nc.Close() // nothing is lost
	}
}
