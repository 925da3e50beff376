package tokencheck

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Bounds of one question to the issuer.
const (
	fetchTime = 5 * time.Second
	maxAnswer = 1 << 20 // bytes
)

// fetcher asks the issuer.
type fetcher struct{ client *http.Client }

func newFetcher(c *http.Client) *fetcher {
	var own http.Client
	if c != nil {
		own = *c
	}
	if own.Timeout == 0 {
		own.Timeout = fetchTime
	}
	// Where the issuer is was configured: nobody sends us elsewhere.
	own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &fetcher{&own}
}

// get returns the body of an answer with status 200.
func (f *fetcher) get(ctx context.Context, from, accept string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return nil, unavailable(err)
	}
	r.Header.Set("Accept", accept)
	return f.do(r)
}

// post sends a form, with a client's key where there is one.
func (f *fetcher) post(ctx context.Context, to, key string, form url.Values) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, to, strings.NewReader(form.Encode()))
	if err != nil {
		return nil, unavailable(err)
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header["X-Idempotency-Key"] = nil // not sent: it tells net/http that asking again does no harm
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	return f.do(r)
}

func (f *fetcher) do(r *http.Request) ([]byte, error) {
	resp, err := f.client.Do(r)
	if err != nil {
		return nil, unavailable(err)
	}
	defer resp.Body.Close() // only read
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, unavailable(err)
	case len(raw) > maxAnswer:
		return nil, fmt.Errorf("%w: %s answers with more than %d bytes", ErrUnavailable, r.URL.Path, maxAnswer)
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%w: %s answers with status %d", ErrUnavailable, r.URL.Path, resp.StatusCode)
	}
	return raw, nil
}

func unavailable(err error) error { return fmt.Errorf("%w: %w", ErrUnavailable, err) }

// OverUnix returns a client that reaches the issuer through credd's unix socket, whatever host a URL names: for a service
// on the box itself whose user the socket lets in. The socket says who asks, so that Config.Key is not needed.
func OverUnix(socket string) *http.Client {
	return &http.Client{Transport: overUnix{&http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
		IdleConnTimeout: time.Minute,
	}}}
}

type overUnix struct{ *http.Transport }

// RoundTrip implements http.RoundTripper. There is no TLS on a unix socket.
func (t overUnix) RoundTrip(r *http.Request) (*http.Response, error) {
	plain := r.Clone(r.Context())
	plain.URL.Scheme = "http"
	return t.Transport.RoundTrip(plain)
}

// moment is when an answer began to be true.
type moment struct{ at time.Time }

// age is how long ago it was, by whichever of monotonic and wall clock says more: one stands still while the machine
// sleeps, and the other can be set. Set back, it counts as very long.
func (m moment) age(now time.Time) time.Duration {
	wall := now.Round(0).Sub(m.at.Round(0))
	if m.at.IsZero() || wall < 0 {
		return 1<<63 - 1
	}
	return max(wall, now.Sub(m.at))
}
