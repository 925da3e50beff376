package door

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/sandboxd/api"
)

// admit finds out who asks and lets those through who are known.
func (d *Door) admit(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	caller, ok := d.who(w, r)
	if !ok {
		return
	}
	ctx, call := api.WithCall(api.WithCaller(r.Context(), caller))
	if !d.known.take(caller.Name) {
		w.Header().Set("Retry-After", "1")
		control.Refuse(w, http.StatusTooManyRequests, reason.RateLimit, "too many calls: at most 50 a second")
		d.record(caller.Name, r, call, http.StatusTooManyRequests, time.Since(began))
		return
	}
	rec := &api.Status{ResponseWriter: w}
	defer func() { d.record(caller.Name, r, call, rec.Code, time.Since(began)) }() // also of one that is broken off
	d.cfg.Handler.ServeHTTP(rec, r.WithContext(ctx))
	if rec.Code == 0 {
		rec.Code = http.StatusOK
	}
}

// who returns the caller; where nobody knows it, the answer was given.
func (d *Door) who(w http.ResponseWriter, r *http.Request) (api.Caller, bool) {
	if secret, ok := bearer(r); ok {
		key, ok, err := d.cfg.Keys.Find(secret, time.Now())
		if err != nil {
			d.cfg.Log.Error("nobody is let in by a key", "error", err)
			d.turnAway(w, r, http.StatusServiceUnavailable, "the API keys cannot be read: see sandboxd's log")
			return api.Caller{}, false
		}
		if ok {
			return api.Caller{Name: "key:" + key.Name, Roles: key.Roles, Agent: api.AgentOf(r), Counts: func() error { return d.stillCounts(secret) }}, true
		}
		d.turnAway(w, r, http.StatusUnauthorized, "the key counts no more, or never did")
		return api.Caller{}, false
	}
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		names := namesOf(r.TLS.PeerCertificates[0])
		for _, c := range d.cfg.Clients {
			if slices.Contains(names, c.Name) {
				return api.Caller{Name: "cert:" + c.Name, Roles: c.Roles, Agent: api.AgentOf(r), Counts: runsOut(r.TLS.PeerCertificates[0].NotAfter)}, true
			}
		}
		d.turnAway(w, r, http.StatusUnauthorized, "no role is given to this certificate: "+strings.Join(names, ", "))
		return api.Caller{}, false
	}
	d.turnAway(w, r, http.StatusUnauthorized, "send a key as `Authorization: Bearer KEY`, or a client certificate")
	return api.Caller{}, false
}

// stillCounts says why a key that counted does so no more.
func (d *Door) stillCounts(secret string) error {
	_, ok, err := d.cfg.Keys.Find(secret, time.Now())
	switch {
	case err != nil:
		return fmt.Errorf("the API keys cannot be read: %w", err)
	case !ok:
		return errors.New("the key counts no more")
	}
	return nil
}

// runsOut says when a certificate has run out.
func runsOut(end time.Time) func() error {
	return func() error {
		if time.Now().After(end) {
			return errors.New("the certificate has run out")
		}
		return nil
	}
}

// bearer returns the key that the request carries; ok says whether it carries an Authorization at all.
func bearer(r *http.Request) (secret string, ok bool) {
	head := r.Header.Get("Authorization")
	if head == "" {
		return "", false
	}
	kind, secret, _ := strings.Cut(head, " ")
	if !strings.EqualFold(kind, "Bearer") {
		return "", true
	}
	return strings.TrimSpace(secret), true
}

// namesOf returns the names that a certificate is for. The common name counts only where there is nothing better.
func namesOf(c *x509.Certificate) []string {
	names := slices.Concat(c.DNSNames, c.EmailAddresses)
	for _, u := range c.URIs {
		names = append(names, u.String())
	}
	if len(names) == 0 && c.Subject.CommonName != "" {
		names = []string{c.Subject.CommonName}
	}
	return names
}

// turnAway refuses a stranger, and records it; a flood of them as a number.
func (d *Door) turnAway(w http.ResponseWriter, r *http.Request, code int, detail string) {
	from, why := host(r.RemoteAddr), reason.Unauthenticated
	if !d.strange.take(from) {
		code, why, detail = http.StatusTooManyRequests, reason.RateLimit, "too many calls from here had no key that counts"
	}
	d.refused.Add(from, "", func() audit.Record {
		return audit.Record{Event: audit.EventAPIRefused, Outcome: audit.OutcomeDeny, Reason: why, Detail: detail,
			Fields: map[string]string{"method": short(r.Method), "path": short(r.URL.Path), "from": from}}
	})
	if code == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", `Bearer realm="tagout"`)
	}
	w.Header().Set("Connection", "close")
	control.Refuse(w, code, why, detail)
}

func host(addr string) string {
	if h, _, err := net.SplitHostPort(addr); err == nil {
		return h
	}
	return addr
}

// limiter bounds how often each of many does something. Safe for concurrent use.
type limiter struct {
	every rate.Limit
	burst int

	mu   sync.Mutex
	each map[string]*rate.Limiter // guarded by mu
}

// maxLimited bounds who is told apart. Beyond it those who have rested are forgotten, and then everybody: an attacker
// with that many addresses gains one burst.
const maxLimited = 4096

func newLimiter(every rate.Limit, burst int) *limiter {
	return &limiter{every: every, burst: burst, each: map[string]*rate.Limiter{}}
}

// take uses one up and says whether there was one.
func (l *limiter) take(who string) bool { return l.of(who).Allow() }

func (l *limiter) of(who string) *rate.Limiter {
	l.mu.Lock()
	defer l.mu.Unlock()
	if lim := l.each[who]; lim != nil {
		return lim
	}
	if len(l.each) >= maxLimited {
		for name, lim := range l.each {
			if lim.Tokens() >= float64(l.burst) {
				delete(l.each, name)
			}
		}
	}
	if len(l.each) >= maxLimited {
		clear(l.each)
	}
	lim := rate.NewLimiter(l.every, l.burst)
	l.each[who] = lim
	return lim
}
