package api

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/logtail"
	"tagout/internal/wire"
)

// logs is a directory of audit logs.
type logs struct {
	t   *testing.T
	dir string
	n   int
}

func (l *logs) add(daemon string, r audit.Record) {
	l.t.Helper()
	l.n++
	r.ID = fmt.Sprint(l.n)
	raw, err := json.Marshal(r)
	if err != nil {
		l.t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(l.dir, daemon, daemon+".jsonl"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		l.t.Fatal(err)
	}
	defer f.Close() // written whole below
	if _, err := f.Write(append(raw, '\n')); err != nil {
		l.t.Fatal(err)
	}
}

type event struct{ id, name, data string }

// follow calls got with each event until it returns false or the stream ends; ended says which.
func follow(t *testing.T, url, last string, got func(event) bool) (ended bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/v1/kids/k/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	if last != "" {
		req.Header.Set("Last-Event-ID", last)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() // cut short on purpose
	var e event
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		field, value, _ := strings.Cut(lines.Text(), ": ")
		switch {
		case field == "id":
			e.id = value
		case field == "event":
			e.name = value
		case field == "data":
			e.data = value
		case lines.Text() == ":":
			if !got(event{name: "beat"}) {
				return false
			}
		case lines.Text() == "" && e.name != "":
			if !got(e) {
				return false
			}
			e = event{}
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return true
}

func TestEventsAreFollowedAndGoneOnWith(t *testing.T) {
	l := &logs{t: t, dir: t.TempDir()}
	for _, d := range []string{"sandboxd", "proxy"} {
		if err := os.Mkdir(filepath.Join(l.dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	ending := make(chan struct{})
	api := New(Config{Logs: l.dir, Ending: ending, Kids: fakeKids{get: func(context.Context, string) (wire.Kid, error) { return wire.Kid{Name: "k", Session: "s"}, nil }}})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		api.ServeHTTP(w, r.WithContext(WithCaller(r.Context(), root)))
	}))
	defer srv.Close()
	l.add("sandboxd", audit.Record{Event: "before", Kid: "k", Session: "s"})
	var seen []string
	last := ""
	follow(t, srv.URL, "", func(e event) bool {
		if e.name == "beat" { // it follows from here on
			l.add("sandboxd", audit.Record{Event: "one", Kid: "k", Session: "s", Detail: "a\nb"})
			l.add("sandboxd", audit.Record{Event: "other", Kid: "k2", Session: "s2"})
			l.add("sandboxd", audit.Record{Event: "older", Kid: "k", Session: "s0"})
			l.add("proxy", audit.Record{Event: "two", Kid: "k", Session: "s"})
			return true
		}
		var r audit.Record
		if err := json.Unmarshal([]byte(e.data), &r); err != nil || r.Event != e.name {
			t.Errorf("event %+v: %v", e, err)
		}
		seen, last = append(seen, e.name), e.id
		return len(seen) < 2
	})
	if strings.Join(seen, " ") != "one two" && strings.Join(seen, " ") != "two one" {
		t.Fatalf("seen: %v", seen)
	}
	// While nobody follows, things go on; whoever comes back misses nothing and gets nothing twice.
	l.add("proxy", audit.Record{Event: "three", Kid: "k", Session: "s"})
	l.add("sandboxd", audit.Record{Event: "four", Kid: "k", Session: "s"})
	l.add("sandboxd", audit.Record{Event: audit.EventKidDestroyed, Kid: "k", Session: "s", Outcome: audit.OutcomeOK})
	back := map[string]int{}
	if !follow(t, srv.URL, last, func(e event) bool { back[e.name]++; return true }) {
		t.Error("the stream goes on after the kid's destruction")
	}
	if back["three"]+back["four"] < 1 || back[audit.EventKidDestroyed] != 1 || back["one"]+back["two"]+back["before"] != 0 {
		t.Errorf("coming back: %v", back)
	}
	// A log that was cut, and places that make no sense: a gap says so.
	if err := os.WriteFile(filepath.Join(l.dir, "proxy", "proxy.jsonl"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, id := range map[string]string{"a log that was cut": last, "nonsense": "!", "the middle of a line": middle(t, last)} {
		gap := ""
		follow(t, srv.URL, id, func(e event) bool {
			if e.name == audit.EventGap {
				gap = e.data
			}
			return gap == ""
		})
		if !strings.Contains(gap, `"kid":"k"`) {
			t.Errorf("%s: gap %q", name, gap)
		}
	}
	close(ending)
	if !follow(t, srv.URL, "", func(event) bool { return true }) {
		t.Error("the stream outlives the daemon")
	}
}

// middle moves an id's place in sandboxd's log into the middle of a line.
func middle(t *testing.T, id string) string {
	t.Helper()
	raw, err := base64.RawURLEncoding.DecodeString(id)
	if err != nil {
		t.Fatal(err)
	}
	var places map[string]logtail.Mark
	if err := json.Unmarshal(raw, &places); err != nil {
		t.Fatal(err)
	}
	m := places["sandboxd"]
	m.Pos -= 5
	raw, err = json.Marshal(map[string]logtail.Mark{"sandboxd": m})
	if err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(raw)
}
