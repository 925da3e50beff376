package provider

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
	"strconv"
	"time"

	"tagout/internal/policy"
)

// Place is where a provider is. It is reached there and nowhere else.
type Place struct {
	Host      string           // a name or an address, from the provider's URL
	Addresses []netip.Addr     // where it is; empty: the resolvers say, and only public addresses count
	Resolvers []netip.AddrPort // asked for Host where Addresses is empty
	CAFiles   []string         // PEM files of authorities that count beside the system's
}

// NewHTTP returns a client for the provider at p. It reads no environment (no proxy), keeps no cookies, checks the
// certificate against p.Host and follows no redirect.
func NewHTTP(p Place) (*http.Client, error) {
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool() // then CAFiles alone count
	}
	for _, file := range p.CAFiles {
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("reading a certificate authority: %w", err)
		}
		if !roots.AppendCertsFromPEM(raw) {
			return nil, fmt.Errorf("reading a certificate authority: %s holds no PEM certificate", file)
		}
	}
	return &http.Client{
		Transport: &http.Transport{
			DialContext:            p.dial,
			TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout:    10 * time.Second,
			MaxResponseHeaderBytes: 32 << 10,
			DisableCompression:     true, // nothing unpacks to more than was bounded
			DisableKeepAlives:      true, // a connection that broke meanwhile would leave it unsure what was carried out
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// addressError says why a provider's address is not called.
type addressError struct{ text string }

func (e *addressError) Error() string { return e.text }

// dial connects to the provider, whatever host net/http asks for: a request to another one is refused.
func (p Place) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || host != p.Host {
		return nil, &addressError{"only " + p.Host + " is called"}
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, &addressError{"port " + port + " is none"}
	}
	addrs, err := p.addresses(ctx)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, a := range addrs {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", netip.AddrPortFrom(a, uint16(n)).String())
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// addresses are those of the configuration, or else the public ones that the name has now.
func (p Place) addresses(ctx context.Context) ([]netip.Addr, error) {
	if len(p.Addresses) > 0 {
		return p.Addresses, nil
	}
	if a, err := netip.ParseAddr(p.Host); err == nil {
		return []netip.Addr{a}, nil // it stands in the configuration
	}
	found, err := p.resolver().LookupNetIP(ctx, "ip4", p.Host+".") // with the dot no search domain is tried
	if err != nil {
		return nil, &addressError{"the name " + p.Host + " cannot be resolved"}
	}
	var out []netip.Addr
	var why error
	for _, a := range found {
		if err := policy.CheckCall(a.Unmap(), false); err != nil {
			why = err
			continue
		}
		out = append(out, a.Unmap())
	}
	if len(out) == 0 {
		return nil, &addressError{fmt.Sprintf("%s has no address that may be called (%v): if it is meant, write it into the provider's addresses", p.Host, why)}
	}
	return out, nil
}

// resolver asks the box's resolvers in turn. Go's own resolver looks into /etc/hosts before, which is root's.
func (p Place) resolver() *net.Resolver {
	turn := 0
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		if len(p.Resolvers) == 0 {
			return nil, &addressError{"the box's configuration names no resolvers"}
		}
		at := p.Resolvers[turn%len(p.Resolvers)]
		turn++
		return new(net.Dialer).DialContext(ctx, network, at.String())
	}}
}

// isTLS says whether err is about the other side's certificate.
func isTLS(err error) bool {
	var verify *tls.CertificateVerificationError
	var host x509.HostnameError
	var unknown x509.UnknownAuthorityError
	var record tls.RecordHeaderError
	return errors.As(err, &verify) || errors.As(err, &host) || errors.As(err, &unknown) || errors.As(err, &record)
}
