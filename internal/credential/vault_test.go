package credential

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"filippo.io/age"

	"tagout/internal/wire"
)

func testVault(t *testing.T, dir string) *vault {
	t.Helper()
	v, err := openVault(dir, nil, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(v.close)
	return v
}

func TestVaultRefusesToStartOnWhatItCannotTrust(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(dir string) error
		want  string
	}{
		"the vault is damaged": {func(dir string) error {
			return flipLastByte(filepath.Join(dir, "vault.age"))
		}, "restore"},
		"the vault is cut off": {func(dir string) error {
			return os.Truncate(filepath.Join(dir, "vault.age"), 100)
		}, "restore"},
		"the identity is gone": {func(dir string) error {
			return os.Remove(filepath.Join(dir, "identity.age"))
		}, "restore the identity"},
		"the identity is another one": {func(dir string) error {
			if err := os.Remove(filepath.Join(dir, "identity.age")); err != nil {
				return err
			}
			_, err := makeIdentity(filepath.Join(dir, "identity.age"))
			return err
		}, "another identity"},
		"the identity is empty": {func(dir string) error {
			return os.Truncate(filepath.Join(dir, "identity.age"), 0)
		}, "restore it"},
		"the identity is garbage": {func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "identity.age"), []byte("AGE-SECRET-KEY-1GARBAGE\n"), 0o600)
		}, "restore it"},
		"others can read the identity": {func(dir string) error {
			return os.Chmod(filepath.Join(dir, "identity.age"), 0o640)
		}, "rotate"},
		"the directory is gone": {os.RemoveAll, "tagout setup"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "credd")
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			v, err := openVault(dir, nil, func(string) {})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := v.put("a", wire.VaultEntry{Value: testValue, Hosts: []string{"api.vendor.test:443"}}); err != nil {
				t.Fatal(err)
			}
			v.close()
			if err := c.spoil(dir); err != nil {
				t.Fatal(err)
			}
			_, err = openVault(dir, nil, func(string) {})
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "GARBAGE") {
				t.Errorf("opening ended with %v, want an error that says %q", err, c.want)
			}
		})
	}
}

func flipLastByte(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	raw[len(raw)-1] ^= 1
	return os.WriteFile(path, raw, 0o600)
}

func TestOneProcessAtATime(t *testing.T) {
	dir := t.TempDir()
	testVault(t, dir)
	if _, err := openVault(dir, nil, func(string) {}); err == nil || !strings.Contains(err.Error(), "another credd") {
		t.Errorf("a second vault in the same directory opened with %v", err)
	}
}

func TestVaultWritesWholeOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	v := testVault(t, dir)
	entry := wire.VaultEntry{Value: testValue, Hosts: []string{"api.vendor.test:443"}}
	if _, err := v.put("a", entry); err != nil {
		t.Fatal(err)
	}
	v.path = filepath.Join(dir, "gone", "vault.age") // no file can be made there, not even by root
	if _, err := v.put("b", entry); err == nil || v.has("b") {
		t.Errorf("a write that failed ended with %v; in memory: %v", err, v.has("b"))
	}
	if err := v.delete("a"); err == nil || !v.has("a") {
		t.Errorf("a delete that failed ended with %v; in memory: %v", err, v.has("a"))
	}
}

func TestLeftoversOfAKilledWriterAreRemoved(t *testing.T) {
	dir := t.TempDir()
	left := filepath.Join(dir, ".new-123")
	if err := os.WriteFile(left, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	testVault(t, dir)
	if _, err := os.Stat(left); err == nil {
		t.Error("the half-written file is still there")
	}
}

func TestReplacedAndForgottenValuesAreWiped(t *testing.T) {
	v := testVault(t, t.TempDir())
	entry := wire.VaultEntry{Value: testValue, Hosts: []string{"api.vendor.test:443"}}
	if _, err := v.put("a", entry); err != nil {
		t.Fatal(err)
	}
	first := v.secrets["a"].Value
	entry.Value = "another-" + testValue
	if _, err := v.put("a", entry); err != nil {
		t.Fatal(err)
	}
	second := v.secrets["a"].Value
	v.close()
	for _, value := range [][]byte{first, second} {
		if strings.Trim(string(value), "\x00") != "" {
			t.Error("a value is still in memory")
		}
	}
}

// TestNoRevocationWaitsForTheVaultsDisk: while a change of the vault waits for a disk that hangs, secrets are used as before
// and a revocation is acknowledged; the change is made when the disk comes back.
func TestNoRevocationWaitsForTheVaultsDisk(t *testing.T) {
	t.Parallel()
	b := newBox(t).start()
	b.put("vendor_api", testValue, "api.vendor.test:443")
	token := b.mint("kid1", testMark, "vendor_api")
	hung, release := make(chan struct{}), make(chan struct{})
	b.svc.vault.write = func(path string, plain []byte, to age.Recipient) error {
		close(hung)
		<-release
		return encryptFile(path, plain, to)
	}
	done := make(chan error, 1)
	go func() {
		done <- b.call("PUT", "/v1/vault/other", wire.VaultEntry{Value: "another-s3cret", Hosts: []string{"api.vendor.test:443"}}, nil)
	}()
	<-hung
	start := time.Now()
	if got, err := b.resolve(testMark, token, "api.vendor.test", 443); err != nil || got.Value != testValue {
		t.Errorf("a use: %v", err)
	}
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}}, nil); err != nil {
		t.Errorf("a revocation: %v", err)
	}
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("both took %v", took)
	}
	if _, err := b.resolve(testMark, token, "api.vendor.test", 443); err == nil {
		t.Error("the token outlived its revocation")
	}
	close(release)
	if err := <-done; err != nil || !b.svc.vault.has("other") {
		t.Errorf("the change: %v", err)
	}
}
