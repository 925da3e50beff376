package api

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/tally"
)

// journal keeps records.
type journal struct {
	mu  sync.Mutex
	all []audit.Record
}

func (j *journal) Log(r audit.Record) { j.mu.Lock(); defer j.mu.Unlock(); j.all = append(j.all, r) }
func (*journal) Err() error           { return nil }

// TestCallsAreRecordedWithTheirArguments but for what is no record's business; questions that repeat are counted.
func TestCallsAreRecordedWithTheirArguments(t *testing.T) {
	t.Parallel()
	j := &journal{}
	questions := tally.New(j, unixLines)
	const body = `{"argv":["deploy","--to","<x>"],"env":{"DB":"hunter2hunter2"},"stdin":"aHVudGVyMg==","nested":[{"env":{"A":"hunter3"}}]}`
	h := recorded(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.SetPathValue("kid", "k1")
		noteKid(r)
		if r.Method == http.MethodPost {
			noteCall(r, []byte(body))
			w.WriteHeader(http.StatusForbidden)
		}
	}), j, questions)
	call := func(method, path string) {
		r := httptest.NewRequest(method, path, nil)
		h.ServeHTTP(httptest.NewRecorder(), r.WithContext(WithCaller(r.Context(), Caller{Name: "uid:0"})))
	}
	call(http.MethodPost, "/v1/kids/k1/exec?x=1")
	for range 10 {
		call(http.MethodGet, "/v1/kids")
	}
	questions.Flush()
	got := j.all[0]
	sum := sha256.Sum256([]byte(body))
	f := got.Fields
	if got.Event != audit.EventAPICalled || got.Actor != "uid:0" || got.Kid != "k1" || got.Outcome != audit.OutcomeDeny || f["status"] != "403" || f["from"] != "unix" ||
		f["query"] != "x=1" || f["arguments_sha256"] != hex.EncodeToString(sum[:]) || !strings.Contains(f["arguments"], `"--to","<x>"`) {
		t.Errorf("got %+v", got)
	}
	for _, secret := range []string{"hunter2", "hunter3", "aHVudGVy"} {
		if strings.Contains(f["arguments"], secret) {
			t.Errorf("%q is in %s", secret, f["arguments"])
		}
	}
	n := uint64(0)
	for _, r := range j.all[1:] {
		if r.Kid != "" {
			t.Errorf("a question is in a kid's story: %+v", r)
		}
		n += max(r.Count, 1)
	}
	if n != 10 || len(j.all) > 4 {
		t.Errorf("%d questions in %d records", n, len(j.all)-1)
	}
	// A body that is not JSON, or too long, is recorded as far as it goes.
	if got := arguments([]byte("plain")); got != "plain" {
		t.Errorf("got %q", got)
	}
	if got := arguments([]byte(`{"env":{"A":"` + strings.Repeat("s3cret", keptBody) + `"},"z":"` + strings.Repeat("z", 2*keptBody) + `"}`)); len(got) != keptBody || strings.Contains(got, "s3cret") {
		t.Errorf("got %d bytes", len(got))
	}
	broken := &Call{}
	if r := broken.Record("a", httptest.NewRequest(http.MethodGet, "/", nil), 0, time.Second); r.Outcome != audit.OutcomeFail {
		t.Errorf("a call that was broken off: %+v", r)
	}
}
