package proxy

import (
	"container/list"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"sync"
	"time"

	"tagout/internal/inspectca"
)

// Leaf certificates are short-lived and few: they stand only between a kid and its own proxy.
const (
	leafLife  = 7 * 24 * time.Hour
	leafRenew = leafLife / 2
	leafSkew  = time.Hour // a kid's clock may be that far behind
	maxLeaves = 1024
)

// CA is the instance's inspection authority. Safe for concurrent use.
type CA struct {
	cert    *x509.Certificate
	key     crypto.PrivateKey
	leafKey *ecdsa.PrivateKey // one for all leaves, new in every process, never stored

	mu     sync.Mutex
	leaves map[string]*list.Element // of *leaf, guarded by mu
	recent *list.List               // guarded by mu: most recently used first
}

type leaf struct {
	name string
	cert *tls.Certificate
	made time.Time
}

// LoadCA reads the authority in dir, as `tagout setup` wrote it. credentials is systemd's credentials directory,
// empty where there is none.
func LoadCA(dir, credentials string) (*CA, error) {
	ca, err := inspectca.Load(dir, credentials)
	if err != nil {
		return nil, err
	}
	if err := ca.Usable(time.Now()); err != nil {
		return nil, err
	}
	return newCA(ca.Cert, ca.Key)
}

func newCA(cert *x509.Certificate, key crypto.PrivateKey) (*CA, error) {
	leafKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the leaves' key: %w", err)
	}
	return &CA{cert: cert, key: key, leafKey: leafKey, leaves: map[string]*list.Element{}, recent: list.New()}, nil
}

// leaf returns a certificate for name, a canonical host name. Callers share it and do not change it.
func (ca *CA) leaf(name string) (*tls.Certificate, error) {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if e, ok := ca.leaves[name]; ok {
		l := e.Value.(*leaf)
		if time.Since(l.made) < leafRenew {
			ca.recent.MoveToFront(e)
			return l.cert, nil
		}
		ca.forget(e)
	}
	cert, err := ca.mint(name) // well under a millisecond: waiting for it under the lock keeps out twins
	if err != nil {
		return nil, err
	}
	ca.leaves[name] = ca.recent.PushFront(&leaf{name, cert, time.Now()})
	if ca.recent.Len() > maxLeaves {
		ca.forget(ca.recent.Back())
	}
	return cert, nil
}

func (ca *CA) forget(e *list.Element) {
	delete(ca.leaves, e.Value.(*leaf).name)
	ca.recent.Remove(e)
}

func (ca *CA) mint(name string) (*tls.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("minting a certificate for %s: %w", name, err)
	}
	now := time.Now()
	until := now.Add(leafLife)
	if until.After(ca.cert.NotAfter) {
		until = ca.cert.NotAfter
	}
	if now.After(until) {
		return nil, errors.New("minting a certificate: the inspection CA has run out: run `tagout setup`")
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial.Add(serial, big.NewInt(1)), Subject: pkix.Name{Organization: []string{"Tagout inspection"}},
		DNSNames: []string{name}, NotBefore: now.Add(-leafSkew), NotAfter: until,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.cert, &ca.leafKey.PublicKey, ca.key)
	if err != nil {
		return nil, fmt.Errorf("minting a certificate for %s: %w", name, err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("minting a certificate for %s: %w", name, err)
	}
	return &tls.Certificate{Certificate: [][]byte{der, ca.cert.Raw}, PrivateKey: ca.leafKey, Leaf: parsed}, nil
}
