package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/tokenshape"
	"tagout/internal/wire"
)

// bound is a credd that gives the secret for a token that is shown as and where it is bound, and to nobody else.
func bound(p wire.Presentation, asked *[]wire.ResolveRequest, mu *sync.Mutex) func(context.Context, wire.ResolveRequest) (wire.ResolveReply, error) {
	return func(_ context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
		mu.Lock()
		*asked = append(*asked, req)
		mu.Unlock()
		shown := p
		shown.User = ""
		if req.Token != token || req.None || req.Host != apiHost || req.Place != shown || req.Method == "" || !strings.HasPrefix(req.Path, "/") {
			return wire.ResolveReply{}, &control.Error{Problem: wire.Problem{Status: 403, Reason: reason.TokenScope, Detail: "not here"}}
		}
		return wire.ResolveReply{Secret: "api", Value: realValue, Present: p}, nil
	}
}

// question is what credd was asked last.
type question struct {
	last atomic.Pointer[wire.ResolveRequest]
}

func (q *question) get() wire.ResolveRequest {
	if req := q.last.Load(); req != nil {
		return *req
	}
	return wire.ResolveRequest{}
}

// noneBelongs is a credd that keeps what it was asked last, and refuses it.
func noneBelongs(asked *question) func(context.Context, wire.ResolveRequest) (wire.ResolveReply, error) {
	return func(_ context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
		asked.last.Store(&req)
		return wire.ResolveReply{}, &control.Error{Problem: wire.Problem{Status: 403, Reason: reason.TokenScope, Detail: "not here"}}
	}
}

// seenRequest is a request as the server got it.
type seenRequest struct {
	method, target, body string
	header               http.Header
	length               int64
	trailer              http.Header
}

func (s *seenRequest) all() string {
	return fmt.Sprint(s.method, s.target, s.header, s.body, s.trailer)
}

// server keeps what it gets and shows it back.
type server struct {
	mu  sync.Mutex
	got []seenRequest
}

func (s *server) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	s.mu.Lock()
	s.got = append(s.got, seenRequest{r.Method, r.RequestURI, string(body), r.Header.Clone(), r.ContentLength, r.Trailer.Clone()})
	s.mu.Unlock()
	fmt.Fprintf(rw, "%s %s %s", r.RequestURI, r.Header, body)
}

func (s *server) last() (seenRequest, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.got) == 0 {
		return seenRequest{}, 0
	}
	return s.got[len(s.got)-1], len(s.got)
}

// speak is a kid's client for one of the ways in which HTTP is spoken on a judged connection.
type speak struct {
	name   string
	secure bool
	h2     bool
}

var ways = []speak{{"http", false, false}, {"inspected HTTP/1.1", true, false}, {"inspected HTTP/2", true, true}}

// client starts a server that speaks that way, allows it with an edited rule, and returns a kid's client and its base URL.
func (s speak) client(w *world, h http.Handler, edit func(*policy.Rule)) (*http.Client, string) {
	var at netip.AddrPort
	scheme := "http"
	if s.secure {
		scheme = "https"
		at = w.h2web(h)
		w.allowInspected(at, edit)
	} else {
		at = w.web(h)
		r := rule(apiHost, at.Port(), policy.HTTP)
		edit(&r)
		w.allow(r)
	}
	return s.through(w, at, w.inspector.pool()), fmt.Sprintf("%s://%s:%d", scheme, apiHost, at.Port())
}

func (s speak) through(w *world, at netip.AddrPort, roots *x509.CertPool) *http.Client {
	tr := &http.Transport{
		Protocols: new(http.Protocols), TLSClientConfig: &tls.Config{RootCAs: roots}, DisableCompression: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			c := w.dialName(apiHost, at.Port())
			c.SetDeadline(zeroTime)
			return c, nil
		},
	}
	tr.Protocols.SetHTTP1(!s.h2)
	tr.Protocols.SetHTTP2(s.h2)
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: patience, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

const (
	formType = "application/x-www-form-urlencoded"
	jsonType = "application/json; charset=utf-8"
)

// shownAt is a request that shows a token, and what the server has to get where the token is bound to that place.
type shownAt struct {
	name    string
	present wire.Presentation
	request func(base string) *http.Request
	arrives func(seenRequest) string // the part with the secret
	want    string
}

func request(method, target, body string, fields ...string) *http.Request {
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequest(method, target, r)
	if err != nil {
		panic(err)
	}
	for i := 0; i < len(fields); i += 2 {
		req.Header.Add(fields[i], fields[i+1])
	}
	return req
}

func basic(user, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

func field(name string) func(seenRequest) string {
	return func(s seenRequest) string { return s.header.Get(name) }
}

func body(s seenRequest) string { return s.body }

var placesWithSecrets = []shownAt{
	{"header", wire.Presentation{As: wire.AsHeader, Name: "X-Api-Key"},
		func(b string) *http.Request { return request("GET", b+"/v1", "", "X-Api-Key", token) }, field("X-Api-Key"), realValue},
	{"bearer", wire.Presentation{As: wire.AsBearer},
		func(b string) *http.Request { return request("GET", b+"/v1", "", "Authorization", "Bearer "+token) }, field("Authorization"), "Bearer " + realValue},
	{"basic, the password", wire.Presentation{As: wire.AsBasic},
		func(b string) *http.Request { return request("GET", b+"/v1", "", "Authorization", basic("me", token)) }, field("Authorization"), basic("me", realValue)},
	{"basic, the user", wire.Presentation{As: wire.AsBasic},
		func(b string) *http.Request { return request("GET", b+"/v1", "", "Authorization", basic(token, "")) }, field("Authorization"), basic(realValue, "")},
	{"basic with a user of its own", wire.Presentation{As: wire.AsBasic, User: "bot"},
		func(b string) *http.Request { return request("GET", b+"/v1", "", "Authorization", basic("x", token)) }, field("Authorization"), basic("bot", realValue)},
	{"query", wire.Presentation{As: wire.AsQuery, Name: "api key"},
		func(b string) *http.Request {
			return request("GET", b+"/v1?a=%41&api+key="+token+"&b=1;2", "")
		},
		func(s seenRequest) string { return s.target }, "/v1?a=%41&api+key=" + url.QueryEscape(realValue) + "&b=1;2"},
	{"cookie", wire.Presentation{As: wire.AsCookie, Name: "sid"},
		func(b string) *http.Request { return request("GET", b+"/v1", "", "Cookie", "a=1; sid="+token+"; b=2") }, field("Cookie"), "a=1; sid=" + realValue + "; b=2"},
	{"JSON", wire.Presentation{As: wire.AsBody, Name: "auth.keys.1"},
		func(b string) *http.Request {
			return request("POST", b+"/v1", ` { "a":"\u0041", "auth" : {"x":[1,{"y":2}],"keys":["k", "`+token+`" ]}, "n":1e400 }`, "Content-Type", jsonType, "Content-Md5", "x")
		}, body, ` { "a":"\u0041", "auth" : {"x":[1,{"y":2}],"keys":["k", "` + realValue + `" ]}, "n":1e400 }`},
	{"JSON, written otherwise", wire.Presentation{As: wire.AsBody, Name: "key"},
		func(b string) *http.Request {
			return request("POST", b+"/v1", `{"key":"\u0074go\u005f`+token[4:]+`"}`, "Content-Type", "application/vnd.api+json")
		}, body, `{"key":"` + realValue + `"}`},
	{"form", wire.Presentation{As: wire.AsBody, Name: "client_secret"},
		func(b string) *http.Request {
			return request("POST", b+"/token", "grant_type=client_credentials&client_secret="+token+"&x=%2f", "Content-Type", formType)
		}, body, "grant_type=client_credentials&client_secret=" + url.QueryEscape(realValue) + "&x=%2f"},
}

// TestPresentations: in each place, over each protocol, the server gets the secret and nothing else is changed, the kid
// does not get it back, and credd hears in truth where the token was. Bound to any other place it is refused.
func TestPresentations(t *testing.T) {
	for _, way := range ways {
		for _, tc := range placesWithSecrets {
			t.Run(way.name+", "+tc.name, func(t *testing.T) {
				w := newWorld(t)
				var mu sync.Mutex
				var asked []wire.ResolveRequest
				w.tokens.resolve = bound(tc.present, &asked, &mu)
				srv := &server{}
				c, base := way.client(w, srv, func(r *policy.Rule) { r.Credential = "api" })
				resp, err := c.Do(tc.request(base))
				must(t, err)
				answer, err := io.ReadAll(resp.Body)
				must(t, err)
				got, n := srv.last()
				if n != 1 || resp.StatusCode != 200 {
					t.Fatalf("%d requests arrived; answer %s %s; asked %+v", n, resp.Status, answer, asked)
				}
				if part := tc.arrives(got); part != tc.want {
					t.Errorf("the server got %q, want %q", part, tc.want)
				}
				if got.body != "" && (got.length != int64(len(got.body)) || got.header.Get("Content-Md5") != "") {
					t.Errorf("a body of %d bytes with length %d, %v", len(got.body), got.length, got.header)
				}
				for _, form := range forms(realValue) {
					if strings.Contains(string(answer), form) {
						t.Errorf("the secret came back: %s", answer)
					}
				}
				req := tc.request(base)
				if len(asked) != 1 || asked[0].Method != req.Method || asked[0].Path != req.URL.Path {
					t.Errorf("credd was asked %+v", asked)
				}
				elsewhere := wire.Presentation{As: wire.AsHeader, Name: "X-Elsewhere"}
				w.tokens.resolve = bound(elsewhere, &asked, &mu)
				resp, err = c.Do(tc.request(base))
				must(t, err)
				if p := problemOf(t, resp); resp.StatusCode != 403 || p.Reason != reason.TokenScope {
					t.Errorf("bound to another place: %s %v", resp.Status, p.Reason)
				}
				if _, n := srv.last(); n != 1 {
					t.Error("a request with a token that is bound elsewhere arrived")
				}
			})
		}
	}
}

var long = strings.Repeat("lorem ipsum ", 100_000) // longer than what is read whole

// squeezed is text in a content coding.
func squeezed(coding, text string) string {
	var b bytes.Buffer
	z := packers[coding](&b)
	io.WriteString(z, text)
	z.Close()
	return b.String()
}

// misplaced shows a token where none is ever swapped.
var misplacedTokens = []shownAt{
	{name: "path", request: func(b string) *http.Request { return request("GET", b+"/v1/"+token, "") }},
	{name: "path, encoded", request: func(b string) *http.Request { return request("GET", b+"/v1/%74go%5F"+token[4:], "") }},
	{name: "a parameter's name", request: func(b string) *http.Request { return request("GET", b+"/v1?"+token, "") }},
	{name: "method", request: func(b string) *http.Request { return request(token, b+"/v1", "") }},
	{name: "a field's name", request: func(b string) *http.Request { return request("GET", b+"/v1", "", token, "1") }},
	{name: "a cookie's name", request: func(b string) *http.Request { return request("GET", b+"/v1", "", "Cookie", token+"=1") }},
	{name: "a JSON field's name", request: func(b string) *http.Request {
		return request("POST", b+"/v1", `{"`+token+`":1}`, "Content-Type", jsonType)
	}},
	{name: "no JSON at all", request: func(b string) *http.Request {
		return request("POST", b+"/v1", `{"a":1} and `+token, "Content-Type", jsonType)
	}},
	{name: "text", request: func(b string) *http.Request {
		return request("POST", b+"/v1", "it is "+token, "Content-Type", "text/plain")
	}},
	{name: "a body of no type", request: func(b string) *http.Request { return request("POST", b+"/v1", "it is "+token) }},
	{name: "multipart", request: func(b string) *http.Request {
		return request("POST", b+"/v1", "--x\r\nContent-Disposition: form-data; name=k\r\n\r\n"+token+"\r\n--x--\r\n", "Content-Type", "multipart/form-data; boundary=x")
	}},
	{name: "a long body", request: func(b string) *http.Request {
		return request("POST", b+"/v1", `{"a":"`+long+`","key":"`+token+`"}`, "Content-Type", jsonType)
	}},
	{name: "a long text", request: func(b string) *http.Request {
		return request("POST", b+"/v1", long+token+long, "Content-Type", "text/plain")
	}},
	{name: "gzip", request: func(b string) *http.Request {
		return request("POST", b+"/v1", squeezed("gzip", `{"key":"`+token+`"}`), "Content-Type", jsonType, "Content-Encoding", "gzip")
	}},
	{name: "a long gzip", request: func(b string) *http.Request {
		return request("POST", b+"/v1", squeezed("gzip", long+token+long), "Content-Encoding", "gzip")
	}},
	{name: "br", request: func(b string) *http.Request {
		return request("POST", b+"/v1", squeezed("br", `{"key":"`+token+`"}`), "Content-Type", jsonType, "Content-Encoding", "br")
	}},
	{name: "zstd", request: func(b string) *http.Request {
		return request("POST", b+"/v1", squeezed("zstd", `{"key":"`+token+`"}`), "Content-Type", jsonType, "Content-Encoding", "zstd")
	}},
	{name: "deflate", request: func(b string) *http.Request {
		return request("POST", b+"/v1", squeezed("deflate", `{"key":"`+token+`"}`), "Content-Type", jsonType, "Content-Encoding", "deflate")
	}},
	{name: "trailer", request: func(b string) *http.Request {
		r := request("POST", b+"/v1", "text", "Content-Type", "text/plain")
		r.ContentLength, r.Trailer = -1, http.Header{"X-Sum": {token}}
		return r
	}},
	{name: "trailer of JSON", request: func(b string) *http.Request {
		r := request("POST", b+"/v1", "{}", "Content-Type", jsonType)
		r.ContentLength, r.Trailer = -1, http.Header{"X-Sum": {token}}
		return r
	}},
	{name: "SigV4A", request: func(b string) *http.Request {
		return request("GET", b+"/v1", "", "Authorization", "AWS4-ECDSA-P256-SHA256 Credential="+token+"/20260101/s3/aws4_request, SignedHeaders=host, Signature=00")
	}},
	{name: "signed chunks", request: func(b string) *http.Request {
		return request("PUT", b+"/v1", "x", "Authorization", "AWS4-HMAC-SHA256 Credential="+token+"/20260101/r/s3/aws4_request, SignedHeaders=host, Signature=00", "X-Amz-Content-Sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD")
	}},
}

// TestTokensElsewhere: a token in any place in which none is swapped, over any protocol, whether or not the rule has a
// secret, does not reach the server. There is a record with the reason, and credd was told that none belongs there. The
// control is a tunnel that nobody looks into: every one of these requests then arrives.
func TestTokensElsewhere(t *testing.T) {
	everywhere := append(append([]shownAt(nil), misplacedTokens...), placesWithSecrets...)
	for _, way := range ways {
		for _, credential := range []string{"api", ""} {
			w := newWorld(t)
			var asked atomic.Pointer[wire.ResolveRequest]
			w.tokens.resolve = func(_ context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
				asked.Store(&req)
				return wire.ResolveReply{}, &control.Error{Problem: wire.Problem{Status: 403, Reason: reason.TokenScope, Detail: "not here"}}
			}
			srv := &server{}
			c, base := way.client(w, srv, func(r *policy.Rule) { r.Credential = credential })
			tried := 0
			for i, tc := range everywhere {
				if tc.name == "method" && !way.h2 { // an HTTP/1.1 request line with such a method is none
					continue
				}
				tried++
				t.Run(fmt.Sprintf("%s, rule with %q, %s", way.name, credential, tc.name), func(t *testing.T) {
					asked.Store(nil)
					marker := fmt.Sprint("n", i)
					r := tc.request(base)
					r.Header.Set("X-Marker", marker)
					resp, err := c.Do(r)
					if err == nil {
						if p := problemOf(t, resp); resp.StatusCode != 403 || p.Reason != reason.TokenScope {
							t.Errorf("answered %s, %v", resp.Status, p.Reason)
						}
					}
					if got, _ := srv.last(); got.header.Get("X-Marker") == marker {
						t.Errorf("it arrived: %s", clip(got.all(), 600))
					}
					if req := asked.Load(); req == nil || req.Token != token || i < len(misplacedTokens) && !req.None {
						t.Errorf("credd was asked %+v", req)
					}
				})
			}
			n := 0
			for _, rec := range w.records.all() {
				if rec.Event == audit.EventRequest && rec.Outcome == audit.OutcomeDeny && rec.Reason == reason.TokenScope && rec.Detail != "" {
					n++
				}
			}
			if n != tried {
				t.Errorf("%d records of %d refusals", n, tried)
			}
		}
	}
	for _, way := range ways[1:] {
		w := newWorld(t)
		srv := &server{}
		at := w.h2web(srv)
		w.allow(rule(apiHost, at.Port(), policy.TLS))
		c := way.through(w, at, w.vendor.pool())
		for _, tc := range everywhere {
			_, before := srv.last()
			if _, err := c.Do(tc.request(fmt.Sprintf("https://%s:%d", apiHost, at.Port()))); err != nil {
				t.Errorf("control, %s, %s: %v", way.name, tc.name, err)
			}
			if _, n := srv.last(); n != before+1 {
				t.Errorf("control, %s, %s: it did not arrive", way.name, tc.name)
			}
		}
	}
}

// TestTokensInNames: a token in a host's name goes to whoever resolves it: refused as what it is, whatever the card says
// about the name, in a CONNECT, in a request and in a ClientHello.
func TestTokensInNames(t *testing.T) {
	w := newWorld(t)
	var asked question
	w.tokens.resolve = noneBelongs(&asked)
	at := w.tlsServer(func(net.Conn) { t.Error("a connection arrived") }, apiHost)
	name := strings.ToUpper(token) + ".files.vendor.test"
	w.allow(rule(apiHost, at.Port(), policy.TLS), rule("**.vendor.test", at.Port(), policy.TLS), rule("**.vendor.test", 80, policy.HTTP))
	_, head := w.connect(fmt.Sprintf("%s:%d", name, at.Port()))
	if !strings.Contains(head, " 403 ") || asked.get().Token != token || !asked.get().None {
		t.Errorf("CONNECT: %s; asked %+v", head, asked.get())
	}
	w.wantRefused(reason.TokenScope)
	asked.last.Store(nil)
	resp := ask(t, w.dial(w.explicit), "GET http://"+name+"/ HTTP/1.1\r\nHost: "+name+"\r\n\r\n", 1)[0]
	if p := problemOf(t, resp); p.Reason != reason.TokenScope || asked.get().Token != token {
		t.Errorf("a request: %v; asked %+v", p.Reason, asked.get())
	}
	asked.last.Store(nil)
	tc := tls.Client(w.dialName(apiHost, at.Port()), &tls.Config{ServerName: name, InsecureSkipVerify: true})
	if err := tc.Handshake(); err == nil {
		t.Error("a ClientHello with a token in its name was let pass")
	}
	rec := w.records.wait(t, "the hello", func(r audit.Record) bool { return r.Reason == reason.TokenScope && r.Dst.Name == apiHost })
	if asked.get().Token != token || rec.Outcome != audit.OutcomeDeny {
		t.Errorf("asked %+v, record %+v", asked.get(), rec)
	}
}

// TestTokensInATunnel: what a plain tunnel brings first is seen, and a token in it goes no further. What comes later is
// not seen, and that is the control.
func TestTokensInATunnel(t *testing.T) {
	for _, first := range []bool{true, false} {
		w := newWorld(t)
		var asked question
		w.tokens.resolve = noneBelongs(&asked)
		got := make(chan string, 1)
		at := listen(t, serverAddr, 0, func(c net.Conn) {
			buf := make([]byte, 100)
			n, _ := c.Read(buf)
			text := string(buf[:n])
			io.WriteString(c, "+")
			rest, _ := io.ReadAll(c)
			got <- text + string(rest)
		})
		w.allow(rule(apiHost, at.Port(), policy.TCP))
		c := w.dialName(apiHost, at.Port())
		if !first {
			io.WriteString(c, "HELLO\r\n")
			_, err := io.ReadFull(c, make([]byte, 1))
			must(t, err)
		}
		io.WriteString(c, "AUTH "+token+"\r\n")
		c.CloseWrite()
		io.Copy(io.Discard, c) // a reset, or the end
		if text := <-got; strings.Contains(text, token) == first {
			t.Errorf("first %t: the server got %q", first, text)
		}
		if first {
			rec := w.records.wait(t, "the token", event(audit.EventTokenRefused, audit.OutcomeDeny))
			if rec.Reason != reason.TokenScope || rec.Dst.Name != apiHost || asked.get().Token != token || asked.get().Place.As != inTunnel {
				t.Errorf("record %+v, asked %+v", rec, asked.get())
			}
		}
	}
}

// TestBodiesPass: bodies without a token arrive as they were sent, whatever they are.
func TestBodiesPass(t *testing.T) {
	text := `{"almost":"` + token[:35] + `!","n":[1.0,-0,1e3]} ` + "tgo_"
	for _, way := range ways {
		w := newWorld(t)
		w.tokens.resolve = credd
		srv := &server{}
		c, base := way.client(w, srv, func(r *policy.Rule) { r.Credential = "api" })
		for _, tc := range []struct{ kind, coding, text string }{
			{jsonType, "", text}, {jsonType, "", `{}`}, {jsonType, "", `"` + long + `"`}, {formType, "", "a=b&&c=%zz&tgo_=1"}, {"text/plain", "", long + text},
			{"", "", text}, {jsonType, "gzip", text}, {"", "gzip", long + text}, {"", "br", long}, {"", "zstd", long}, {"", "deflate", long}, {"", "unknown", text},
			{"x", "aws-chunked", "5\r\nhello\r\n0\r\n\r\n"},
		} {
			sent := tc.text
			r := request("POST", base+"/", sent, "Content-Type", tc.kind, "Authorization", "Bearer "+token)
			if tc.coding != "" {
				if packers[tc.coding] != nil {
					sent = squeezed(tc.coding, tc.text)
				}
				r = request("POST", base+"/", sent, "Content-Type", tc.kind, "Content-Encoding", tc.coding, "Authorization", "Bearer "+token)
			}
			resp, err := c.Do(r)
			must(t, err)
			answer, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatalf("%s, %s %q: %v after %d bytes; records:\n%s", way.name, tc.kind, tc.coding, err, len(answer), w.records.dump())
			}
			got, _ := srv.last()
			if got.body != sent || got.length != int64(len(sent)) || got.header.Get("Authorization") != "Bearer "+realValue {
				t.Errorf("%s, %s %q: %d bytes arrived of %d, announced %d (%s)", way.name, tc.kind, tc.coding, len(got.body), len(sent), got.length, clip(string(answer), 300))
			}
		}
		r := request("POST", base+"/", squeezed("gzip", strings.Repeat("\x00", 64<<20)), "Content-Encoding", "gzip")
		if resp, err := c.Do(r); err != nil || problemOf(t, resp).Reason != reason.Malformed {
			t.Errorf("%s: a bomb: %v", way.name, err)
		}
		r = request("POST", base+"/", "no gzip", "Content-Encoding", "gzip")
		if resp, err := c.Do(r); err != nil || problemOf(t, resp).Reason != reason.Malformed {
			t.Errorf("%s: no gzip: %v", way.name, err)
		}
	}
}

// FuzzJSON: whatever text there is for JSON, what is sent holds no token, and is what came but for the secrets.
func FuzzJSON(f *testing.F) {
	for _, s := range []string{`{"a":"` + token + `"}`, `["` + token + `","\u0074go_` + token[4:] + `"]`, `"` + token, `{"a\"":"\\` + token + `\\"}`, `{}{"b":"` + token + `"}`, "{\"x\":\"\xff" + token + `"}`} {
		f.Add([]byte(s))
	}
	w := newWorld(f)
	w.tokens.resolve = func(_ context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
		if req.None {
			return wire.ResolveReply{}, &control.Error{Problem: wire.Problem{Status: 403, Reason: reason.TokenScope}}
		}
		return wire.ResolveReply{Secret: "api", Value: "a value that no token begins in."}, nil
	}
	r := rule(apiHost, 443, policy.TLS)
	r.Credential, r.Inspect = "api", true
	w.allow(r)
	c := w.proxy.newConn(&sock{}, viaTransparent)
	c.sess = w.proxy.sessions.find(kidAddr)
	f.Fuzz(func(t *testing.T, text []byte) {
		s := &swap{x: &exchange{c: c, rule: &r}, r: &http.Request{}}
		out, why := s.json(bytes.Clone(text))
		if why != nil {
			return
		}
		if i := tokenshape.Next(out, 0); i >= 0 {
			t.Errorf("%q became %q", text, out)
		}
		if len(s.x.swapped) == 0 && !bytes.Equal(out, text) {
			t.Errorf("%q became %q without a secret", text, out)
		}
	})
}

// TestTokensAreRationed: a request with tokens in very many places is refused before credd is asked for all of them.
func TestTokensAreRationed(t *testing.T) {
	w := newWorld(t)
	var uses atomic.Int64
	w.tokens.resolve = func(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
		uses.Add(1)
		return credd(ctx, req)
	}
	srv := &server{}
	c, base := ways[1].client(w, srv, func(r *policy.Rule) { r.Credential = "api" })
	for n, want := range map[int]reason.Code{maxShown: reason.OK, maxShown + 1: reason.Capacity} {
		uses.Store(0)
		r := request("GET", base+"/", "")
		for i := range n {
			r.Header.Set(fmt.Sprint("X-Key-", i), token)
		}
		resp, err := c.Do(r)
		must(t, err)
		if code := codes(t, []*http.Response{resp})[0]; code != want || uses.Load() != maxShown {
			t.Errorf("%d places: %v after %d uses", n, code, uses.Load())
		}
	}
}

// TestDecodersAreBooked: what it takes to look into compressed bodies is on the session's share of memory, and given back.
func TestDecodersAreBooked(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.BufferPerSession = 8 << 20 })
	w.tokens.resolve = credd
	c, base := ways[1].client(w, &server{}, func(r *policy.Rule) { r.Credential = "api" })
	for coding, want := range map[string]reason.Code{"gzip": reason.OK, "br": reason.Capacity, "zstd": reason.Capacity} {
		for range 40 {
			resp, err := c.Do(request("POST", base+"/", squeezed(coding, "hello"), "Content-Encoding", coding))
			must(t, err)
			if code := codes(t, []*http.Response{resp})[0]; code != want {
				t.Fatalf("%s: %v, want %v", coding, code, want)
			}
			io.Copy(io.Discard, resp.Body)
		}
	}
}

// TestTrailersNamedAfterASecret: a server that names a field after the secret it was sent does not hand it over so.
func TestTrailersNamedAfterASecret(t *testing.T) {
	for _, way := range ways {
		w := newWorld(t)
		w.tokens.resolve = credd
		c, base := way.client(w, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Trailer", "X-Fine, X-"+realValue)
			rw.Header().Set("X-"+realValue, "1")
			rw.Header().Set("Location", "https://elsewhere.test/?key="+realValue)
			io.WriteString(rw, "body")
			rw.Header().Set("X-Fine", "yes")
			rw.Header().Set("X-"+realValue, "1")
			rw.Header().Set(http.TrailerPrefix+"X-Late-"+realValue, realValue)
		}), func(r *policy.Rule) { r.Credential = "api" })
		resp, err := c.Do(request("GET", base+"/", "", "X-Key", token))
		must(t, err)
		body, err := io.ReadAll(resp.Body)
		must(t, err)
		text := strings.ToLower(fmt.Sprint(resp.Header, resp.Trailer, string(body)))
		if strings.Contains(text, realValue) || resp.Trailer.Get("X-Fine") != "yes" || !strings.HasPrefix(resp.Header.Get("Location"), "https://elsewhere.test/?key=***") {
			t.Errorf("%s: %s", way.name, text)
		}
	}
}
