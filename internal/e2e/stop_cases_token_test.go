package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// aThousandUses (S11): a token that was taken out of the box is used a thousand times a second while the credential
// layer alone is fired, and the kid itself uses it through the proxy. No use that begins after the
// acknowledgement is accepted, on either road: nothing caches.
func (s *stopCases) aThousandUses() {
	kid := s.spawn("token")
	running(s.t, s.box, kid.Name, "/workspace/hostile", "agent", "-parts", "ticks,token", "-tag", kid.Name, "-uses", "100")
	var token string
	s.until("the token has left the box and is accepted", func() error {
		token = s.box.Net.Sink.Token(kid.Name)
		if n := s.box.Net.API.Uses.Tally("agent:" + kid.Name).Accepted; token == "" || n < 5 {
			return fmt.Errorf("token %q, accepted %d times", token, n)
		}
		return nil
	})
	u := s.useToken(token, 1000)
	defer u.stop()
	s.until("the token is used a thousand times", func() error {
		if n, _, _ := u.seen(); n < 1000 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
	used, _, began := u.seen()
	rate := float64(used) / (practice.Now() - began).Seconds()
	rep := s.stop(kid.Name, wire.LayerCredential)
	acked := practice.Now()
	s.observed(rep)
	kidsBefore := s.box.Net.API.Uses.Tally("agent:" + kid.Name)
	n, _, _ := u.seen()
	s.until("a thousand uses more", func() error {
		if now, _, _ := u.seen(); now < n+1000 {
			return fmt.Errorf("%d after %d", now, n)
		}
		return nil
	})
	_, last, _ := u.seen()
	s.t.Logf("%.0f uses a second; the last that was accepted began %v before the acknowledgement", rate, acked-last)
	if last >= acked {
		s.t.Errorf("a use that began %v after the acknowledgement was accepted", last-acked)
	}
	s.until("the kid's own uses are refused", func() error {
		if n := len(s.denied(kid, code(reason.TokenUnknown))); n == 0 {
			return errors.New("not once yet")
		}
		return nil
	})
	// One request may have been on its way from the proxy to the API.
	if after := s.box.Net.API.Uses.Tally("agent:" + kid.Name); after.Accepted > kidsBefore.Accepted+1 {
		s.t.Errorf("the kid's own token was accepted %d times after the acknowledgement", after.Accepted-kidsBefore.Accepted)
	}
	if len(s.pids(kid)) == 0 {
		s.t.Error("the credential layer killed the kid")
	}
}

// uses asks credd about a token again and again, as a service of the user's own would.
type uses struct {
	stop func()
	mu   sync.Mutex
	n    int
	last time.Duration // when the last use that was accepted began, CLOCK_MONOTONIC
	from time.Duration
}

func (u *uses) seen() (n int, last, from time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.n, u.last, u.from
}

// useToken uses it perSecond times a second from eight callers, past the box's firewalls.
func (s *stopCases) useToken(token string, perSecond int) *uses {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	const callers = 8
	transport := &http.Transport{MaxIdleConnsPerHost: callers, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.box.Inst.Socket(instance.Credd))
	}}
	var wg sync.WaitGroup
	u := &uses{from: practice.Now()}
	u.stop = sync.OnceFunc(func() { cancel(); wg.Wait(); transport.CloseIdleConnections() })
	s.t.Cleanup(u.stop)
	for range callers {
		wg.Go(func() {
			tick := time.NewTicker(time.Second * callers / time.Duration(perSecond))
			defer tick.Stop()
			for ctx.Err() == nil {
				<-tick.C
				at := practice.Now()
				active, err := introspect(ctx, transport, token)
				if err != nil {
					continue // the end of the test, or no credd: no token either
				}
				u.mu.Lock()
				u.n++
				if active {
					u.last = max(u.last, at)
				}
				u.mu.Unlock()
			}
		})
	}
	return u
}

func introspect(ctx context.Context, rt http.RoundTripper, token string) (bool, error) {
	body := strings.NewReader(url.Values{"token": {token}}.Encode())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://credd/introspect", body)
	if err != nil {
		return false, err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := rt.RoundTrip(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close() // read to its end
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return false, err
	}
	var answer wire.Introspection
	err = json.Unmarshal(raw, &answer)
	return answer.Active, err
}
