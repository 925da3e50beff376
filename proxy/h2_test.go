package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// h2web starts an HTTPS server for apiHost that speaks HTTP/2 and HTTP/1.1.
func (w *world) h2web(h http.Handler) netip.AddrPort {
	w.t.Helper()
	l, err := net.Listen("tcp4", netip.AddrPortFrom(serverAddr, 0).String())
	must(w.t, err)
	srv := &http.Server{Handler: h, TLSConfig: &tls.Config{Certificates: []tls.Certificate{w.vendor.issue(w.t, apiHost)}}}
	go srv.ServeTLS(l, "", "")
	w.t.Cleanup(func() { srv.Close() })
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// allowInspected allows an inspected rule to at.
func (w *world) allowInspected(at netip.AddrPort, edit func(*policy.Rule)) {
	w.t.Helper()
	r := rule(apiHost, at.Port(), policy.TLS)
	r.Inspect = true
	if edit != nil {
		edit(&r)
	}
	w.allow(r)
}

// h2client returns Go's own HTTP/2 client of a kid, all of whose requests go over one connection.
func (w *world) h2client(at netip.AddrPort) *http.Client {
	tr := &http.Transport{
		Protocols:       new(http.Protocols),
		TLSClientConfig: &tls.Config{RootCAs: w.inspector.pool()},
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			c := w.dialName(apiHost, at.Port())
			c.SetDeadline(zeroTime)
			return c, nil
		},
	}
	tr.Protocols.SetHTTP2(true)
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: patience}
}

func urlOf(at netip.AddrPort, path string) string {
	return fmt.Sprintf("https://%s:%d%s", apiHost, at.Port(), path)
}

func TestHTTP2OnBothSides(t *testing.T) {
	w := newWorld(t)
	at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(rw, "%s %s %s", r.Proto, r.Host, r.URL.Path)
	}))
	w.allowInspected(at, func(r *policy.Rule) { r.Methods, r.Paths = []string{"GET"}, []string{"/v1/*"} })
	c := w.h2client(at)
	resp, err := c.Get(urlOf(at, "/v1/x?q=1"))
	must(t, err)
	body, err := io.ReadAll(resp.Body)
	must(t, err)
	if want := fmt.Sprintf("HTTP/2.0 %s:%d /v1/x", apiHost, at.Port()); resp.ProtoMajor != 2 || string(body) != want {
		t.Fatalf("%s %q, want %q", resp.Proto, body, want)
	}
	for _, tc := range []struct {
		method, path string
		code         reason.Code
	}{
		{"POST", "/v1/x", reason.MethodDenied}, {"DELETE", "/v1/x", reason.MethodDenied}, {"GET", "/v2/x", reason.PathDenied},
		{"GET", "/v1/%2e%2e/admin", reason.AmbiguousHTTP},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tc.method, urlOf(at, tc.path), nil)
		must(t, err)
		resp, err := c.Do(req)
		must(t, err)
		if p := problemOf(t, resp); resp.StatusCode != 403 || resp.ProtoMajor != 2 || p.Reason != tc.code {
			t.Errorf("%s %s: %s, reason %v, want %v", tc.method, tc.path, resp.Status, p.Reason, tc.code)
		}
	}
	rec := w.records.wait(t, "the request", event(audit.EventRequest, audit.OutcomeAllow))
	if rec.Fields["path"] != "/v1/x" || rec.Fields["status"] != "200" || rec.Bytes.Down != int64(len(body)) {
		t.Errorf("%+v %+v", rec.Fields, rec.Bytes)
	}
}

// rawH2 is an HTTP/2 client without any manners of its own.
type rawH2 struct {
	t    testing.TB
	conn net.Conn
	fr   *http2.Framer
	id   uint32
}

// block is a head of name, value, name, value, …
func (c *rawH2) block(fields ...string) []byte {
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for i := 0; i < len(fields); i += 2 {
		must(c.t, enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}))
	}
	return block.Bytes()
}

// untilEnd reads until the stream is answered, or the connection given up.
func (c *rawH2) untilEnd(stream uint32) {
	for {
		f, err := c.fr.ReadFrame()
		if err != nil || f.Header().Type == http2.FrameGoAway {
			return
		}
		if f.Header().StreamID == stream && (f.Header().Flags.Has(http2.FlagDataEndStream) || f.Header().Type == http2.FrameRSTStream) {
			return
		}
	}
}

// untilGone reads until the connection is given up.
func (c *rawH2) untilGone() { c.untilEnd(0xffffffff) }

func (w *world) rawH2(at netip.AddrPort) *rawH2 {
	w.t.Helper()
	return w.rawH2To(at, w.inspector)
}

// rawH2To is rawH2 towards whoever has a certificate of ca.
func (w *world) rawH2To(at netip.AddrPort, ca *authority) *rawH2 {
	w.t.Helper()
	tc := tls.Client(w.dialName(apiHost, at.Port()), &tls.Config{ServerName: apiHost, RootCAs: ca.pool(), NextProtos: []string{"h2"}})
	must(w.t, tc.Handshake())
	_, err := io.WriteString(tc, http2.ClientPreface)
	must(w.t, err)
	fr := http2.NewFramer(tc, tc)
	fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	must(w.t, fr.WriteSettings())
	return &rawH2{t: w.t, conn: tc, fr: fr, id: 1}
}

// ask sends a head of name, value, name, value, … and returns the answer's status and body; status is "reset"
// where the stream was reset.
func (c *rawH2) ask(fields ...string) (status string, body []byte) {
	c.t.Helper()
	id := c.id
	c.id += 2
	must(c.t, c.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: c.block(fields...), EndStream: true, EndHeaders: true}))
	for {
		f, err := c.fr.ReadFrame()
		must(c.t, err)
		if f.Header().StreamID != id {
			continue
		}
		switch f := f.(type) {
		case *http2.MetaHeadersFrame:
			status = f.PseudoValue("status")
		case *http2.DataFrame:
			body = append(body, f.Data()...)
		case *http2.RSTStreamFrame:
			return "reset", nil
		}
		if f.Header().Flags.Has(http2.FlagDataEndStream) {
			return status, body
		}
	}
}

// E12, and what else only a client of one's own can send: every stream is judged by itself.
func TestHTTP2HeadsThatDisagree(t *testing.T) {
	w := newWorld(t)
	at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "ok") }))
	w.allowInspected(at, nil)
	c := w.rawH2(at)
	good := fmt.Sprintf("%s:%d", apiHost, at.Port())
	for _, tc := range []struct {
		name   string
		code   reason.Code
		fields []string
	}{
		{"right", reason.OK, []string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", good}},
		{"Host instead of :authority", reason.OK, []string{":method", "GET", ":scheme", "https", ":path", "/", "host", good}},
		{":authority of another", reason.HostMismatch, []string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", "evil.test"}},
		{":authority with another port", reason.HostMismatch, []string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", apiHost + ":1"}},
		{"Host of another", reason.HostMismatch, []string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", good, "host", "evil.test"}},
		{"Host twice", reason.AmbiguousHTTP, []string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", good, "host", good, "host", good}},
		{"nobody", reason.HostMismatch, []string{":method", "GET", ":scheme", "https", ":path", "/"}},
		{"an address", reason.RawAddress, []string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", "127.0.2.1"}},
		{"a URI as :path", reason.AmbiguousHTTP, []string{":method", "GET", ":scheme", "https", ":path", "http://evil.test/", ":authority", good}},
		{"CONNECT", reason.MethodDenied, []string{":method", "CONNECT", ":authority", good}},
	} {
		status, body := c.ask(tc.fields...)
		if tc.code == reason.OK {
			if status != "200" || string(body) != "ok" {
				t.Errorf("%s: %s %q", tc.name, status, body)
			}
			continue
		}
		var p problem
		if err := json.Unmarshal(body, &p); status != "403" || err != nil || p.Reason != tc.code {
			t.Errorf("%s: %s %q, want 403 and %v", tc.name, status, body, tc.code)
		}
	}
	rec := w.records.wait(t, "the refusal", func(r audit.Record) bool { return r.Event == audit.EventRequest && r.Fields["host"] == "evil.test" })
	if !strings.Contains(rec.Detail, "evil.test") || !strings.Contains(rec.Detail, apiHost) {
		t.Errorf("the record names not both: %q", rec.Detail)
	}
}

// The control of TestHTTP2HeadsThatDisagree: where nobody looks at :authority, because the rule does not inspect,
// the stream for another host reaches the server inside the allowed connection.
func TestAuthorityOfAnotherPassesWhereNobodyLooks(t *testing.T) {
	for _, inspect := range []bool{false, true} {
		w := newWorld(t)
		at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, r.Host) }))
		w.allowInspected(at, func(r *policy.Rule) { r.Inspect = inspect })
		ca := w.vendor
		if inspect {
			ca = w.inspector
		}
		status, body := w.rawH2To(at, ca).ask(":method", "GET", ":scheme", "https", ":path", "/", ":authority", "evil.test")
		if passed := status == "200" && string(body) == "evil.test"; passed == inspect {
			t.Errorf("inspect %v: %s %q", inspect, status, body)
		}
	}
}

// Invariant 7: what the HTTP/2 server refuses by itself, before any request comes to the judge, is recorded too,
// with its number; a connection on which nothing is wrong adds no record.
func TestHTTP2ThatNeverComesToTheJudge(t *testing.T) {
	pseudo := []string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", apiHost}
	long := append(slices.Clone(pseudo), "x-long", strings.Repeat("x", 80<<10))
	for _, tc := range []struct {
		name  string
		count uint64 // 0: no record
		do    func(c *rawH2)
	}{
		{"nothing wrong", 0, func(c *rawH2) { c.ask(append(slices.Clone(pseudo), "x", "y")...) }},
		{"heads without a method", 2, func(c *rawH2) {
			for range 2 {
				if status, _ := c.ask(pseudo[2:]...); status != "reset" {
					c.t.Errorf("answered %s", status)
				}
			}
		}},
		{"a field name in capitals", 1, func(c *rawH2) { c.ask(append(slices.Clone(pseudo), "X-Up", "1")...) }},
		{"a head that is too long", 1, func(c *rawH2) {
			block := c.block(long...)
			const piece = 16 << 10
			must(c.t, c.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:piece], EndStream: true}))
			for block = block[piece:]; len(block) > piece; block = block[piece:] {
				must(c.t, c.fr.WriteContinuation(1, false, block[:piece]))
			}
			must(c.t, c.fr.WriteContinuation(1, true, block))
			c.untilEnd(1)
		}},
		{"data on a stream that is not open", 1, func(c *rawH2) {
			must(c.t, c.fr.WriteData(1, true, []byte("x")))
			c.untilGone()
		}},
		{"an even stream", 1, func(c *rawH2) {
			must(c.t, c.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 2, BlockFragment: c.block(pseudo...), EndStream: true, EndHeaders: true}))
			c.untilGone()
		}},
		{"a head that does not end", 1, func(c *rawH2) {
			must(c.t, c.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: c.block(pseudo...), EndStream: true}))
			must(c.t, c.conn.(*tls.Conn).CloseWrite())
			c.untilGone()
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			at := w.h2web(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			w.allowInspected(at, nil)
			c := w.rawH2(at)
			c.t = t
			tc.do(c)
			c.conn.Close()
			w.closed(t, func(audit.Record) bool { return true })
			var refused []audit.Record
			for _, r := range w.records.all() {
				if r.Event == audit.EventRequest && r.Outcome == audit.OutcomeDeny && r.Reason == reason.Malformed {
					refused = append(refused, r)
				}
			}
			if tc.count == 0 {
				if len(refused) != 0 {
					t.Errorf("recorded %+v", refused)
				}
				return
			}
			if len(refused) != 1 || max(refused[0].Count, 1) != tc.count || refused[0].Dst.Name != apiHost || refused[0].Kid != "kid1" {
				t.Errorf("recorded %+v", refused)
			}
		})
	}
}

// What agreed on HTTP/2 and speaks HTTP/1.1 gets nowhere: no checker has read its heads.
func TestHTTP1WhereHTTP2WasAgreedOn(t *testing.T) {
	w := newWorld(t)
	at := w.h2web(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the request reached the server") }))
	w.allowInspected(at, nil)
	tc := tls.Client(w.dialName(apiHost, at.Port()), &tls.Config{ServerName: apiHost, RootCAs: w.inspector.pool(), NextProtos: []string{"h2"}})
	io.WriteString(tc, get(apiHost, "/")+get("evil.test", "/"))
	if got, err := io.ReadAll(tc); len(got) != 0 || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
	rec := w.records.wait(t, "the refusal", event(audit.EventRequest, audit.OutcomeDeny))
	if rec.Reason != reason.Malformed {
		t.Errorf("reason %v", rec.Reason)
	}
}

// Frames are found in whatever pieces they come.
func TestFramesInPieces(t *testing.T) {
	var stream bytes.Buffer
	fr := http2.NewFramer(&stream, nil)
	must(t, fr.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 15}))
	must(t, fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 5, BlockFragment: make([]byte, 300), EndHeaders: true}))
	must(t, fr.WriteData(5, true, nil))
	must(t, fr.WriteRSTStream(7, http2.ErrCodeRefusedStream))
	must(t, fr.WriteGoAway(7, http2.ErrCodeCompression, []byte("why")))
	must(t, fr.WritePing(true, [8]byte{}))
	const want = "SETTINGS/0/ HEADERS/5/ DATA/5/ RST_STREAM/7/00000007 GOAWAY/0/0000000700000009 PING/0/ "
	for _, piece := range []int{1, 2, 9, 13, 1 << 20} {
		f, got, raw := frames{skip: 3}, "", append([]byte("PRI"), stream.Bytes()...)
		for len(raw) > 0 {
			n := min(piece, len(raw))
			f.feed(raw[:n], func(kind http2.FrameType, stream uint32, begin []byte) {
				got += fmt.Sprintf("%v/%d/%x ", kind, stream, begin)
			})
			raw = raw[n:]
		}
		if got != want {
			t.Errorf("in pieces of %d: %s", piece, got)
		}
	}
}

// A bidirectional stream as gRPC has them: each message is answered before the next one is sent, and the
// outcome stands in trailers.
func TestBidirectionalStreamWithTrailers(t *testing.T) {
	w := newWorld(t)
	at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("TE") != "trailers" {
			t.Errorf("TE %q", r.Header.Get("TE"))
		}
		rw.Header().Set("Content-Type", "application/grpc")
		rc := http.NewResponseController(rw)
		rc.Flush()
		in := bufio.NewScanner(r.Body)
		for in.Scan() {
			fmt.Fprintf(rw, "re: %s\n", in.Text())
			rc.Flush()
		}
		rw.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
		rw.Header().Set(http.TrailerPrefix+"Grpc-Message", r.Trailer.Get("X-Sum"))
	}))
	w.allowInspected(at, nil)
	pr, pw := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, urlOf(at, "/pkg.Service/Chat"), pr)
	must(t, err)
	req.Header.Set("TE", "trailers")
	req.Header.Set("Content-Type", "application/grpc")
	req.Trailer = http.Header{"X-Sum": nil}
	resp, err := w.h2client(at).Do(req)
	must(t, err)
	defer resp.Body.Close()
	answers := bufio.NewReader(resp.Body)
	for i := range 20 {
		fmt.Fprintf(pw, "message %d\n", i)
		line, err := answers.ReadString('\n')
		must(t, err)
		if line != fmt.Sprintf("re: message %d\n", i) {
			t.Fatalf("answer %q to message %d", line, i)
		}
	}
	req.Trailer.Set("X-Sum", "twenty")
	must(t, pw.Close())
	_, err = io.Copy(io.Discard, answers)
	must(t, err)
	if resp.Trailer.Get("Grpc-Status") != "0" || resp.Trailer.Get("Grpc-Message") != "twenty" {
		t.Errorf("trailers %v", resp.Trailer)
	}
}

// Many streams of one connection at once, each with a body that no memory here would hold.
func TestHTTP2StreamsAtOnce(t *testing.T) {
	w := newWorld(t)
	const size, streams = 8 << 20, 12
	at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(rw, "%d;", n)
		io.CopyN(rw, zeros{}, size)
	}))
	w.allowInspected(at, nil)
	c := w.h2client(at)
	first, err := c.Get(urlOf(at, "/")) // opens the connection that the others share
	must(t, err)
	_, err = io.Copy(io.Discard, first.Body)
	must(t, err)
	var wg sync.WaitGroup
	for range streams {
		wg.Go(func() {
			resp, err := c.Post(urlOf(at, "/"), "application/octet-stream", io.LimitReader(zeros{}, size))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			n, err := io.Copy(io.Discard, resp.Body)
			if want := int64(len(fmt.Sprintf("%d;", size)) + size); n != want || err != nil {
				t.Errorf("got %d bytes, %v, want %d", n, err, want)
			}
		})
	}
	wg.Wait()
	opened := 0
	for _, r := range w.records.all() {
		if r.Event == audit.EventConnOpened {
			opened++
		}
	}
	if opened != 1 {
		t.Errorf("%d connections for one client", opened)
	}
}

// An answer that breaks off upstream is a reset stream for the kid, and the connection lives on.
func TestHTTP2BrokenAnswers(t *testing.T) {
	w := newWorld(t)
	at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		io.WriteString(rw, "half")
		if r.URL.Path == "/broken" {
			http.NewResponseController(rw).Flush()
			panic(http.ErrAbortHandler)
		}
	}))
	w.allowInspected(at, nil)
	c := w.h2client(at)
	resp, err := c.Get(urlOf(at, "/broken"))
	must(t, err)
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("an answer that broke off looks complete")
	}
	resp, err = c.Get(urlOf(at, "/whole"))
	must(t, err)
	if _, err := io.ReadAll(resp.Body); err != nil {
		t.Error(err)
	}
}

// An upstream without HTTP/2 is spoken to in HTTP/1.1, whatever the kid speaks, and the other way round.
func TestHTTP2OnOneSideOnly(t *testing.T) {
	w := newWorld(t)
	say := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, r.Proto) })
	old := w.web(say, apiHost)
	w.allowInspected(old, nil)
	resp, err := w.h2client(old).Get(urlOf(old, "/"))
	must(t, err)
	body, _ := io.ReadAll(resp.Body)
	if resp.ProtoMajor != 2 || string(body) != "HTTP/1.1" {
		t.Errorf("%s for the kid, %s upstream", resp.Proto, body)
	}
	both := w.h2web(say)
	w.allowInspected(both, nil)
	answer := w.inspected(apiHost, both.Port(), get(apiHost, "/"))
	body, _ = io.ReadAll(answer.Body)
	if answer.ProtoMajor != 1 || string(body) != "HTTP/1.1" {
		t.Errorf("%s for the kid, %s upstream", answer.Proto, body)
	}
}

// A policy that takes one path away ends the requests for it and no others, on the same connection.
func TestNewerPolicyEndsSingleStreams(t *testing.T) {
	w := newWorld(t)
	gone := make(chan struct{})
	t.Cleanup(func() { close(gone) })
	at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(rw)
		io.WriteString(rw, "begin\n")
		rc.Flush()
		in := bufio.NewScanner(r.Body)
		for in.Scan() {
			fmt.Fprintln(rw, in.Text())
			rc.Flush()
		}
	}))
	paths := func(globs ...string) func(*policy.Rule) { return func(r *policy.Rule) { r.Paths = globs } }
	w.allowInspected(at, paths("/a", "/b"))
	c := w.h2client(at)
	open := func(path string) (*io.PipeWriter, *bufio.Reader) {
		pr, pw := io.Pipe()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, urlOf(at, path), pr)
		must(t, err)
		resp, err := c.Do(req)
		must(t, err)
		t.Cleanup(func() { pw.Close(); resp.Body.Close() })
		answers := bufio.NewReader(resp.Body)
		_, err = answers.ReadString('\n')
		must(t, err)
		return pw, answers
	}
	_, a := open("/a")
	bIn, b := open("/b")
	r := rule(apiHost, at.Port(), policy.TLS)
	r.Inspect, r.Paths = true, []string{"/b"}
	cut, err := w.proxy.Put(w.session(r))
	must(t, err)
	if cut != 1 {
		t.Errorf("cut %d, want one stream", cut)
	}
	if _, err := a.ReadString('\n'); err == nil || err == io.EOF {
		t.Errorf("the stream that is not allowed any more: %v", err)
	}
	fmt.Fprintln(bIn, "still here")
	if line, err := b.ReadString('\n'); line != "still here\n" || err != nil {
		t.Errorf("the stream that is allowed: %q, %v", line, err)
	}
	rec := w.records.wait(t, "the end", func(r audit.Record) bool { return r.Event == audit.EventRequest && r.Fields["path"] == "/a" })
	if rec.Reason != reason.PolicyChanged || rec.Outcome != audit.OutcomeDeny {
		t.Errorf("%v %v %s", rec.Outcome, rec.Reason, rec.Detail)
	}
}

func TestCurlSpeaksHTTP2(t *testing.T) {
	curl, err := exec.LookPath("curl")
	must(t, err)
	w := newWorld(t)
	at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, r.Proto) }))
	w.allowInspected(at, func(r *policy.Rule) { r.Methods = []string{"GET"} })
	ca := t.TempDir() + "/ca.pem"
	must(t, writeAll(ca, w.inspector.pem()))
	run := func(args ...string) string {
		out, err := exec.CommandContext(t.Context(), curl, append([]string{"-sS", "--http2", "--cacert", ca, "--interface", kidAddr.String(),
			"-p", "-x", "http://" + w.explicit.String(), "-w", "\n%{http_version} %{http_code}", urlOf(at, "/")}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("curl %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	if out := run(); out != "HTTP/2.0\n2 200" {
		t.Errorf("curl says %q", out)
	}
	if out := run("-X", "DELETE"); !strings.HasSuffix(out, "\n2 403") || !strings.Contains(out, "method-not-allowed") {
		t.Errorf("curl says %q", out)
	}
}
