package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/config"
)

// certificate returns the files of a certificate for localhost and a pool that trusts it.
func certificate(t *testing.T) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"issuer.test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: raw}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool = x509.NewCertPool()
	pool.AddCert(parsed)
	return cert, key, pool
}

func freePort(t *testing.T) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // only told which port is free
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// TestTheDoorSpeaksTLS13 with a certificate, and nothing else then; what it cannot serve as configured stops the start.
func TestTheDoorSpeaksTLS13(t *testing.T) {
	t.Parallel()
	cert, key, pool := certificate(t)
	hello := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("hello")) }) // the caller is gone
	c := config.Issuer{URL: "https://issuer.test", Listen: freePort(t), Certificate: cert, Key: key}
	stop, err := openDoor(t.Context(), c, hello)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	get := func(scheme string, highest uint16) error {
		client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "issuer.test", MaxVersion: highest}}}
		resp, err := client.Get(scheme + "://" + c.Listen.String() + "/")
		if err != nil {
			return err
		}
		defer resp.Body.Close() // only its status
		if resp.StatusCode != http.StatusOK {
			return net.ErrClosed
		}
		return nil
	}
	if err := get("https", 0); err != nil {
		t.Error(err)
	}
	if get("https", tls.VersionTLS12) == nil {
		t.Error("TLS 1.2 is spoken")
	}
	if get("http", 0) == nil {
		t.Error("HTTP without TLS is spoken")
	}
	for what, bad := range map[string]config.Issuer{
		"the port is taken":  c,
		"no certificate":     {URL: c.URL, Listen: freePort(t), Certificate: cert + "x", Key: key},
		"no key":             {URL: c.URL, Listen: freePort(t), Certificate: cert, Key: cert},
		"an address of none": {URL: c.URL, Listen: netip.MustParseAddrPort("192.0.2.1:1")},
	} {
		if stop, err := openDoor(t.Context(), bad, hello); err == nil || !strings.Contains(err.Error(), "issuer") {
			t.Errorf("%s: %v", what, err)
			if err == nil {
				stop()
			}
		}
	}
	stop()
	if get("https", 0) == nil {
		t.Error("it is served after its end")
	}
	for what, none := range map[string]config.Issuer{"no address": {URL: c.URL}, "no issuer": {}} {
		stop, err := openDoor(t.Context(), none, nil)
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		stop()
	}
	if issuerConfig(config.Issuer{}) != nil {
		t.Error("without the section the box is an issuer")
	}
}

// TestTheDoorHoldsFew: idle strangers take no more than its connections, and only for its time.
func TestTheDoorHoldsFew(t *testing.T) {
	t.Parallel()
	c := config.Issuer{URL: "http://127.0.0.1", Listen: freePort(t)}
	stop, err := openDoor(t.Context(), c, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("hello")) })) // the caller is gone
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	var idle []net.Conn
	for range doorConns {
		conn, err := net.Dial("tcp", c.Listen.String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close() // nothing was written
		idle = append(idle, conn)
	}
	client := &http.Client{Timeout: 4 * doorTime, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + c.Listen.String() + "/")
	if err != nil {
		t.Fatalf("behind %d idle strangers: %v", len(idle), err)
	}
	resp.Body.Close() // only that it came
	if _, err := idle[0].Read(make([]byte, 1)); err == nil {
		t.Error("an idle stranger was told something")
	}
}
