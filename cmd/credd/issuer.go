package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"

	"golang.org/x/net/netutil"

	"tagout/internal/config"
	"tagout/internal/credential"
)

// Bounds of the issuer's door. They are small: a stop waits for this process.
const (
	doorConns = 64
	doorTime  = 5 * time.Second // to send a request, and to take its answer
	doorHead  = 16 << 10        // bytes
)

// issuerConfig returns nil where the box is no issuer.
func issuerConfig(c config.Issuer) *credential.IssuerConfig {
	if c.URL == "" {
		return nil
	}
	return &credential.IssuerConfig{
		URL: c.URL, TrustDomain: c.TrustDomain, Algorithm: c.Algorithm, Lifetime: c.Lifetime, RotateEvery: c.RotateEvery, Audiences: c.Audiences,
	}
}

// openDoor serves handler over TCP where the configuration names an address. The caller calls stop.
func openDoor(ctx context.Context, c config.Issuer, handler http.Handler) (stop func(), err error) {
	if !c.Listen.IsValid() || handler == nil {
		return func() {}, nil
	}
	var encrypt *tls.Config
	if c.Certificate != "" {
		pair, err := tls.LoadX509KeyPair(c.Certificate, c.Key)
		if err != nil {
			return nil, fmt.Errorf("opening the issuer's door: reading issuer.certificate and issuer.key, as credd's own user: %w", err)
		}
		encrypt = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", c.Listen.String())
	if err != nil {
		return nil, fmt.Errorf("opening the issuer's door on %s: change issuer.listen in the box's configuration, or free the port: %w", c.Listen, err)
	}
	l = netutil.LimitListener(l, doorConns)
	if encrypt != nil {
		l = tls.NewListener(l, encrypt)
	}
	srv := &http.Server{
		Handler: handler, ReadTimeout: doorTime, WriteTimeout: doorTime, IdleTimeout: doorTime, MaxHeaderBytes: doorHead,
		ErrorLog: log.New(io.Discard, "", 0), // strangers' handshakes are not worth a line each
	}
	go srv.Serve(l)                    // ends with Close
	return func() { srv.Close() }, nil // nothing is written through it
}
