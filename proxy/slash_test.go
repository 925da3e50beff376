package proxy

import (
	"fmt"
	"net/http"
	"testing"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// An encoded slash that a rule spells out reaches the server as the kid wrote it, over HTTP/1.1 and HTTP/2; the
// same path with a plain slash, or under a rule with a star instead, does not.
func TestSpelledSlashesAreSentAsTheyCame(t *testing.T) {
	for _, tc := range []struct {
		glob, path string
		want       reason.Code
	}{
		{"/@scope%2Fname", "/@scope%2fname", reason.OK}, {"/@scope%2F*", "/@scope%2Fname", reason.OK},
		{"/@scope%2F*", "/@scope/name", reason.PathDenied}, {"/*", "/@scope%2fname", reason.AmbiguousHTTP},
		{"/@scope%2F*", "/@scope%2f..%2fname", reason.AmbiguousHTTP},
	} {
		for _, h2 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s under %s, h2 %v", tc.path, tc.glob, h2), func(t *testing.T) {
				w := newWorld(t)
				got := make(chan string, 1)
				at := w.h2web(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r.RequestURI }))
				w.allowInspected(at, func(r *policy.Rule) { r.Paths = []string{tc.glob} })
				status := ""
				if h2 {
					c := w.rawH2(at)
					c.t = t
					status, _ = c.ask(":method", "GET", ":scheme", "https", ":path", tc.path, ":authority", apiHost)
				} else {
					status = fmt.Sprint(ask(t, w.inspectedConn(w.dialName(apiHost, at.Port())), get(apiHost, tc.path), 1)[0].StatusCode)
				}
				if tc.want != reason.OK {
					if status != "403" || len(got) != 0 {
						t.Errorf("status %s, %d requests reached the server", status, len(got))
					}
					return
				}
				if status != "200" {
					t.Fatalf("status %s", status)
				}
				if uri := <-got; uri != tc.path {
					t.Errorf("the server got %q", uri)
				}
			})
		}
	}
}
