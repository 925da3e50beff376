package alerttest

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Posted is one alert as a webhook gets it.
type Posted struct {
	ID      string `json:"id"`
	Kid     string `json:"kid"`
	Event   string `json:"event"`
	Reason  string `json:"reason"`
	Count   uint64 `json:"count"`
	Detail  string `json:"detail"`
	Session string `json:"session"`
	Alert   struct {
		Destination string    `json:"destination"`
		Severity    string    `json:"severity"`
		Count       uint64    `json:"count"`
		First       time.Time `json:"first"`
		Last        time.Time `json:"last"`
		Repeat      bool      `json:"repeat"`
		Text        string    `json:"text"`
	} `json:"alert"`
}

// Hook is a webhook whose answers a test chooses.
type Hook struct {
	URL    string
	secret []byte // nil: unsigned alerts are taken
	t      testing.TB

	mu      sync.Mutex
	answer  func(Posted) int // nil: 204; guarded by mu
	got     []Posted         // those that were answered with 2xx; guarded by mu
	refused int              // guarded by mu
}

// StartHook starts a webhook. With a secret it takes nothing that is not signed with it.
func StartHook(t testing.TB, secret string) *Hook {
	h := &Hook{secret: []byte(secret), t: t}
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	h.URL = server.URL
	return h
}

// Answer chooses the status of each answer from now on.
func (h *Hook) Answer(fn func(Posted) int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answer = fn
}

// ServeHTTP is one request.
func (h *Hook) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err == nil && len(h.secret) > 0 {
		err = Verify(h.secret, r.Header.Get("Tagout-Signature"), body, time.Now())
	}
	if err != nil {
		h.count(nil)
		http.Error(w, err.Error(), http.StatusUnauthorized)
		return
	}
	var p Posted
	if err := json.Unmarshal(body, &p); err != nil || p.ID == "" || p.ID != r.Header.Get("Tagout-Event-Id") {
		h.t.Errorf("a body that is no alert: %v %q", err, body)
	}
	h.mu.Lock()
	answer := h.answer
	h.mu.Unlock()
	status := http.StatusNoContent
	if answer != nil {
		status = answer(p)
	}
	if status/100 == 2 {
		h.count(&p)
	} else {
		h.count(nil)
	}
	w.WriteHeader(status)
}

func (h *Hook) count(p *Posted) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p == nil {
		h.refused++
	} else {
		h.got = append(h.got, *p)
	}
}

// Got returns what was taken, and how many requests were not.
func (h *Hook) Got() (taken []Posted, refused int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]Posted(nil), h.got...), h.refused
}

// Verify checks a signature as docs/alerts.md tells users to: the header has the time and the HMAC-SHA256 of
// the time, a dot and the body, and the time is not long ago.
func Verify(secret []byte, header string, body []byte, now time.Time) error {
	t, v1 := "", ""
	for _, part := range strings.Split(header, ",") {
		name, value, _ := strings.Cut(part, "=")
		switch name {
		case "t":
			t = value
		case "v1":
			v1 = value
		}
	}
	seconds, err := strconv.ParseInt(t, 10, 64)
	if err != nil {
		return fmt.Errorf("the signature has no time: %q", header)
	}
	if age := now.Sub(time.Unix(seconds, 0)).Abs(); age > 5*time.Minute {
		return fmt.Errorf("the signature is %v old", age)
	}
	mac := hmac.New(sha256.New, secret)
	fmt.Fprintf(mac, "%s.%s", t, body)
	got, err := hex.DecodeString(v1)
	if err != nil || !hmac.Equal(got, mac.Sum(nil)) {
		return errors.New("the signature is wrong")
	}
	return nil
}
