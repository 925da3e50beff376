package proxy

import (
	"bufio"
	"compress/gzip"
	"compress/lzw"
	"compress/zlib"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/zstd"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// ask sends raw on c and returns the responses, one for each of the requests.
func ask(t testing.TB, c net.Conn, raw string, n int) []*http.Response {
	t.Helper()
	io.WriteString(c, raw)
	br := bufio.NewReader(c)
	var out []*http.Response
	for range n {
		resp, err := http.ReadResponse(br, nil)
		must(t, err)
		body, err := io.ReadAll(resp.Body)
		must(t, err)
		resp.Body = io.NopCloser(strings.NewReader(string(body)))
		out = append(out, resp)
	}
	return out
}

// codes returns for each response the reason of its refusal, OK where there was none.
func codes(t testing.TB, resps []*http.Response) []reason.Code {
	t.Helper()
	var out []reason.Code
	for _, r := range resps {
		code := reason.OK
		if r.StatusCode >= 400 {
			code = problemOf(t, r).Reason
		}
		out = append(out, code)
	}
	return out
}

func get(host, path string) string { return "GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n" }

// E12, E14 and E18, by the same table over plain HTTP and inside inspected TLS: every request of a connection
// is judged on its own, and only what is allowed reaches the server.
func TestRequestsAreJudgedOneByOne(t *testing.T) {
	for _, secure := range []bool{false, true} {
		for _, tc := range []struct {
			name, raw string
			want      []reason.Code
		}{
			{"allowed", get(apiHost, "/v1/x?q=1"), []reason.Code{reason.OK}},
			{"pipelined, second with another Host", get(apiHost, "/v1/a") + get("evil.test", "/v1/b"), []reason.Code{reason.OK, reason.HostMismatch}},
			{"pipelined, third fine again", get(apiHost, "/v1/a") + get(apiHost, "/admin") + get(apiHost, "/v1/b"), []reason.Code{reason.OK, reason.PathDenied, reason.OK}},
			{"pipelined, second ambiguous", get(apiHost, "/v1/a") + "GET /v1/b HTTP/1.1\r\nHost: " + apiHost + "\r\nHost: evil.test\r\n\r\n", []reason.Code{reason.OK, reason.AmbiguousHTTP}},
			{"other Host", get("evil.test", "/v1/x"), []reason.Code{reason.HostMismatch}},
			{"Host with another port", get(apiHost+":1", "/v1/x"), []reason.Code{reason.HostMismatch}},
			{"Host in capitals", get("API.Vendor.Test", "/v1/x"), []reason.Code{reason.OK}},
			{"POST", "POST /v1/x HTTP/1.1\r\nHost: " + apiHost + "\r\nContent-Length: 2\r\n\r\nhi", []reason.Code{reason.MethodDenied}},
			{"DELETE", "DELETE /v1/x HTTP/1.1\r\nHost: " + apiHost + "\r\n\r\n", []reason.Code{reason.MethodDenied}},
			{"dot segments", get(apiHost, "/v1/../admin"), []reason.Code{reason.PathDenied}},
			{"hidden dot segments", get(apiHost, "/v1%2f..%2fadmin"), []reason.Code{reason.AmbiguousHTTP}},
			{"both lengths", "GET /v1/x HTTP/1.1\r\nHost: " + apiHost + "\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
			{"bare line feeds", "GET /v1/x HTTP/1.1\nHost: " + apiHost + "\n\n", []reason.Code{reason.AmbiguousHTTP}},
			{"absolute target that differs", "GET http://evil.test/v1/x HTTP/1.1\r\nHost: " + apiHost + "\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
			{"absolute target of another host", "GET http://evil.test/v1/x HTTP/1.1\r\nHost: evil.test\r\n\r\n", []reason.Code{reason.HostMismatch}},
			{"userinfo", "GET http://api.vendor.test@evil.test/v1/x HTTP/1.1\r\nHost: api.vendor.test@evil.test\r\n\r\n", []reason.Code{reason.NameInvalid}},
			{"CONNECT inside", "CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n", []reason.Code{reason.HostMismatch}},
			{"CONNECT to itself inside", "CONNECT api.vendor.test HTTP/1.1\r\nHost: api.vendor.test\r\n\r\n", []reason.Code{reason.MethodDenied}},
			{"an upgrade that a server may ignore", "GET /v1/x HTTP/1.1\r\nHost: " + apiHost + "\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n\r\n", []reason.Code{reason.OK}},
			{"not HTTP", "\x00\x01\x02", []reason.Code{reason.NotHTTP}},
		} {
			t.Run(fmt.Sprintf("%s, secure %v", tc.name, secure), func(t *testing.T) {
				w := newWorld(t)
				var reached atomic.Int64
				h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
					reached.Add(1)
					if r.Method != "GET" || !strings.HasPrefix(r.URL.Path, "/v1/") || r.Header.Get("Upgrade") != "" || r.Header.Get("Connection") != "" {
						t.Errorf("the server got %s %s %v", r.Method, r.URL, r.Header)
					}
				})
				c, port := w.judged(secure, h, func(r *policy.Rule) { r.Methods, r.Paths = []string{"GET"}, []string{"/v1/*"} })
				if got := codes(t, ask(t, c, tc.raw, len(tc.want))); fmt.Sprint(got) != fmt.Sprint(tc.want) {
					t.Errorf("got %v, want %v", got, tc.want)
				}
				passed := int64(0)
				for _, code := range tc.want {
					if code == reason.OK {
						passed++
						continue
					}
					rec := w.records.wait(t, "the refusal", func(r audit.Record) bool { return r.Event == audit.EventRequest && r.Reason == code })
					if rec.Conn == "" || rec.Dst.Addr != w.virtual(apiHost) {
						t.Errorf("record %+v", rec)
					}
					if code == reason.HostMismatch && !strings.Contains(rec.Detail, apiHost) {
						t.Errorf("detail %q", rec.Detail)
					}
				}
				if reached.Load() != passed {
					t.Errorf("%d requests reached the server at port %d, want %d", reached.Load(), port, passed)
				}
			})
		}
	}
}

// judged starts a server with handler h, allows it with an edited rule, and returns a judged connection to it.
func (w *world) judged(secure bool, h http.Handler, edit func(*policy.Rule)) (net.Conn, uint16) {
	w.t.Helper()
	var names []string
	if secure {
		names = []string{apiHost}
	}
	at := w.web(h, names...)
	r := rule(apiHost, at.Port(), policy.HTTP)
	if secure {
		r.Protocol, r.Inspect = policy.TLS, true
	}
	if edit != nil {
		edit(&r)
	}
	w.allow(r)
	c := w.dialName(apiHost, at.Port())
	if !secure {
		return c, at.Port()
	}
	return w.inspectedConn(c), at.Port()
}

func TestExplicitHTTP(t *testing.T) {
	w := newWorld(t)
	at := w.web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, r.Host+r.URL.Path) }))
	w.allow(rule(apiHost, at.Port(), policy.HTTP), rule(fileHost, at.Port(), policy.HTTP), rule("tls.vendor.test", at.Port(), policy.TLS))
	abs := func(authority, path string) string {
		return "GET http://" + authority + path + " HTTP/1.1\r\nHost: " + authority + "\r\n\r\n"
	}
	port := fmt.Sprintf(":%d", at.Port())
	resps := ask(t, w.dial(w.explicit), abs(apiHost+port, "/a")+abs("evil.test", "/")+abs(fileHost+port, "/b")+abs("0x7f.1", "/")+
		abs("[64:ff9b::7f00:1]", "/")+abs("tls.vendor.test"+port, "/")+get(apiHost, "/"), 7)
	want := []reason.Code{reason.OK, reason.NameNotAllowed, reason.OK, reason.RawAddress, reason.RawAddress, reason.NotTLS, reason.HostAddress}
	if got := codes(t, resps); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	for i, want := range map[int]string{0: apiHost + port + "/a", 2: fileHost + port + "/b"} {
		if body, _ := io.ReadAll(resps[i].Body); string(body) != want {
			t.Errorf("answer %q, want %q", body, want)
		}
	}
}

// E21: a denied target of a redirect is refused promptly and readably, with one record.
func TestDeniedRedirect(t *testing.T) {
	w := newWorld(t)
	at := w.web(http.RedirectHandler("http://evil.test/x", http.StatusFound))
	w.allow(rule(apiHost, at.Port(), policy.HTTP))
	client := &http.Client{Timeout: patience, Transport: &http.Transport{
		Proxy: http.ProxyURL(mustURL(t, "http://"+w.explicit.String())),
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return w.tryDial(kidAddr, w.explicit)
		},
	}}
	defer client.CloseIdleConnections()
	resp, err := client.Get(fmt.Sprintf("http://%s:%d/", apiHost, at.Port()))
	must(t, err)
	if p := problemOf(t, resp); resp.StatusCode != 403 || p.Reason != reason.NameNotAllowed || p.Name != "evil.test" || p.Hint == "" {
		t.Errorf("%d %+v", resp.StatusCode, p)
	}
	w.records.wait(t, "refusal", event(audit.EventRequest, audit.OutcomeDeny))
	n := 0
	for _, r := range w.records.all() {
		if r.Outcome == audit.OutcomeDeny {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d records of the refusal", n)
	}
}

const (
	token      = "tgo_abcdefghijklmnopqrstuvwxyz234567"
	otherToken = "tgo_zbcdefghijklmnopqrstuvwxyz234567"
	realValue  = "sk-real-value-of-the-secret"
)

func credd(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
	refuse := func(code reason.Code) (wire.ResolveReply, error) {
		return wire.ResolveReply{}, &control.Error{Problem: wire.Problem{Status: 403, Reason: code}}
	}
	switch {
	case req.Mark != kidMark || req.Token != token:
		return refuse(reason.TokenUnknown)
	case req.Host != apiHost:
		return refuse(reason.TokenScope)
	}
	return wire.ResolveReply{Secret: "api", Value: realValue}, nil
}

// The kid's token becomes the secret on its way out, wherever it stands in a header, and the secret does not
// come back.
func TestTokensAreSwappedAtEveryUse(t *testing.T) {
	w := newWorld(t)
	var uses atomic.Int64
	w.tokens.resolve = func(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
		uses.Add(1)
		return credd(ctx, req)
	}
	var mu sync.Mutex
	var got []string
	c, _ := w.judged(true, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_, password, _ := r.BasicAuth()
		value := r.Header.Get("Authorization")
		if password != "" {
			value = "basic " + password
		}
		mu.Lock()
		got = append(got, value+r.Header.Get("X-Api-Key"))
		mu.Unlock()
		rw.Header().Set("X-Echo", r.Header.Get("X-Api-Key"))
		fmt.Fprintf(rw, "you sent %s", r.Header)
	}), func(r *policy.Rule) { r.Credential = "api" })
	with := func(header string) string {
		return "GET / HTTP/1.1\r\nHost: " + apiHost + "\r\nAccept-Encoding: gzip\r\n" + header + "\r\n\r\n"
	}
	resps := ask(t, c, with("Authorization: Bearer "+token)+with("X-Api-Key: "+token)+
		with("Authorization: Basic "+base64.StdEncoding.EncodeToString([]byte("user:"+token)))+with("X-None: 1"), 4)
	for _, r := range resps {
		body, _ := io.ReadAll(r.Body)
		if text := fmt.Sprint(string(body), r.Header); strings.Contains(text, realValue) || r.StatusCode != 200 {
			t.Errorf("the secret came back: %d %s", r.StatusCode, text)
		}
	}
	if want := []string{"Bearer " + realValue, realValue, "basic " + realValue, ""}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the server got %q", got)
	}
	if n := uses.Load(); n != 3 {
		t.Errorf("credd was asked %d times for 3 uses", n)
	}
	rec := w.records.wait(t, "a use", func(r audit.Record) bool { return r.Fields["secrets"] == "api" })
	if strings.Contains(fmt.Sprintf("%+v", rec), realValue) {
		t.Error("the record holds the value")
	}
}

// TestSecretsHaveSocketsOfTheirOwn: the kernel tells by the mark which sockets a revocation is about, so requests with
// and without a secret never share one, whether they go by a line or by an HTTP client.
func TestSecretsHaveSocketsOfTheirOwn(t *testing.T) {
	w := newWorld(t)
	w.tokens.resolve = credd
	var mu sync.Mutex
	secretive, plain := map[string]bool{}, map[string]bool{}
	c, _ := w.judged(true, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if r.Header.Get("X-Api-Key") == realValue {
			secretive[r.RemoteAddr] = true
		} else {
			plain[r.RemoteAddr] = true
		}
	}), func(r *policy.Rule) { r.Credential = "api" })
	var all string
	for range 2 {
		for _, head := range []string{"GET / HTTP/1.1\r\n", "POST / HTTP/1.1\r\nContent-Length: 0\r\n"} {
			for _, field := range []string{"X-Api-Key: " + token, "X-None: 1"} {
				all += head + "Host: " + apiHost + "\r\n" + field + "\r\n\r\n"
			}
		}
	}
	for _, r := range ask(t, c, all, 8) {
		if r.StatusCode != http.StatusOK {
			t.Errorf("answered %d", r.StatusCode)
		}
	}
	if len(secretive) == 0 || len(plain) == 0 {
		t.Fatalf("sockets with secrets %v, without %v", secretive, plain)
	}
	for at := range secretive {
		if plain[at] {
			t.Errorf("%s carried both", at)
		}
	}
	if n := w.secretive.Load(); n != int64(len(secretive)) {
		t.Errorf("%d sockets are marked for secrets, %d carried some", n, len(secretive))
	}
}

// TestSecretsDoNotComeBack (invariant 3): services that show what they were sent exist, and a kid may ask one on
// purpose. Whatever part of the answer holds the secret, in the forms in which such services write it down, the
// kid does not get it; and an answer that cannot be looked through does not reach it.
func TestSecretsDoNotComeBack(t *testing.T) {
	const value = "s3cr+t/va=lue <with> \"all\" %20 of it"
	shown := map[string]string{
		"hex": hex.EncodeToString([]byte(value)), "query": url.QueryEscape(value), "base64": base64.StdEncoding.EncodeToString([]byte(value)),
		"basic": base64.StdEncoding.EncodeToString([]byte("u:" + value)), "base64url": base64.URLEncoding.EncodeToString([]byte("me:" + value)),
	}
	js, err := json.Marshal(map[string]string{"authorization": value})
	must(t, err)
	shown["json"] = string(js)
	handler := func(rw http.ResponseWriter, r *http.Request) {
		switch kind := strings.TrimPrefix(r.URL.Path, "/"); kind {
		case "trailer":
			rw.Header().Set("Trailer", "X-Echo")
			io.WriteString(rw, "body")
			rw.Header().Set("X-Echo", value)
		case "gzip", "br", "zstd", "deflate", "gzip+trailer", "unknown":
			coding, _, _ := strings.Cut(kind, "+")
			rw.Header().Set("Content-Encoding", coding)
			rw.Header().Set("Trailer", "X-Echo")
			z := packers[coding](rw)
			io.WriteString(z, "body "+value)
			z.Close()
			rw.Header().Set("X-Echo", value)
		case "not http", "bad header":
			nc, _, err := http.NewResponseController(rw).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer nc.Close()
			io.WriteString(nc, map[string]string{"not http": "", "bad header": "HTTP/1.1 200 OK\r\n"}[kind]+value+"\r\n\r\n")
		default:
			io.WriteString(rw, "body "+shown[kind])
		}
	}
	for kind, status := range map[string]int{
		"trailer": 200, "gzip": 200, "gzip+trailer": 200, "br": 200, "zstd": 200, "deflate": 200, "unknown": 502, "not http": 502, "bad header": 502,
		"hex": 200, "query": 200, "base64": 200, "basic": 200, "base64url": 200, "json": 200,
	} {
		t.Run(kind, func(t *testing.T) {
			w := newWorld(t)
			w.tokens.resolve = func(context.Context, wire.ResolveRequest) (wire.ResolveReply, error) {
				return wire.ResolveReply{Secret: "api", Value: value}, nil
			}
			c, _ := w.judged(false, http.HandlerFunc(handler), func(r *policy.Rule) { r.Credential = "api" })
			resp := ask(t, c, "GET /"+url.PathEscape(kind)+" HTTP/1.1\r\nHost: "+apiHost+"\r\nX-Key: "+token+"\r\n\r\n", 1)[0]
			body, err := io.ReadAll(resp.Body)
			must(t, err)
			if resp.StatusCode != status || status == 200 && !strings.HasPrefix(string(body), "body") {
				t.Errorf("%d %q", resp.StatusCode, body)
			}
			text := fmt.Sprintf("%s %v %v", body, resp.Header, resp.Trailer)
			// Ten bytes from the middle give it away in whatever alignment and quoting.
			for _, hint := range []string{value[4:14], `t\/va=lue`, hex.EncodeToString([]byte(value[4:14])), url.QueryEscape(value[4:14]), shown["base64"][8:16], shown["basic"][8:16], shown["base64url"][8:16]} {
				if strings.Contains(text, hint) {
					t.Errorf("the secret came back, %q is in %s", hint, text)
				}
			}
		})
	}
}

// packers make what the proxy's decoders read, and something that nobody reads.
var packers = map[string]func(io.Writer) io.WriteCloser{
	"gzip":    func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"br":      func(w io.Writer) io.WriteCloser { return brotli.NewWriter(w) },
	"deflate": func(w io.Writer) io.WriteCloser { return zlib.NewWriter(w) },
	"unknown": func(w io.Writer) io.WriteCloser { return lzw.NewWriter(w, lzw.MSB, 8) },
	"zstd": func(w io.Writer) io.WriteCloser {
		z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		if err != nil {
			panic(err)
		}
		return z
	},
}

// canary is a credd whose tokens are all canaries'.
func canary(context.Context, wire.ResolveRequest) (wire.ResolveReply, error) {
	return wire.ResolveReply{}, &control.Error{Problem: wire.Problem{Status: http.StatusForbidden, Reason: reason.Canary}}
}

// TestATokenInTheTarget: no token passes in a path or in a query's names, whatever it is, and a canary's is told apart.
func TestATokenInTheTarget(t *testing.T) {
	for _, target := range []string{"/" + token, "/?" + token + "=key", "/a%5f%74%67%6f%5f" + token[4:], "/?" + strings.ToUpper(token)} {
		w := newWorld(t)
		var asked atomic.Pointer[func(context.Context, wire.ResolveRequest) (wire.ResolveReply, error)]
		w.tokens.resolve = func(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
			if !req.None {
				t.Error("credd was asked for the value of a token that is not to be swapped")
			}
			return (*asked.Load())(ctx, req)
		}
		c, _ := w.judged(false, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), func(r *policy.Rule) { r.Credential = "api" })
		for _, tc := range []struct {
			resolve func(context.Context, wire.ResolveRequest) (wire.ResolveReply, error)
			want    reason.Code
		}{{credd, reason.TokenScope}, {canary, reason.Canary}} {
			asked.Store(&tc.resolve)
			resp := ask(t, c, "GET "+target+" HTTP/1.1\r\nHost: "+apiHost+"\r\n\r\n", 1)[0]
			if p := problemOf(t, resp); resp.StatusCode != 403 || p.Reason != tc.want {
				t.Errorf("%s: %d %v, want %v", target, resp.StatusCode, p.Reason, tc.want)
			}
		}
	}
}

func TestTokenRefusals(t *testing.T) {
	for _, tc := range []struct {
		name, token, credential string
		resolve                 func(context.Context, wire.ResolveRequest) (wire.ResolveReply, error)
		want                    reason.Code
	}{
		{"unknown", otherToken, "api", credd, reason.TokenUnknown},
		{"the rule names another secret", token, "billing", credd, reason.TokenScope},
		{"the rule names no secret", token, "", credd, reason.TokenScope},
		{"a canary", token, "api", canary, reason.Canary},
		{"a canary where no secret belongs", token, "", canary, reason.Canary},
		{"credd is dead", token, "api", func(context.Context, wire.ResolveRequest) (wire.ResolveReply, error) {
			return wire.ResolveReply{}, errors.New("connection refused")
		}, reason.CreddDown},
		{"credd is late", token, "api", func(ctx context.Context, _ wire.ResolveRequest) (wire.ResolveReply, error) {
			<-ctx.Done()
			return wire.ResolveReply{}, ctx.Err()
		}, reason.CreddDown},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, func(c *Config) { c.Limits.Tokens = 50 * time.Millisecond })
			w.tokens.resolve = tc.resolve
			c, _ := w.judged(false, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the request reached the server") }),
				func(r *policy.Rule) { r.Credential = tc.credential })
			resp := ask(t, c, "GET / HTTP/1.1\r\nHost: "+apiHost+"\r\nX-Key: "+tc.token+"\r\n\r\n", 1)[0]
			if got := problemOf(t, resp).Reason; got != tc.want || resp.StatusCode != 403 {
				t.Errorf("%d %v", resp.StatusCode, got)
			}
		})
	}
}

// A body that can be read in two ways, or that ends early, is the kid's fault and not the server's: the kid is
// told so, and the record says so. The same request with a whole body passes.
func TestBrokenBodies(t *testing.T) {
	const post = "POST / HTTP/1.1\r\nHost: " + apiHost + "\r\n"
	for _, tc := range []struct {
		name, raw string
		want      reason.Code
	}{
		{"whole", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", reason.OK},
		{"a size that is none", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nxyz\r\n", reason.AmbiguousHTTP},
		{"a bare line feed", "Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n", reason.AmbiguousHTTP},
		{"longer than its size", "Transfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n", reason.AmbiguousHTTP},
		{"a folded trailer", "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX: 1\r\n y\r\n\r\n", reason.AmbiguousHTTP},
		{"chunks that end early", "Transfer-Encoding: chunked\r\n\r\n5\r\nhel", reason.Malformed},
		{"a length that is not reached", "Content-Length: 10\r\n\r\nhello", reason.Malformed},
	} {
		for _, secure := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, secure %v", tc.name, secure), func(t *testing.T) {
				w := newWorld(t)
				c, _ := w.judged(secure, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }), nil)
				io.WriteString(c, post+tc.raw)
				if tc.want == reason.Malformed {
					must(t, c.(interface{ CloseWrite() error }).CloseWrite())
				}
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				must(t, err)
				if tc.want == reason.OK {
					if resp.StatusCode != 200 {
						t.Errorf("status %d", resp.StatusCode)
					}
					return
				}
				if got := problemOf(t, resp).Reason; got != tc.want || resp.StatusCode != 403 {
					t.Errorf("%d %v, want 403 %v", resp.StatusCode, got, tc.want)
				}
				rec := w.records.wait(t, "the request", func(r audit.Record) bool { return r.Event == audit.EventRequest })
				if rec.Reason != tc.want || rec.Outcome != audit.OutcomeDeny {
					t.Errorf("recorded %s %v %s", rec.Outcome, rec.Reason, rec.Detail)
				}
			})
		}
	}
}

// Events come through one by one, while the server still writes.
func TestStreamsAreNotHeldBack(t *testing.T) {
	for _, kind := range []string{"text/event-stream", "application/x-ndjson"} {
		w := newWorld(t)
		next := make(chan struct{})
		c, _ := w.judged(true, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Content-Type", kind)
			for i := range 3 {
				fmt.Fprintf(rw, "data: %d\n\n", i)
				http.NewResponseController(rw).Flush()
				<-next
			}
		}), nil)
		io.WriteString(c, get(apiHost, "/"))
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		must(t, err)
		for i := range 3 {
			buf := make([]byte, 9)
			_, err := io.ReadFull(resp.Body, buf)
			must(t, err)
			if want := fmt.Sprintf("data: %d\n\n", i); string(buf) != want {
				t.Errorf("event %q, want %q", buf, want)
			}
			next <- struct{}{}
		}
	}
}

// An answer that breaks off upstream breaks off for the kid too, instead of looking complete.
func TestBrokenAnswersLookBroken(t *testing.T) {
	w := newWorld(t)
	c, _ := w.judged(false, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprint(rw, "half of it")
		http.NewResponseController(rw).Flush()
		panic(http.ErrAbortHandler)
	}), nil)
	io.WriteString(c, get(apiHost, "/"))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	must(t, err)
	if body, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("read %q without an error", body)
	}
}

func TestBodiesStreamBothWays(t *testing.T) {
	w := newWorld(t)
	const size = 8 << 20
	c, _ := w.judged(true, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		rw.Header().Set("Content-Length", fmt.Sprint(n))
		io.CopyN(rw, zeros{}, n)
	}), nil)
	go func() {
		fmt.Fprintf(c, "POST /up HTTP/1.1\r\nHost: %s\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", apiHost, size)
		io.CopyN(c, zeros{}, size)
	}()
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	must(t, err)
	if resp.StatusCode == http.StatusContinue {
		resp, err = http.ReadResponse(br, nil)
		must(t, err)
	}
	n, err := io.Copy(io.Discard, resp.Body)
	if n != size || err != nil {
		t.Errorf("got %d bytes, %v", n, err)
	}
	rec := w.records.wait(t, "the request", event(audit.EventRequest, audit.OutcomeAllow))
	if *rec.Bytes != (audit.Bytes{Up: size, Down: size}) || rec.Fields["status"] != "200" || rec.Fields["path"] != "/up" {
		t.Errorf("record %+v %+v", rec.Bytes, rec.Fields)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// E26: a client that closes its half right after the request gets its whole answer.
func TestHalfClosedHTTPClient(t *testing.T) {
	w := newWorld(t)
	c, _ := w.judged(false, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
			t.Error("the request was given up")
		case <-time.After(50 * time.Millisecond): // long enough for the end of the stream to arrive
		}
		fmt.Fprint(rw, "answer")
	}), nil)
	io.WriteString(c, get(apiHost, "/"))
	must(t, c.(*net.TCPConn).CloseWrite())
	got, err := io.ReadAll(c)
	if err != nil || !strings.HasSuffix(string(got), "answer") {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestARefusedUploadIsTaken: a client that sends all it has before it reads gets the answer, not a reset.
func TestARefusedUploadIsTaken(t *testing.T) {
	for _, secure := range []bool{false, true} {
		w := newWorld(t)
		c, _ := w.judged(secure, http.NotFoundHandler(), func(r *policy.Rule) { r.Methods = []string{"GET"} })
		body := make([]byte, 4<<20)
		fmt.Fprintf(c, "POST /v1/x HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n", apiHost, len(body))
		_, sent := c.Write(body)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if sent != nil || err != nil {
			t.Fatalf("secure %v: sent with %v, answered with %v", secure, sent, err)
		}
		raw, err := io.ReadAll(resp.Body)
		if resp.StatusCode != http.StatusForbidden || err != nil || !strings.Contains(string(raw), "method-not-allowed") {
			t.Errorf("secure %v: %d %q %v", secure, resp.StatusCode, raw, err)
		}
	}
}

func TestWebSocketsPassOnceAgreed(t *testing.T) {
	w := newWorld(t)
	const wish = "GET /ws HTTP/1.1\r\nHost: " + apiHost + "\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
	h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			t.Errorf("the server got %v", r.Header)
		}
		c, buf, err := http.NewResponseController(rw).Hijack()
		must(t, err)
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		io.Copy(c, buf)
	})
	c, _ := w.judged(true, h, nil)
	early := string(clientFrame(true, 1, "early frame"))
	io.WriteString(c, wish+early)
	if head := readHead(t, c); !strings.HasPrefix(head, "HTTP/1.1 101 ") {
		t.Fatal(head)
	}
	buf := make([]byte, len(early))
	_, err := io.ReadFull(c, buf)
	must(t, err)
	if string(buf) != early {
		t.Errorf("echoed %q", buf)
	}
	c.Close()
	w.records.wait(t, "the end", event(audit.EventConnClosed, audit.OutcomeOK))
}

// A server that does not agree ends the connection: what the client sends next was never judged.
func TestDeclinedWebSocketEndsTheConnection(t *testing.T) {
	w := newWorld(t)
	var reached atomic.Int64
	c, _ := w.judged(false, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Add(1) }), nil)
	io.WriteString(c, "GET /ws HTTP/1.1\r\nHost: "+apiHost+"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"+get(apiHost, "/smuggled"))
	got, err := io.ReadAll(c)
	if err != nil || strings.Count(string(got), "HTTP/1.1 ") != 1 || reached.Load() != 1 {
		t.Errorf("%d requests reached the server: %q, %v", reached.Load(), got, err)
	}
}

// Whatever comes to goproxy past the judge finds no way out: its own diallers would use sockets without a mark.
func TestGoproxyHasNoWayOutOfItsOwn(t *testing.T) {
	w := newWorld(t)
	at := listen(t, serverAddr, 0, func(net.Conn) { t.Error("goproxy dialled by itself") })
	front := listen(t, gateway, 0, func(c net.Conn) {
		l := &oneConn{c: make(chan net.Conn, 1)}
		l.c <- c
		srv := &http.Server{Handler: w.proxy.mitm, ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateClosed || s == http.StateHijacked {
				l.once.Do(func() { close(l.c) })
			}
		}}
		srv.Serve(l)
	})
	c, err := net.Dial("tcp4", front.String())
	must(t, err)
	defer c.Close()
	must(t, c.SetDeadline(time.Now().Add(patience)))
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\n", at)
	if got, _ := io.ReadAll(c); strings.Contains(string(got), " 200 ") {
		t.Errorf("answer %q", got)
	}
}

type oneConn struct {
	c    chan net.Conn
	once sync.Once
}

func (l *oneConn) Accept() (net.Conn, error) {
	if c, ok := <-l.c; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}
func (l *oneConn) Close() error   { return nil }
func (l *oneConn) Addr() net.Addr { return &net.TCPAddr{} }
