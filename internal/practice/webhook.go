package practice

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"tagout/internal/audit"
)

// keepAlerts bounds how many alerts are kept in full; all of them are counted.
const keepAlerts = 100_000

// Alert is one JSON line that arrived at the webhook.
type Alert struct {
	At     time.Duration // CLOCK_MONOTONIC
	Record audit.Record  // zero where the line is not a record
	Raw    json.RawMessage
}

// Webhook keeps what is posted to http://<.6>:8080/alerts: one JSON object, or several, one a line.
type Webhook struct {
	mu     sync.Mutex
	alerts []Alert       // guarded by mu
	total  int           // guarded by mu
	bad    int           // guarded by mu
	hung   chan struct{} // guarded by mu; not nil: nothing is answered before it is closed
	held   int           // guarded by mu; requests that wait for an answer now
}

func (n *Internet) startWebhook() error {
	n.Webhook = &Webhook{}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /alerts", n.Webhook.receive)
	return n.serveHTTP(n.WebhookAddr(), PortWebhook, "", mux)
}

// WebhookURL is where alerts are to be posted; its host is an address, so that no lookup is needed.
func (n *Internet) WebhookURL() string {
	return "http://" + netip.AddrPortFrom(n.WebhookAddr(), PortWebhook).String() + "/alerts"
}

func (h *Webhook) receive(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 16<<20))
	if err != nil {
		http.Error(w, "reading the body", http.StatusBadRequest)
		return
	}
	if !h.awake(r.Context()) {
		return
	}
	at, ok := Now(), true
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, raw := range bytes.Split(body, []byte("\n")) {
		if raw = bytes.TrimSpace(raw); len(raw) == 0 {
			continue
		}
		h.total++
		if !json.Valid(raw) {
			h.bad++
			ok = false
			continue
		}
		a := Alert{At: at, Raw: raw}
		json.Unmarshal(raw, &a.Record) // documented: zero where it is not a record
		if len(h.alerts) < keepAlerts {
			h.alerts = append(h.alerts, a)
		}
	}
	if !ok {
		http.Error(w, "not JSON", http.StatusBadRequest)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// Hang makes the webhook take requests and answer none, until the function that it returns is called.
func (h *Webhook) Hang() (wake func()) {
	hung := make(chan struct{})
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hung = hung
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.hung == hung {
			h.hung = nil
			close(hung)
		}
	}
}

// Held is how many requests the webhook keeps waiting.
func (h *Webhook) Held() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.held
}

// awake waits while the webhook hangs; false: whoever asked went away.
func (h *Webhook) awake(ctx context.Context) bool {
	h.mu.Lock()
	hung := h.hung
	if hung != nil {
		h.held++
	}
	h.mu.Unlock()
	if hung == nil {
		return true
	}
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.held--
	}()
	select {
	case <-hung:
		return true
	case <-ctx.Done():
		return false
	}
}

// Alerts returns what arrived, in order, and how many there were in all.
func (h *Webhook) Alerts() (kept []Alert, total int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]Alert(nil), h.alerts...), h.total
}

// Wait returns the first alert whose record match admits, waiting for it until ctx ends. what names it in
// the error.
func (h *Webhook) Wait(ctx context.Context, what string, match func(audit.Record) bool) (Alert, error) {
	var found Alert
	seen := 0
	err := Wait(ctx, what, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		for ; seen < len(h.alerts); seen++ {
			if match(h.alerts[seen].Record) {
				found = h.alerts[seen]
				return true
			}
		}
		return false
	})
	return found, err
}
