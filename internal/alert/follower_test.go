package alert

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/audit"
)

type counts struct{ sent, failed atomic.Int64 }

func (c *counts) AlertSent()   { c.sent.Add(1) }
func (c *counts) AlertFailed() { c.failed.Add(1) }

// bench is one follower on one log, with a webhook whose answer a test chooses.
type bench struct {
	log    *audit.Logger
	status atomic.Int64
	got    chan audit.Record
	cfg    Config
	counts *counts
}

func newBench(t *testing.T) *bench {
	b := &bench{got: make(chan audit.Record, 100), counts: &counts{}}
	b.status.Store(http.StatusNoContent)
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status := int(b.status.Load())
		w.WriteHeader(status)
		var rec audit.Record
		if json.NewDecoder(r.Body).Decode(&rec) == nil && status/100 == 2 {
			b.got <- rec
		}
	}))
	t.Cleanup(hook.Close)
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "audit", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	var err error
	b.log, err = audit.Open(filepath.Join(dir, "audit", "x", "x.jsonl"), "test", "x")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.log.Close() })
	b.cfg = Config{Dir: filepath.Join(dir, "audit"), URL: hook.URL, Cursor: filepath.Join(dir, "cursor"),
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Metrics: b.counts}
	return b
}

// run runs a follower until the returned function is called.
func (b *bench) run(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	f := NewFollower(b.cfg)
	go func() { defer close(done); f.Run(ctx) }()
	return func() { cancel(); <-done }
}

func (b *bench) deny(detail string) {
	b.log.Log(audit.Record{Event: audit.EventConnectDenied, Outcome: audit.OutcomeDeny, Detail: detail})
}

func (b *bench) want(t *testing.T, detail string) {
	t.Helper()
	select {
	case rec := <-b.got:
		if rec.Detail != detail {
			t.Fatalf("alert for %q, want %q", rec.Detail, detail)
		}
	case <-time.After(5 * time.Second):
		t.Fatalf("no alert for %q", detail)
	}
}

func TestOnlyDenialsAreAlerted(t *testing.T) {
	b := newBench(t)
	defer b.run(t)()
	b.log.Log(audit.Record{Event: audit.EventLookup, Outcome: audit.OutcomeAllow, Detail: "fine"})
	b.deny("one")
	b.want(t, "one")
	if n := len(b.got); n != 0 {
		t.Fatalf("%d more alerts", n)
	}
}

func TestRestartGoesOnWhereItStopped(t *testing.T) {
	b := newBench(t)
	stop := b.run(t)
	b.deny("one")
	b.want(t, "one")
	stop()
	b.deny("two")
	defer b.run(t)()
	b.want(t, "two")
}

func TestWebhookThatFailsGetsTheAlertLater(t *testing.T) {
	b := newBench(t)
	b.status.Store(http.StatusInternalServerError)
	defer b.run(t)()
	b.deny("one")
	deadline := time.Now().Add(5 * time.Second)
	for b.counts.failed.Load() == 0 {
		if time.Now().After(deadline) {
			t.Fatal("the failure was not counted")
		}
		time.Sleep(time.Millisecond)
	}
	b.status.Store(http.StatusOK)
	b.want(t, "one")
}
