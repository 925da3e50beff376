package proxy

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// answerBegins waits until an answer to a request of any connection is on its way to the kid.
func (w *world) answerBegins(t testing.TB) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		for _, e := range w.proxy.sessions.all() {
			for _, c := range e.live() {
				if c.answering() {
					return
				}
			}
		}
	}
	t.Fatal("no answer has begun")
}

func (c *conn) answering() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for x := range c.requests {
		x.mu.Lock()
		begun := x.out != nil && x.out.begun.Load()
		x.mu.Unlock()
		if begun {
			return true
		}
	}
	return false
}

// The server answers before the body has come, and the kid gets that answer; what is wrong with the body then is
// no less in the record, and in that of the connection's end. The same with a whole body is allowed.
func TestBodiesThatBreakOnceAnswered(t *testing.T) {
	early := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		http.NewResponseController(rw).EnableFullDuplex() // HTTP/1.1: the answer does not wait for the body
		rw.Header().Set("Content-Length", "2")
		io.WriteString(rw, "ok")
		http.NewResponseController(rw).Flush()
		io.Copy(io.Discard, r.Body)
	})
	for _, secure := range []bool{false, true} {
		for _, tc := range []struct {
			name, rest string
			want       reason.Code
		}{
			{"whole", "0\r\n\r\n", reason.OK}, {"a size that is none", "xyz\r\n", reason.AmbiguousHTTP},
			{"a folded trailer", "0\r\nX: 1\r\n y\r\n\r\n", reason.AmbiguousHTTP},
		} {
			t.Run(fmt.Sprintf("%s, secure %v", tc.name, secure), func(t *testing.T) {
				w := newWorld(t)
				c, _ := w.judged(secure, early, nil)
				io.WriteString(c, "POST / HTTP/1.1\r\nHost: "+apiHost+"\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
				w.answerBegins(t)
				io.WriteString(c, tc.rest)
				if head := readHead(t, c); !strings.HasPrefix(head, "HTTP/1.1 200 ") {
					t.Errorf("answered %q", head)
				}
				c.Close()
				outcome := audit.OutcomeAllow
				if tc.want != reason.OK {
					outcome = audit.OutcomeDeny
				}
				rec := w.records.wait(t, "the request", func(r audit.Record) bool { return r.Event == audit.EventRequest })
				if rec.Reason != tc.want || rec.Outcome != outcome || strings.Contains(rec.Detail, "answer had begun") != (tc.want != reason.OK) {
					t.Errorf("recorded %s %v %q", rec.Outcome, rec.Reason, rec.Detail)
				}
				if end := w.records.wait(t, "the end", func(r audit.Record) bool { return r.Event == audit.EventConnClosed }); end.Reason != tc.want {
					t.Errorf("the end is recorded as %v %q", end.Reason, end.Detail)
				}
			})
		}
	}
}

// The same over HTTP/2, where the body is shorter than it says.
func TestHTTP2BodyThatBreaksOnceAnswered(t *testing.T) {
	for _, rest := range []string{"hello", "hel"} {
		t.Run(rest, func(t *testing.T) {
			w := newWorld(t)
			at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				io.WriteString(rw, "first")
				http.NewResponseController(rw).Flush()
				io.Copy(io.Discard, r.Body)
			}))
			w.allowInspected(at, nil)
			c := w.rawH2(at)
			c.t = t
			must(t, c.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndHeaders: true, BlockFragment: c.block(
				":method", "POST", ":scheme", "https", ":path", "/", ":authority", apiHost, "content-length", "5")}))
			w.answerBegins(t)
			must(t, c.fr.WriteData(1, true, []byte(rest)))
			c.untilEnd(1)
			rec := w.records.wait(t, "the request", func(r audit.Record) bool { return r.Event == audit.EventRequest })
			want, outcome := reason.OK, audit.OutcomeAllow
			if len(rest) < 5 {
				want, outcome = reason.Malformed, audit.OutcomeDeny
			}
			if rec.Reason != want || rec.Outcome != outcome || want != reason.OK && !strings.Contains(rec.Detail, "ended early") {
				t.Errorf("recorded %s %v %q", rec.Outcome, rec.Reason, rec.Detail)
			}
		})
	}
}
