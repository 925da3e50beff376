package image

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func testHost(t *testing.T) *Host {
	t.Helper()
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, []byte("-----BEGIN CERTIFICATE-----\ninspection\n-----END CERTIFICATE-----\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := NewHost(Config{Dir: filepath.Join(dir, "image"), Gateway: netip.MustParseAddr("198.19.0.1"), Trust: Trust(ca)})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestRootHoldsNothingElseOfTheHost(t *testing.T) {
	h := testHost(t)
	root := filepath.Join(t.TempDir(), "root")
	mounts, err := h.Root(root, "calm-otter", netip.MustParseAddr("198.19.0.3"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{"/usr": true, trustPath: true, "/etc/ld.so.cache": true, "/etc/alternatives": true,
		"/bin": true, "/sbin": true, "/lib": true, "/lib32": true, "/lib64": true, "/libx32": true}
	for _, m := range mounts {
		if !want[m.Target] || m.Writable {
			t.Errorf("mount %+v: not one that the image promises, read-only", m)
		}
		if _, err := os.Stat(filepath.Join(root, m.Target)); err != nil {
			t.Errorf("mount point: %v", err)
		}
	}
	resolv, err := os.ReadFile(filepath.Join(root, "etc/resolv.conf"))
	if err != nil || !strings.HasPrefix(string(resolv), "nameserver 198.19.0.1\n") {
		t.Errorf("resolv.conf = %q, %v, want the gateway", resolv, err)
	}
	passwd, err := os.ReadFile(filepath.Join(root, "etc/passwd"))
	if err != nil || !strings.Contains(string(passwd), "kid:x:1000:1000:") {
		t.Errorf("passwd = %q, %v", passwd, err)
	}
}

func TestTrustStoreEndsWithInspectionCA(t *testing.T) {
	h := testHost(t)
	pem, err := os.ReadFile(h.bundle)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(string(pem), "inspection\n-----END CERTIFICATE-----\n") {
		t.Error("the trust store does not end with the inspection CA")
	}
	if h.Env("")["SSL_CERT_FILE"] != trustPath {
		t.Errorf("SSL_CERT_FILE = %q, want %q", h.Env("")["SSL_CERT_FILE"], trustPath)
	}
}

func TestTrustThatIsNoCertificateIsRefused(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.pem")
	if err := os.WriteFile(bad, []byte("not a certificate\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, trust := range [][]string{{bad}, {bad + ".missing"}} {
		if _, err := NewHost(Config{Dir: t.TempDir(), Trust: trust}); err == nil {
			t.Errorf("trust %v: no error", trust)
		}
	}
}
