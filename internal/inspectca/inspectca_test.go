package inspectca

import (
	"bytes"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func made(t *testing.T) *CA {
	t.Helper()
	ca, err := New("test", time.Now())
	must(t, err)
	return ca
}

func credential(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	id, err := age.GenerateX25519Identity()
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, Credential), []byte(id.String()+"\n"), 0o400))
	return dir
}

func TestRoundTripAndNothingInClear(t *testing.T) {
	t.Parallel()
	for name, credentials := range map[string]string{"file": "", "credential": credential(t)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, ca := t.TempDir(), made(t)
			must(t, ca.Write(dir, credentials, -1, -1))
			got, err := Load(dir, credentials)
			must(t, err)
			if !got.Key.Equal(ca.Key) || !got.Cert.Equal(ca.Cert) {
				t.Error("another CA came back")
			}
			_, keyFile, idFile := Files(dir)
			raw, err := os.ReadFile(keyFile)
			must(t, err)
			der, err := x509.MarshalPKCS8PrivateKey(ca.Key)
			must(t, err)
			if bytes.Contains(raw, der) || bytes.Contains(raw, []byte("PRIVATE KEY")) || !bytes.HasPrefix(raw, []byte("age-encryption.org/")) {
				t.Error("the key is not encrypted")
			}
			info, err := os.Stat(keyFile)
			must(t, err)
			if info.Mode() != 0o400 {
				t.Errorf("mode %v", info.Mode())
			}
			if _, err := os.Stat(idFile); (err == nil) != (credentials == "") {
				t.Errorf("the identity's file: %v", err)
			}
		})
	}
}

// The key's file alone is worth nothing.
func TestKeyAloneDoesNotOpen(t *testing.T) {
	t.Parallel()
	dir, with := t.TempDir(), credential(t)
	must(t, made(t).Write(dir, with, -1, -1))
	for name, credentials := range map[string]string{"none": "", "another": credential(t)} {
		if _, err := Load(dir, credentials); err == nil || !strings.Contains(err.Error(), "tagout setup") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBadFiles(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(cert, key, id string) error{
		"no certificate":    func(cert, _, _ string) error { return os.Remove(cert) },
		"no key":            func(_, key, _ string) error { return os.Remove(key) },
		"no identity":       func(_, _, id string) error { return os.Remove(id) },
		"open identity":     func(_, _, id string) error { return os.Chmod(id, 0o444) },
		"empty identity":    func(_, _, id string) error { return replace(id, nil) },
		"half a key":        func(_, key, _ string) error { return halve(key) },
		"key in clear":      func(_, key, _ string) error { return replace(key, []byte("-----BEGIN PRIVATE KEY-----\n")) },
		"other certificate": func(cert, _, _ string) error { return replace(cert, []byte("nothing")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			must(t, made(t).Write(dir, "", -1, -1))
			must(t, spoil(Files(dir)))
			if _, err := Load(dir, ""); err == nil {
				t.Error("it was loaded")
			} else if strings.Contains(err.Error(), "AGE-SECRET-KEY") {
				t.Error("the error tells the identity")
			}
		})
	}
	dir := t.TempDir()
	must(t, made(t).Write(dir, "", -1, -1))
	other := t.TempDir()
	must(t, made(t).Write(other, "", -1, -1))
	cert, _, _ := Files(dir)
	otherCert, _, _ := Files(other)
	must(t, os.Rename(otherCert, cert))
	if _, err := Load(dir, ""); err == nil {
		t.Error("a certificate that the key does not belong to was loaded")
	}
}

func replace(file string, data []byte) error {
	if err := os.Chmod(file, 0o600); err != nil {
		return err
	}
	return os.WriteFile(file, data, 0o600)
}

func halve(file string) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return replace(file, raw[:len(raw)/2])
}

func TestKeepAndUsable(t *testing.T) {
	t.Parallel()
	ca := made(t)
	now := time.Now()
	if ca.Keep("test", now) != nil || ca.Usable(now) != nil {
		t.Error("a new CA is not kept")
	}
	if ca.Keep("other", now) == nil || ca.Keep("test", now.Add(life-spare+time.Hour)) == nil || ca.Usable(now.Add(life+time.Hour)) == nil {
		t.Error("a CA of another name or at its end is kept")
	}
}
