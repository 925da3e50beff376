package oci

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"syscall"
	"time"

	"tagout/internal/policy"
)

// ErrAddress is wrapped where what was asked for lies at an address that is not called.
var ErrAddress = errors.New("this address is not called")

// NewTransport reaches sources of images as the box's proxy reaches the world: by the given resolver, trusting the system's
// certificate authorities and those in the PEM files, and never at an address that no rule may grant (ErrAddress). Private
// addresses are for callers who may reach them by themselves.
func NewTransport(resolver netip.AddrPort, authorities []string, private bool) (*http.Transport, error) {
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
	dialer := &net.Dialer{Timeout: 10 * time.Second, Resolver: names, Control: func(_, address string, _ syscall.RawConn) error {
		return mayCall(address, private) // of the address itself, whatever name led there
	}}
	t := &http.Transport{
		DialContext: dialer.DialContext, ForceAttemptHTTP2: true, TLSHandshakeTimeout: 10 * time.Second,
		ResponseHeaderTimeout: 30 * time.Second, TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
	}
	if private {
		t.Proxy = http.ProxyFromEnvironment // which addresses lie behind it, nobody sees here
	}
	return t, nil
}

func mayCall(address string, private bool) error {
	to, err := netip.ParseAddrPort(address)
	if err == nil {
		err = policy.CheckCall(to.Addr(), private)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrAddress, err)
	}
	return nil
}
