package alert

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"tagout/internal/audit"
)

// minSecret is the least length of a signing key, in bytes.
const minSecret = 16

// SignatureHeader carries `t=SECONDS,v1=HEX`: the Unix time of the try and the HMAC-SHA256 of that time in
// decimal, a dot and the request's body.
const SignatureHeader = "Tagout-Signature"

// poster posts JSON.
type poster struct{ client *http.Client }

// newPoster's client follows no redirect: an alert goes where the configuration says and nowhere else.
func newPoster() poster {
	return poster{&http.Client{
		Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute, ForceAttemptHTTP2: true,
			MaxResponseHeaderBytes: 64 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

func (p poster) close() { p.client.CloseIdleConnections() }

func (p poster) post(ctx context.Context, url string, body []byte, header map[string]string) error {
	_, err := p.ask(ctx, url, body, header)
	return err
}

// ask posts and returns the beginning of the answer. A header replaces one that is set for all.
func (p poster) ask(ctx context.Context, url string, body []byte, header map[string]string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "tagout")
	for name, value := range header {
		req.Header.Set(name, value)
	}
	resp, err := p.client.Do(req)
	if err != nil {
		var inner interface{ Unwrap() error }
		if errors.As(err, &inner) { // url.Error quotes the URL, which is often a secret
			err = inner.Unwrap()
		}
		return nil, err
	}
	defer resp.Body.Close()                                  // only read
	said, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // lets the connection be used again; the status decides
	return said, answer(resp.StatusCode)
}

// answer judges a status. Where the body itself is at fault, another try would change nothing; everything else
// can be put right at the other end.
func answer(status int) error {
	switch {
	case status/100 == 2:
		return nil
	case status == http.StatusBadRequest, status == http.StatusRequestEntityTooLarge, status == http.StatusUnprocessableEntity:
		return fmt.Errorf("it answered %d: %w", status, errRefused)
	}
	return errors.New("it answered " + strconv.Itoa(status))
}

// webhook posts one JSON document an alert.
type webhook struct {
	poster
	url, secretFile string
}

func newWebhook(s Sink) (sender, error) {
	if s.SecretFile != "" {
		if _, err := readSecret(s.SecretFile); err != nil {
			return nil, err
		}
	}
	return &webhook{newPoster(), s.URL, s.SecretFile}, nil
}

// document is what a webhook gets: the audit record of the first attempt, with the count of all, and a summary.
type document struct {
	audit.Record
	Alert summary `json:"alert"`
}

type summary struct {
	Destination string    `json:"destination"` // host:port; "*": several
	Severity    string    `json:"severity"`
	Count       uint64    `json:"count"`  // attempts that this alert stands for
	First       time.Time `json:"first"`  // of them
	Last        time.Time `json:"last"`   // of them
	Repeat      bool      `json:"repeat"` // earlier ones were alerted
	Text        string    `json:"text"`
}

func (w *webhook) send(ctx context.Context, a *alert) error {
	doc := document{Record: a.record, Alert: summary{
		Destination: a.key.destination, Severity: severity(a.key.reason), Count: a.count,
		First: a.first, Last: a.last, Repeat: a.summary, Text: a.describe(),
	}}
	if a.count > 1 {
		doc.Count = a.count
	}
	body, err := json.Marshal(doc)
	if err != nil {
		return fmt.Errorf("writing the alert: %w: %w", err, errRefused)
	}
	body = append(body, '\n')
	header := map[string]string{
		"Tagout-Event-Id": a.record.ID,
		// Also tells the HTTP client that it may repeat the request where a kept connection turns out to be dead.
		"Idempotency-Key": a.record.ID + "-" + strconv.FormatUint(a.count, 10),
	}
	if w.secretFile != "" {
		secret, err := readSecret(w.secretFile)
		if err != nil {
			return err
		}
		header[SignatureHeader] = sign(secret, time.Now(), body)
	}
	return w.post(ctx, w.url, body, header)
}

// sign returns the signature header's value.
func sign(secret []byte, now time.Time, body []byte) string {
	t := strconv.FormatInt(now.Unix(), 10)
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(t + "."))
	mac.Write(body)
	return "t=" + t + ",v1=" + hex.EncodeToString(mac.Sum(nil))
}

// readSecret reads the key: the file's content without white space at its ends.
func readSecret(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("reading the signing key: %w", err)
	}
	if info.Mode().Perm()&0o007 != 0 {
		return nil, fmt.Errorf("reading the signing key: anybody may use %s: run `chmod 600` on it and write a new key", path)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the signing key: %w", err)
	}
	if secret := bytes.TrimSpace(raw); len(secret) >= minSecret {
		return secret, nil
	}
	return nil, fmt.Errorf("reading the signing key: %s holds less than %d bytes: write `openssl rand -hex 32` into it", path, minSecret)
}

// firesFor is how long an alert stays active in an Alertmanager after its last attempt, at least.
const firesFor = 5 * time.Minute

// alertmanager posts to the API v2 of a Prometheus Alertmanager.
type alertmanager struct {
	poster
	url   string
	fires time.Duration
}

func newAlertmanager(s Sink) (sender, error) {
	return &alertmanager{newPoster(), strings.TrimSuffix(s.URL, "/") + "/api/v2/alerts", max(firesFor, 2*s.Window)}, nil
}

// postable is an entry of POST /api/v2/alerts (Alertmanager's api/v2/openapi.yaml, postableAlert).
type postable struct {
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	StartsAt    time.Time         `json:"startsAt"`
	EndsAt      time.Time         `json:"endsAt"`
}

// send's labels are what alerts are deduplicated by: a summary updates the alert that it repeats. The alert ends
// some time from now, whenever its attempts were: one that had ended before it came would notify nobody.
func (m *alertmanager) send(ctx context.Context, a *alert) error {
	r := &a.record
	p := postable{
		Labels: map[string]string{
			"alertname": "TagoutDenied", "kid": orDash(a.key.kid), "destination": a.key.destination, "reason": a.key.reason.String(),
			"instance": orDash(r.Instance), "severity": severity(a.key.reason),
		},
		Annotations: map[string]string{
			"summary": a.describe(), "count": strconv.FormatUint(a.count, 10), "event": r.ID, "daemon": r.Daemon,
			"last": a.last.UTC().Format(time.RFC3339Nano),
		},
		StartsAt: a.first, EndsAt: time.Now().Add(m.fires),
	}
	for name, value := range map[string]string{"session": r.Session, "card": r.Card, "hint": a.key.reason.Info().Hint} {
		if value != "" {
			p.Annotations[name] = value
		}
	}
	body, err := json.Marshal([]postable{p})
	if err != nil {
		return fmt.Errorf("writing the alert: %w: %w", err, errRefused)
	}
	return m.post(ctx, m.url, body, map[string]string{"Idempotency-Key": r.ID + "-" + strconv.FormatUint(a.count, 10)})
}

// orDash keeps a label from being empty: an Alertmanager takes an empty one for a missing one.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
