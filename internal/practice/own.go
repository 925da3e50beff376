package practice

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"tagout/internal/wire"
)

// introspectWithin bounds one question to credd; no answer means no.
const introspectWithin = time.Second

// Own is a service of the user's own at https://svc.own.test. It is shown session tokens and asks credd about
// each one at each use (RFC 7662): no cache, and no answer is a refusal.
//
//	GET /v1/use   200 where the token is active, 401 otherwise
type Own struct {
	// Uses counts /v1/use by presenter.
	Uses Ledger

	credd *http.Client

	mu     sync.Mutex
	errors int   // guarded by mu
	last   error // guarded by mu
}

func (n *Internet) startOwn(creddSocket string) error {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", creddSocket)
	}
	transport := &http.Transport{DialContext: dial, MaxIdleConnsPerHost: 8}
	n.Own = &Own{credd: &http.Client{Transport: transport, Timeout: introspectWithin}}
	n.undo = append(n.undo, func() error { transport.CloseIdleConnections(); return nil })
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/use", n.Own.use)
	return n.serveHTTP(n.OwnAddr(), 443, NameOwn, mux)
}

// Errors returns how many questions credd did not answer, and the last error.
func (o *Own) Errors() (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.errors, o.last
}

func (o *Own) use(w http.ResponseWriter, r *http.Request) {
	active, err := o.introspect(r.Context(), credential(r))
	if err != nil {
		o.mu.Lock()
		o.errors++
		o.last = err
		o.mu.Unlock()
	}
	o.Uses.note(r.Header.Get(HeaderPresenter), active)
	if !active {
		http.Error(w, "token refused", http.StatusUnauthorized)
		return
	}
	io.WriteString(w, "ok\n") // the client is gone
}

func (o *Own) introspect(ctx context.Context, token string) (bool, error) {
	if token == "" {
		return false, nil
	}
	body := strings.NewReader(url.Values{"token": {token}}.Encode())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://credd/introspect", body)
	if err != nil {
		return false, fmt.Errorf("asking credd: %w", err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := o.credd.Do(req)
	if err != nil {
		return false, fmt.Errorf("asking credd: %w", err)
	}
	defer resp.Body.Close() // read to the end below
	raw, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %s: %s", resp.Status, raw)
	}
	var answer wire.Introspection
	if err == nil {
		err = json.Unmarshal(raw, &answer)
	}
	if err != nil {
		return false, fmt.Errorf("asking credd: %w", err)
	}
	return answer.Active, nil
}
