package practice

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"tagout/internal/control"
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

	credd *control.Client

	mu     sync.Mutex
	errors int   // guarded by mu
	last   error // guarded by mu
}

func (n *Internet) startOwn(creddSocket string) error {
	n.Own = &Own{credd: control.NewClient(creddSocket)}
	n.undo = append(n.undo, func() error { n.Own.credd.CloseIdle(); return nil })
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
	ctx, cancel := context.WithTimeout(ctx, introspectWithin)
	defer cancel()
	active, err := Introspect(ctx, o.credd, token)
	if err != nil {
		return false, fmt.Errorf("asking credd: %w", err)
	}
	return active, nil
}
