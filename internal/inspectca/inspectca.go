// Package inspectca makes and reads an instance's inspection CA, under whose name the proxy answers on inspected
// connections. Setup makes it, the proxy uses it, kids trust its certificate.
//
// The key is encrypted with age to an X25519 identity. The identity comes from systemd (LoadCredential or
// LoadCredentialEncrypted, systemd.exec(5)) where the service manager hands one over, and otherwise lies beside
// the key in a file of its own that only the proxy's user can read.
//
// Promised: the key is on disk only encrypted, and readable only for the proxy's user. Not promised: with the
// identity in the same directory, whoever gets both files (root, a backup of the whole directory) has the key; the
// encryption then helps only where the key's file gets out alone. With a credential that systemd seals to the
// TPM, a stolen disk or backup is not enough.
package inspectca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"
)

// CA is an authority that may sign leaves only.
type CA struct {
	Cert *x509.Certificate
	Key  *ecdsa.PrivateKey
}

// How long a CA lives, and how much of that must be left for it to be kept.
const (
	life  = 365 * 24 * time.Hour
	spare = 30 * 24 * time.Hour
)

// Files returns where an instance's CA lies in dir. Identity may be absent.
func Files(dir string) (cert, key, identity string) {
	return filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.key.age"), filepath.Join(dir, "ca.identity")
}

// New makes a self-signed P-256 CA without name constraints.
func New(name string, now time.Time) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("making a serial number: %w", err)
	}
	tmpl := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: name, Organization: []string{"Tagout"}},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(life),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("signing: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("signing: %w", err)
	}
	return &CA{cert, key}, nil
}

// Load reads the CA in dir, as Write left it. credentials is the directory in which systemd hands over
// credentials ($CREDENTIALS_DIRECTORY), empty where there is none.
func Load(dir, credentials string) (*CA, error) {
	certFile, keyFile, _ := Files(dir)
	certPEM, err := os.ReadFile(certFile)
	if err != nil {
		return nil, fmt.Errorf("reading the inspection CA: run `tagout setup`: %w", err)
	}
	block, _ := pem.Decode(certPEM)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, fmt.Errorf("reading the inspection CA: %s holds no certificate: run `tagout setup`", certFile)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("reading the inspection CA %s: run `tagout setup`: %w", certFile, err)
	}
	der, err := readKey(dir, credentials)
	if err != nil {
		return nil, fmt.Errorf("reading the inspection CA's key: %w", err)
	}
	defer clear(der)
	parsed, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, fmt.Errorf("reading the inspection CA's key: %s holds none: run `tagout setup`", keyFile)
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("reading the inspection CA: the key %s does not belong to the certificate: run `tagout setup`", keyFile)
	}
	return &CA{cert, key}, nil
}

// Usable says why the CA cannot be used at all; nil where it can.
func (ca *CA) Usable(now time.Time) error {
	switch {
	case !ca.Cert.IsCA:
		return errors.New("the inspection CA is no CA certificate: run `tagout setup`")
	case now.After(ca.Cert.NotAfter):
		return fmt.Errorf("the inspection CA ran out on %s: run `tagout setup`", ca.Cert.NotAfter.UTC())
	}
	return nil
}

// Keep says why the CA should be replaced; nil where it lasts and is the one that name stands for.
func (ca *CA) Keep(name string, now time.Time) error {
	switch {
	case !ca.Cert.IsCA || ca.Cert.Subject.CommonName != name:
		return errors.New("this is not the instance's CA")
	case now.Before(ca.Cert.NotBefore) || now.Add(spare).After(ca.Cert.NotAfter):
		return errors.New("the CA expires soon")
	}
	return nil
}
