package box

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"tagout/internal/instance"
)

const (
	caLife  = 365 * 24 * time.Hour
	caSpare = 30 * 24 * time.Hour // a CA with less left is replaced
)

// makeCA makes the CA under whose name the proxy answers on inspected connections. Only kids trust it. One
// that is whole and lasts is kept; one that is half-written or about to expire is replaced.
func makeCA(_ context.Context, j *job) error {
	certFile, keyFile := caFiles(j.inst)
	uid, gid := j.inst.UID(instance.Proxy), j.inst.GroupID()
	if err := checkCA(certFile, keyFile, caName(j.inst), time.Now()); err == nil {
		return os.Chown(keyFile, uid, gid) // the slot may be another one since
	}
	certPEM, keyPEM, err := newCA(caName(j.inst), time.Now())
	if err != nil {
		return err
	}
	if _, err := os.Lstat(keyFile); errors.Is(err, fs.ErrNotExist) {
		j.undo = append(j.undo, func(context.Context) error { return errors.Join(removeFile(certFile), removeFile(keyFile)) })
	}
	// The key first: a certificate without its key would be offered to kids in vain.
	if err := writeFile(keyFile, keyPEM, 0o400, uid, gid); err != nil {
		return err
	}
	return writeFile(certFile, certPEM, 0o644, 0, 0)
}

func caFiles(i instance.Instance) (cert, key string) {
	return filepath.Join(i.CADir(), "ca.pem"), filepath.Join(i.CADir(), "ca.key")
}

func caName(i instance.Instance) string { return "Tagout inspection CA of instance " + i.Name() }

// newCA returns a self-signed P-256 CA without name constraints, which may sign leaves only.
func newCA(name string, now time.Time) (certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("making a key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, nil, fmt.Errorf("making a serial number: %w", err)
	}
	tmpl := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: name, Organization: []string{"Tagout"}},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(caLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return nil, nil, fmt.Errorf("signing: %w", err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("encoding the key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), nil
}

// checkCA says why the CA in the two files cannot go on being used; nil where it can.
func checkCA(certFile, keyFile, name string, now time.Time) error {
	certPEM, err := os.ReadFile(certFile)
	if err != nil {
		return err
	}
	keyPEM, err := os.ReadFile(keyFile)
	if err != nil {
		return err
	}
	certBlock, _ := pem.Decode(certPEM)
	keyBlock, _ := pem.Decode(keyPEM)
	if certBlock == nil || keyBlock == nil {
		return errors.New("the CA's files are not whole")
	}
	cert, err := x509.ParseCertificate(certBlock.Bytes)
	if err != nil {
		return err
	}
	parsed, err := x509.ParsePKCS8PrivateKey(keyBlock.Bytes)
	if err != nil {
		return err
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	switch {
	case !ok || !key.PublicKey.Equal(cert.PublicKey):
		return errors.New("the CA's key does not belong to its certificate")
	case !cert.IsCA || cert.Subject.CommonName != name:
		return errors.New("this is not the instance's CA")
	case now.Before(cert.NotBefore) || now.Add(caSpare).After(cert.NotAfter):
		return errors.New("the CA expires soon")
	}
	return nil
}
