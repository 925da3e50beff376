package practice

import (
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// HeaderPresenter tells who is using a token: "agent:<tag>" or "accomplice:<tag>". It is only a label.
const HeaderPresenter = "X-Practice-Presenter"

// serveHTTP serves handler at a:port inside the namespace, over TLS as the host name where one is given.
func (n *Internet) serveHTTP(a netip.Addr, port uint16, host string, handler http.Handler) error {
	if host == "" {
		return n.serveTLS(a, port, nil, handler)
	}
	cfg, err := n.ca.serverTLS(host)
	if err != nil {
		return err
	}
	cfg.NextProtos = []string{"h2", "http/1.1"}
	return n.serveTLS(a, port, cfg, handler)
}

// serveTLS serves handler at a:port inside the namespace, without TLS where cfg is nil.
func (n *Internet) serveTLS(a netip.Addr, port uint16, cfg *tls.Config, handler http.Handler) error {
	l, err := n.listen(a, port)
	if err != nil {
		return err
	}
	if cfg != nil {
		l = tls.NewListener(l, cfg)
	}
	srv := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		// Clients that were cut off are what this internet is for: not worth a line each.
		ErrorLog: log.New(io.Discard, "", 0),
	}
	go srv.Serve(l) // ends with Close
	n.undo = append(n.undo, srv.Close)
	return nil
}

// closing is a teardown step that closes c and does not mind that it is closed already.
func closing(c io.Closer) func() error {
	return func() error {
		if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	}
}
