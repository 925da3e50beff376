package oci

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"time"
)

// NewTransport reaches sources of images as the box's proxy reaches the world: by the given resolver, trusting the system's
// certificate authorities and those in the PEM files.
func NewTransport(resolver netip.AddrPort, authorities []string) (*http.Transport, error) {
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("reading the system's certificate authorities: %w", err)
	}
	for _, file := range authorities {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("reading the box's certificate authorities: %w", err)
		}
		if !roots.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no PEM certificate", file)
		}
	}
	names := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, resolver.String())
	}}
	dialer := &net.Dialer{Timeout: 10 * time.Second, Resolver: names}
	return &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, ForceAttemptHTTP2: true, TLSHandshakeTimeout: 10 * time.Second,
		ResponseHeaderTimeout: 30 * time.Second, TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
	}, nil
}
