package practice

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"
)

// authority is the practice internet's own certificate authority. Its key lives in memory only.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "Tagout practice internet"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
		PermittedDNSDomains:   []string{"test"}, // nothing but *.test (RFC 6761) can ever be signed with it
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("signing the CA certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		return nil, fmt.Errorf("reading the CA certificate: %w", err)
	}
	return &authority{cert: cert, key: key}, nil
}

// serverTLS returns a server configuration with a fresh certificate for name.
func (a *authority) serverTLS(name string) (*tls.Config, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a key for %s: %w", name, err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: name},
		DNSNames:     []string{name},
		NotBefore:    a.cert.NotBefore,
		NotAfter:     a.cert.NotAfter,
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, fmt.Errorf("signing a certificate for %s: %w", name, err)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{raw}, PrivateKey: key}},
		MinVersion:   tls.VersionTLS12,
	}, nil
}

func (n *Internet) makeCA() error {
	ca, err := newAuthority()
	if err != nil {
		return err
	}
	n.ca = ca
	out := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})
	if err := os.WriteFile(n.CAFile(), out, 0o644); err != nil { // a certificate is public
		return fmt.Errorf("writing the CA certificate: %w", err)
	}
	return nil
}

// CAFile is the PEM file with the practice CA's certificate, readable by everybody.
func (n *Internet) CAFile() string { return filepath.Join(dir(n.inst), "ca.pem") }

// Roots trusts the practice CA and nothing else.
func (n *Internet) Roots() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(n.ca.cert)
	return pool
}
