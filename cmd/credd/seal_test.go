package main

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"tagout/internal/control"
	"tagout/internal/vaultseal"
	"tagout/internal/wire"
)

// TestSystemdsKeyOpensTheVault: the real credd, as its own user, with an identity that is sealed to a key which the real
// systemd-creds keeps (with a host key of the test's own; a TPM is only another way for systemd to keep it). Without the
// key it denies everything; handed over open, as `tagout up` does, it serves.
func TestSystemdsKeyOpensTheVault(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	t.Setenv("SYSTEMD_CREDENTIAL_SECRET", filepath.Join(dir, "credential.secret"))
	w.start()
	if err := w.call("PUT", "/v1/vault/vendor_api", wire.VaultEntry{Value: testValue, Hosts: []string{"api.vendor.test:443"}}, nil); err != nil {
		t.Fatal(err)
	}
	c := vaultseal.Of("test")
	c.File = filepath.Join(dir, "tagout-test")
	var state wire.VaultState
	err := c.Make(t.Context(), "host", func(recipient string) error {
		return w.call("POST", "/v1/vault-seal", wire.SealRequest{Recipient: recipient}, &state)
	})
	if err != nil || state.Sealed != vaultseal.Key {
		t.Fatalf("sealing: %+v, %v", state, err)
	}
	w.kill()
	w.start()
	mark := w.inst.SessionMark(1)
	mint := wire.MintRequest{Kid: "kid1", Session: "01S", Card: "c", Mark: mark, Secrets: []wire.MintSecret{{Name: "vendor_api"}}}
	if err := w.call("POST", "/v1/sessions", mint, nil); control.Status(err) != http.StatusServiceUnavailable {
		t.Errorf("a sealed credd minted: %v", err)
	}
	var health wire.Health
	if err := w.call("GET", "/healthz", nil, &health); err != nil || health.Warning == "" {
		t.Errorf("it says %+v, %v", health, err)
	}
	w.kill()
	w.key = filepath.Join(dir, "decrypted") // as systemd lays it into $CREDENTIALS_DIRECTORY: root's alone
	if out, err := exec.Command("systemd-creds", "decrypt", "--name="+c.Name, c.File, w.key).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.Chmod(w.key, 0o400); err != nil {
		t.Fatal(err)
	}
	w.start()
	token := w.mint(mark)
	if got, err := w.asProxy(wire.ResolveRequest{Mark: mark, Token: token, Host: "api.vendor.test", Port: 443}); err != nil || got.Value != testValue {
		t.Errorf("resolving: %+v, %v", got, err)
	}
	key, err := os.ReadFile(w.key)
	if err != nil {
		t.Fatal(err)
	}
	w.noSecretLeft(testValue, token, string(key[:len(key)-1]))
}

// TestAPassphraseLeavesNoMemoryBehind: opening and sealing by one takes 256 MiB for a second; what a credd keeps of it would be
// locked, and stay.
func TestAPassphraseLeavesNoMemoryBehind(t *testing.T) {
	w := newWorld(t)
	w.start()
	const passphrase = "seven lamps in the harbour"
	if err := w.call("POST", "/v1/vault-seal", wire.SealRequest{Passphrase: passphrase}, nil); err != nil {
		t.Fatal(err)
	}
	w.lean("after sealing")
	w.kill()
	w.start()
	if err := w.call("POST", "/v1/vault-unlock", wire.UnlockRequest{Key: passphrase}, nil); err != nil {
		t.Fatal(err)
	}
	w.lean("after opening")
	w.checkProcess() // and what there is is locked again
	w.noSecretLeft(passphrase)
}

// lean fails the test where credd holds more memory than it needs.
func (w *world) lean(when string) {
	w.t.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc", itoa(w.cmd.Process.Pid), "status"))
	if err != nil {
		w.t.Fatal(err)
	}
	field := func(name string) int {
		for line := range strings.Lines(string(raw)) {
			if rest, ok := strings.CutPrefix(line, name+":"); ok {
				n, _ := strconv.Atoi(strings.Fields(rest)[0]) // kB
				return n
			}
		}
		return 0
	}
	if peak, now := field("VmHWM"), field("VmRSS"); now > 100<<10 || peak < 200<<10 {
		w.t.Errorf("%s credd holds %d kB, of %d kB at its most", when, now, peak)
	}
}
