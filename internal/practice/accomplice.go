package practice

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// Replay is the accomplice: from inside the practice internet, past every firewall of the box, it presents a
// stolen token at the user's own service perSecond times a second until ctx ends. It never gives up; only
// starting with a bad argument is an error.
func (n *Internet) Replay(ctx context.Context, token, presenter string, perSecond int) error {
	if perSecond <= 0 {
		return fmt.Errorf("replaying a token %d times a second: want at least 1", perSecond)
	}
	client, done := n.client(NameOwn, n.OwnAddr())
	defer done()
	tick := time.NewTicker(time.Second / time.Duration(perSecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			present(ctx, client, "https://"+NameOwn+"/v1/use", token, presenter)
		}
	}
}

// present uses the token once; the outcome is the service's to count.
func present(ctx context.Context, client *http.Client, url, token, presenter string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set(HeaderPresenter, presenter)
	resp, err := client.Do(req)
	if err != nil {
		return
	}
	io.Copy(io.Discard, resp.Body) // lets the connection be used again
	resp.Body.Close()              // read to its end
}

// client returns an HTTPS client inside the practice internet that always reaches host at a, and what to call
// when done with it.
func (n *Internet) client(host string, a netip.Addr) (*http.Client, func()) {
	transport := &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return n.Dial(ctx, network, netip.AddrPortFrom(a, 443).String())
		},
		TLSClientConfig: &tls.Config{RootCAs: n.Roots(), ServerName: host, MinVersion: tls.VersionTLS12},
	}
	return &http.Client{Transport: transport, Timeout: 2 * time.Second}, transport.CloseIdleConnections
}
