package door

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tagout/internal/apikey"
	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/testcert"
	"tagout/sandboxd/api"
)

type records struct {
	mu  sync.Mutex
	all []audit.Record
}

func (r *records) Log(rec audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, rec)
}

// sum returns how many calls the records of an event stand for.
func (r *records) sum(event string) (n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rec := range r.all {
		if rec.Event == event {
			n += max(rec.Count, 1)
		}
	}
	return n
}

// open serves a handler that says who asks, and returns its URL.
func open(t *testing.T, cfg Config, rec *records) string {
	t.Helper()
	cfg.Listen = netip.MustParseAddrPort("127.0.0.1:0")
	cfg.Audit, cfg.Log = rec, slog.New(slog.DiscardHandler)
	if cfg.Keys == nil {
		cfg.Keys = apikey.NewBook(filepath.Join(t.TempDir(), "none"))
	}
	cfg.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
			return
		}
		c := api.CallerOf(r.Context())
		fmt.Fprintf(w, "%s %v %s", c.Name, c.Roles, c.Agent)
	})
	d, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	scheme := "http"
	if cfg.Certificate != "" {
		scheme = "https"
	}
	return scheme + "://" + d.Addr().String()
}

func call(t *testing.T, c *http.Client, url, authorization string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/v1/kids", nil)
	if err != nil {
		t.Fatal(err)
	}
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	req.Header.Set(api.AgentHeader, "claude code")
	resp, err := c.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close() // read whole
	raw, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(raw)
}

func TestOnlyKeysThatCountOpen(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	secret, err := apikey.Add(file, "ci", []apikey.Role{apikey.RoleRead}, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	rec := &records{}
	url := open(t, Config{Keys: apikey.NewBook(file)}, rec)
	if code, body := call(t, http.DefaultClient, url, "Bearer "+secret); code != 200 || body != "key:ci [read] claude_code" {
		t.Errorf("the key: %d %s", code, body)
	}
	wrong := []string{"", "Bearer", "Bearer x" + secret, "Basic " + secret, secret}
	for _, head := range wrong {
		if code, body := call(t, http.DefaultClient, url, head); code != http.StatusUnauthorized || !strings.Contains(body, `"unauthenticated"`) {
			t.Errorf("%q: %d %s", head, code, body)
		}
	}
	if _, err := apikey.Remove(file, "ci"); err != nil {
		t.Fatal(err)
	}
	if code, _ := call(t, http.DefaultClient, url, "Bearer "+secret); code != http.StatusUnauthorized {
		t.Errorf("the removed key: %d", code)
	}
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _ := call(t, http.DefaultClient, url, "Bearer "+secret); code != http.StatusServiceUnavailable {
		t.Errorf("keys that cannot be read: %d", code)
	}
	until(t, "every refusal is recorded", func() bool { return rec.sum(audit.EventAPIRefused) == uint64(len(wrong)+2) })
	rec.mu.Lock()
	defer rec.mu.Unlock()
	for _, r := range rec.all {
		if strings.Contains(fmt.Sprint(r), secret) {
			t.Errorf("a record holds the key: %+v", r)
		}
		if r.Event == audit.EventAPICalled && (r.Actor != "key:ci" || r.Fields["status"] != "200" || r.Fields["path"] != "/v1/kids") {
			t.Errorf("the call is recorded as %+v", r)
		}
	}
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited 10 s until %s", what)
		}
	}
}

// TestAFloodOfStrangers leaves its exact number in a few records, and keeps nobody out who is known.
func TestAFloodOfStrangers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	secret, err := apikey.Add(file, "ci", []apikey.Role{apikey.RoleRead}, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	rec := &records{}
	url := open(t, Config{Keys: apikey.NewBook(file)}, rec)
	codes := map[int]int{}
	const n = 300
	for range n {
		code, _ := call(t, http.DefaultClient, url, "Bearer guess")
		codes[code]++
	}
	if codes[http.StatusUnauthorized] < 20 || codes[http.StatusTooManyRequests] < n/2 || codes[401]+codes[429] != n {
		t.Errorf("answers: %v", codes)
	}
	if code, _ := call(t, http.DefaultClient, url, "Bearer "+secret); code != 200 {
		t.Errorf("a known caller beside the flood: %d", code)
	}
	until(t, "all are counted", func() bool { return rec.sum(audit.EventAPIRefused) == n })
	if len(rec.all) > 100 {
		t.Errorf("%d records", len(rec.all))
	}
	codes = map[int]int{}
	for range 200 {
		code, _ := call(t, http.DefaultClient, url, "Bearer "+secret)
		codes[code]++
	}
	if codes[429] == 0 || codes[200] < 100 {
		t.Errorf("a caller without measure: %v", codes)
	}
}

// TestSlowAndLargeRequestsEnd.
func TestSlowAndLargeRequestsEnd(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	secret, err := apikey.Add(file, "ci", []apikey.Role{apikey.RoleRead}, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	url := open(t, Config{Keys: apikey.NewBook(file)}, &records{})
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() // only read
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := conn.SetReadDeadline(began.Add(3 * headLimit)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) < headLimit/2 {
		t.Errorf("a head that never ends: %v after %v", err, time.Since(began))
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/kids", strings.NewReader(strings.Repeat("x", 8<<20)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+secret)
	if resp, err := http.DefaultClient.Do(req); err == nil {
		resp.Body.Close() // only its status counts
		if resp.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("a body of 8 MiB: %d", resp.StatusCode)
		}
	}
}

// TestCertificates: who has one of the right authority and name is let in, with its roles; the plain way is shut.
func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	ca, other := testcert.New(t), testcert.New(t)
	ca.Write(t, dir, "server", "127.0.0.1", x509.ExtKeyUsageServerAuth)
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), ca.PEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	rec := &records{}
	url := open(t, Config{
		Certificate: filepath.Join(dir, "server.pem"), Key: filepath.Join(dir, "server.key"), ClientCA: filepath.Join(dir, "ca.pem"),
		Clients: []Client{{Name: "ci.test", Roles: []apikey.Role{apikey.RoleSpawn}}},
	}, rec)
	for name, c := range map[string]struct {
		ca   *testcert.Authority
		name string
		use  x509.ExtKeyUsage
		code int
	}{
		"right":          {ca, "ci.test", x509.ExtKeyUsageClientAuth, 200},
		"another name":   {ca, "x.test", x509.ExtKeyUsageClientAuth, 401},
		"another CA":     {other, "ci.test", x509.ExtKeyUsageClientAuth, 0},
		"a server's":     {ca, "ci.test", x509.ExtKeyUsageServerAuth, 0},
		"no certificate": {nil, "", 0, 401},
	} {
		security := &tls.Config{RootCAs: x509.NewCertPool()}
		security.RootCAs.AppendCertsFromPEM(ca.PEM())
		if c.ca != nil {
			c.ca.Write(t, dir, "client", c.name, c.use)
			pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "client.pem"), filepath.Join(dir, "client.key"))
			if err != nil {
				t.Fatal(err)
			}
			security.Certificates = []tls.Certificate{pair}
			security.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
		}
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: security}}
		code, body := call(t, client, url, "")
		client.CloseIdleConnections()
		if code != c.code || code == 200 && body != "cert:ci.test [spawn] claude_code" {
			t.Errorf("%s: %d %s", name, code, body)
		}
	}
	if code, body := call(t, http.DefaultClient, "http"+strings.TrimPrefix(url, "https"), ""); code == 200 || strings.Contains(body, "cert:") {
		t.Errorf("without TLS: %d %s", code, body)
	}
	if rec.all[0].Reason == reason.OK && rec.all[0].Event == audit.EventAPIRefused {
		t.Errorf("%+v", rec.all[0])
	}
}

func TestNothingIsServedPlainlyToOthers(t *testing.T) {
	if _, err := Open(t.Context(), Config{Listen: netip.MustParseAddrPort("192.0.2.1:1")}); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("%v", err)
	}
}
