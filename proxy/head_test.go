package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"tagout/internal/reason"
)

const goodHead = "GET /v1/x HTTP/1.1\r\nHost: api.vendor.test\r\n\r\n"

var headCases = []struct {
	name, raw string
	want      []reason.Code // one for every request
}{
	{"plain", goodHead, []reason.Code{reason.OK}},
	{"pipelined", goodHead + goodHead, []reason.Code{reason.OK, reason.OK}},
	{"body", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello" + goodHead, []reason.Code{reason.OK, reason.OK}},
	{"chunked", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nT: 1\r\n\r\n" + goodHead, []reason.Code{reason.OK, reason.OK}},
	{"both lengths", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"length twice", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", []reason.Code{reason.AmbiguousHTTP}},
	{"length with a sign", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\nhello", []reason.Code{reason.AmbiguousHTTP}},
	{"length as a list", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\nhello", []reason.Code{reason.AmbiguousHTTP}},
	{"odd coding", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"two codings", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"coding in HTTP/1.0", "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"blank before the colon", "GET / HTTP/1.1\r\nHost: a\r\nContent-Length : 5\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"folded line", "GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n b\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"Host twice", "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"no Host", "GET / HTTP/1.1\r\nX: 1\r\n\r\n", []reason.Code{reason.HostMismatch}},
	{"absolute target, same Host", "GET http://a/ HTTP/1.1\r\nHost: A:80\r\n\r\n", []reason.Code{reason.OK}},
	{"absolute target, other Host", "GET http://a/ HTTP/1.1\r\nHost: b\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"https target", "GET https://a/ HTTP/1.1\r\nHost: a\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"bare line feeds", "GET / HTTP/1.1\nHost: a\n\n", []reason.Code{reason.AmbiguousHTTP}},
	{"one bare line feed", "GET / HTTP/1.1\r\nHost: a\nX: 1\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"bare carriage return", "GET / HTTP/1.1\r\nHost: a\rX: 1\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"NUL", "GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"chunk with a bare line feed", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n", []reason.Code{reason.OK}},
	{"chunk longer than its size", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n" + goodHead, []reason.Code{reason.OK}},
	{"second one bad", goodHead + "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + goodHead, []reason.Code{reason.OK, reason.AmbiguousHTTP}},
	{"TLS", "\x16\x03\x01\x00\x05", []reason.Code{reason.NotHTTP}},
	{"HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", []reason.Code{reason.NotHTTP}},
	{"two blanks", "GET  / HTTP/1.1\r\nHost: a\r\n\r\n", []reason.Code{reason.NotHTTP}},
	{"HTTP/0.9", "GET /\r\n\r\n", []reason.Code{reason.NotHTTP}},
	{"SSH", "SSH-2.0-OpenSSH_9.2\r\n", []reason.Code{reason.NotHTTP}},
	{"body on a WebSocket", "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 1\r\n\r\nx", []reason.Code{reason.AmbiguousHTTP}},
	{"Expect of something else", "POST / HTTP/1.1\r\nHost: a\r\nExpect: 200-ok\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
	{"too long", "GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", 70<<10) + "\r\n\r\n", []reason.Code{reason.AmbiguousHTTP}},
}

// through reads raw through the checker as the HTTP server would, in random pieces, and returns the requests
// that a server sees beside what the checker says about each.
func through(raw string, piece int) (reqs []*http.Request, bodies []string, facts []head) {
	h := newHeadConn(&scriptConn{in: &pieces{r: strings.NewReader(raw), n: piece}}, nil)
	br := bufio.NewReader(h)
	for {
		req, err := http.ReadRequest(br)
		if err != nil {
			return reqs, bodies, facts
		}
		f, ok := h.take()
		if !ok {
			return append(reqs, req), append(bodies, ""), facts // one more than the checker saw
		}
		body, err := io.ReadAll(req.Body)
		h.finish()
		reqs, bodies, facts = append(reqs, req), append(bodies, string(body)), append(facts, f)
		if err != nil || f.tunnel || f.code != reason.OK {
			return reqs, bodies, facts
		}
	}
}

type pieces struct {
	r io.Reader
	n int
}

func (p *pieces) Read(b []byte) (int, error) { return p.r.Read(b[:min(len(b), p.n)]) }

// E14: what can be read in two ways is refused, and every request in a pipeline is seen.
func TestHeadVerdicts(t *testing.T) {
	for _, tc := range headCases {
		for _, piece := range []int{1, 13, 1 << 20} {
			_, _, facts := through(tc.raw, piece)
			var got []reason.Code
			for _, f := range facts {
				got = append(got, f.code)
			}
			if fmt.Sprint(got) != fmt.Sprint(tc.want) {
				t.Errorf("%s in pieces of %d: %v, want %v", tc.name, piece, got, tc.want)
			}
		}
	}
}

// Without the checker, Go's server accepts requests that others read differently: that is what the checker is
// for, and this shows that the cases above would pass without it.
func TestHeadsThatPassWithoutTheChecker(t *testing.T) {
	for _, name := range []string{"both lengths", "bare line feeds", "absolute target, other Host", "folded line", "length twice"} {
		for _, tc := range headCases {
			if tc.name != name {
				continue
			}
			if _, err := http.ReadRequest(bufio.NewReader(strings.NewReader(tc.raw))); err != nil {
				t.Errorf("%s is refused by net/http itself: %v", name, err)
			}
		}
	}
}

// FuzzHead: whatever net/http reads out of the checker is exactly what the checker judged, request by request.
func FuzzHead(f *testing.F) {
	for _, tc := range headCases {
		f.Add(tc.raw)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		reqs, bodies, facts := through(raw, 1+rand.IntN(40))
		if len(reqs) != len(facts) {
			t.Fatalf("net/http reads %d requests, the checker saw %d", len(reqs), len(facts))
		}
		for i, r := range reqs {
			fact := facts[i]
			if fact.code != reason.OK {
				if r.Host != "refused.invalid" || bodies[i] != "" {
					t.Fatalf("request %d was refused and still came through: %q %q", i, r.Host, bodies[i])
				}
				continue
			}
			host := fact.host
			if fact.authority != "" {
				host = fact.authority
			}
			if r.Method != fact.method || r.RequestURI != fact.target || !strings.EqualFold(r.Host, host) && !strings.Contains(host, "@") {
				t.Fatalf("request %d: net/http reads %s %q %q, the checker %s %q %q", i, r.Method, r.RequestURI, r.Host, fact.method, fact.target, host)
			}
			if !strings.Contains(raw, bodies[i]) && len(r.TransferEncoding) == 0 {
				t.Fatalf("request %d has a body that was never sent", i)
			}
		}
	})
}

// A client that closes its half early still gets its answer: the end of the stream is held back until then.
func TestHeadConnHoldsTheEndBack(t *testing.T) {
	h := newHeadConn(&scriptConn{in: strings.NewReader(goodHead)}, nil)
	br := bufio.NewReader(h)
	_, err := http.ReadRequest(br)
	must(t, err)
	got := make(chan error, 1)
	go func() { _, err := br.Read(make([]byte, 1)); got <- err }()
	select {
	case err := <-got:
		t.Fatalf("the end came at once: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	h.mu.Lock()
	h.aborted = true // as SetReadDeadline in the past does, on a real connection
	h.mu.Unlock()
	h.waiting.Broadcast()
	if err := <-got; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("an aborted read ends with %v", err)
	}
	h.mu.Lock()
	h.aborted = false
	h.mu.Unlock()
	h.finish()
	if _, err := br.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Fatalf("after the answer the end is %v", err)
	}
}

func TestMask(t *testing.T) {
	secrets := []secret{{"a", "s3cr3t-s3cr3t!"}, {"b", "tok"}}
	text := "x s3cr3t-s3cr3t! s3cr3t-s3cr3t-s3cr3t! tok s3cr3t-s3c"
	want := strings.ReplaceAll(text, "s3cr3t-s3cr3t!", strings.Repeat("*", 14))
	for piece := 1; piece < 20; piece++ {
		m := newMask(secrets)
		src := &pieces{r: strings.NewReader(text), n: piece}
		var out bytes.Buffer
		buf := make([]byte, 16)
		for {
			n, err := m.read(src, buf)
			out.Write(buf[:n])
			if err != nil {
				break
			}
		}
		if out.String() != want {
			t.Errorf("in pieces of %d: %q, want %q", piece, out.String(), want)
		}
	}
}
