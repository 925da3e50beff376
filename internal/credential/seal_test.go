package credential

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"filippo.io/age"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/vaultseal"
	"tagout/internal/wire"
)

const testPassphrase = "correct horse battery staple"

func TestMain(m *testing.M) {
	workFactor = 8 // cmd/credd's tests have the real one
	os.Exit(m.Run())
}

// testKey is an identity that another one is sealed to, as systemd would keep it.
func testKey(t *testing.T) *age.X25519Identity {
	t.Helper()
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TestASealedVaultDeniesEverythingUntilItIsOpened, in both ways of sealing, and says what to do; the control is the same
// box with a plain identity.
func TestASealedVaultDeniesEverythingUntilItIsOpened(t *testing.T) {
	key := testKey(t)
	for _, c := range []struct {
		name, opens, wrong string
		seal               wire.SealRequest
		how                string
	}{
		{"passphrase", testPassphrase, "wrong horse battery staple", wire.SealRequest{Passphrase: testPassphrase}, vaultseal.Passphrase},
		{"key", key.String(), testPassphrase, wire.SealRequest{Recipient: key.Recipient().String()}, vaultseal.Key},
		{"key, and another key", "# for systemd\n" + key.String() + "\n", testKey(t).String(), wire.SealRequest{Recipient: key.Recipient().String()}, vaultseal.Key},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := newBox(t).start()
			b.put("vendor_api", testValue, bound+":443")
			b.stop()
			b.start()
			if _, err := b.resolve(testMark, b.mint("kid0", testMark, "vendor_api"), bound, 443); err != nil { // the control
				t.Fatal(err)
			}
			var state wire.VaultState
			if err := b.call("POST", "/v1/vault-seal", c.seal, &state); err != nil || state.Sealed != c.how || !state.Open || len(state.Recipients) != 1 {
				t.Fatalf("sealing: %+v, %v", state, err)
			}
			b.stop()
			raw, err := os.ReadFile(filepath.Join(b.dir, "identity.age"))
			if err != nil || bytes.Contains(raw, []byte("AGE-SECRET-KEY")) {
				t.Fatalf("the identity lies in clear: %v", err)
			}
			b.start()
			b.denied(t)
			refusedWith(t, b.call("POST", "/v1/vault-unlock", wire.UnlockRequest{Key: c.wrong}, nil), 403, reason.VaultSealed)
			refusedWith(t, b.call("POST", "/v1/vault-unlock", wire.UnlockRequest{}, nil), 403, reason.VaultSealed)
			b.denied(t)
			if err := b.call("POST", "/v1/vault-unlock", wire.UnlockRequest{Key: c.opens}, &state); err != nil || !state.Open {
				t.Fatalf("opening: %+v, %v", state, err)
			}
			refusedWith(t, b.call("POST", "/v1/vault-unlock", wire.UnlockRequest{Key: c.wrong}, nil), 403, reason.VaultSealed) // it is told so all the same
			if err := b.call("POST", "/v1/vault-unlock", wire.UnlockRequest{Key: c.opens}, nil); err != nil {
				t.Errorf("opening it twice: %v", err)
			}
			if got, err := b.resolve(testMark+1, b.mint("kid1", testMark+1, "vendor_api"), bound, 443); err != nil || got.Value != testValue {
				t.Errorf("after it was opened: %+v, %v", got, err)
			}
			b.stop()
			b.start(func(cfg *Config) { cfg.Unlock = []byte(c.opens) })
			if got, err := b.resolve(testMark+2, b.mint("kid2", testMark+2, "vendor_api"), bound, 443); err != nil || got.Value != testValue {
				t.Errorf("opened from the start: %+v, %v", got, err)
			}
			b.stop()
			b.start(func(cfg *Config) { cfg.Unlock = []byte(c.wrong) })
			if err := b.svc.Warning(); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("with a wrong one from the start: %v", err)
			}
			b.denied(t)
			b.noKeyIn(t, c.opens, c.wrong, testValue)
		})
	}
}

// denied fails unless everything that gives something is refused, and revoking works.
func (b *box) denied(t *testing.T) {
	t.Helper()
	if err := b.svc.Warning(); err == nil || !strings.Contains(err.Error(), "tagout vault unlock") {
		t.Errorf("what an operator is told: %v", err)
	}
	for what, err := range map[string]error{
		"minting":           b.call("POST", "/v1/sessions", mintFor("kid9", otherMark, "vendor_api"), nil),
		"minting nothing":   b.call("POST", "/v1/sessions", mintFor("kid9", otherMark), nil),
		"resolving":         b.call("POST", "/v1/resolve", wire.ResolveRequest{Mark: testMark, Token: "tgo_" + strings.Repeat("a", 32), Host: bound, Port: 443}, nil),
		"setting a secret":  b.call("PUT", "/v1/vault/x", wire.VaultEntry{Value: testValue, Hosts: []string{bound + ":443"}}, nil),
		"rotating":          b.call("POST", "/v1/vault/vendor_api/rotate", wire.RotateRequest{Value: "x" + testValue}, nil),
		"removing a secret": b.call("DELETE", "/v1/vault/vendor_api", nil, nil),
		"listing":           b.call("GET", "/v1/vault", nil, nil),
		"sealing":           b.call("POST", "/v1/vault-seal", wire.SealRequest{Plain: true}, nil),
	} {
		t.Run(what, func(t *testing.T) { refusedWith(t, err, 503, reason.VaultSealed) })
	}
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{All: true}, nil); err != nil {
		t.Errorf("revoking: %v", err)
	}
	if got := b.introspect("tgo_" + strings.Repeat("a", 32)); got.Active {
		t.Error("a token is active")
	}
}

// noKeyIn looks for the texts in every record.
func (b *box) noKeyIn(t *testing.T, texts ...string) {
	t.Helper()
	raw, err := json.Marshal([][]audit.Record{b.rec.find(audit.EventVaultUnlocked), b.rec.find(audit.EventVaultSealed), b.rec.find(audit.EventVaultChanged), b.rec.find(audit.EventTokenRefused)})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range texts {
		if bytes.Contains(raw, []byte(strings.TrimSpace(text))) {
			t.Errorf("a record holds %q", text)
		}
	}
	if n := len(b.rec.find(audit.EventVaultUnlocked)); n < 3 {
		t.Errorf("%d attempts to open it are recorded, want 3", n)
	}
}

func TestSealingThatCannotBe(t *testing.T) {
	b := newBox(t).start()
	for name, req := range map[string]wire.SealRequest{
		"nothing":              {},
		"two ways":             {Passphrase: testPassphrase, Plain: true},
		"a short passphrase":   {Passphrase: "hunter2"},
		"no recipient":         {Recipient: "age1hunter2"},
		"a private key":        {Recipient: testKey(t).String()},
		"all three":            {Passphrase: testPassphrase, Recipient: testKey(t).Recipient().String(), Plain: true},
		"somebody's ssh key":   {Recipient: "ssh-ed25519 AAAA"},
		"an empty passphrase ": {Passphrase: ""},
	} {
		err := b.call("POST", "/v1/vault-seal", req, nil)
		refusedWith(t, err, 400, reason.Malformed)
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v repeats it", name, err)
		}
	}
	if got := b.svc.vault.state(); got.Sealed != vaultseal.Plain {
		t.Errorf("the identity lies %s", got.Sealed)
	}
}

// TestSealingIsWholeOrNotAtAll: a disk that takes nothing leaves the identity as it was.
func TestSealingIsWholeOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	v := testVault(t, dir)
	before, err := os.ReadFile(filepath.Join(dir, "identity.age"))
	if err != nil {
		t.Fatal(err)
	}
	v.disk.path = filepath.Join(dir, "gone", "identity.age") // no file can be made there, not even by root
	if _, err := v.seal(&wire.SealRequest{Passphrase: testPassphrase}); err == nil || !strings.Contains(err.Error(), "nothing was changed") {
		t.Errorf("sealing ended with %v", err)
	}
	after, err := os.ReadFile(filepath.Join(dir, "identity.age"))
	if err != nil || !bytes.Equal(before, after) || v.state().Sealed != vaultseal.Plain {
		t.Errorf("the identity changed: %v, %+v", err, v.state())
	}
}

// TestDamagedSealsAreToldFromWrongKeys: credd does not start on a file that no key opens.
func TestDamagedSealsAreToldFromWrongKeys(t *testing.T) {
	for name, spoil := range map[string]func(raw []byte) []byte{
		"the end is changed":   func(raw []byte) []byte { raw[len(raw)-1] ^= 1; return raw },
		"the header is":        func(raw []byte) []byte { return bytes.Replace(raw, []byte("\n--- "), []byte("\n--- A"), 1) },
		"it is cut off":        func(raw []byte) []byte { return raw[:len(raw)-20] },
		"it is sealed oddly":   func([]byte) []byte { return []byte(vaultseal.Intro + "-> piv-p256 abc\n") },
		"it holds no identity": nil,
	} {
		t.Run(name, func(t *testing.T) {
			dir, key := t.TempDir(), testKey(t)
			v, err := openVault(dir, nil, func(string) {})
			if err == nil {
				_, err = v.put("a", wire.VaultEntry{Value: testValue, Hosts: []string{bound + ":443"}})
			}
			if err == nil {
				_, err = v.seal(&wire.SealRequest{Recipient: key.Recipient().String()})
			}
			if err != nil {
				t.Fatal(err)
			}
			v.close()
			path := filepath.Join(dir, "identity.age")
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if spoil == nil {
				err = encryptFile(path, []byte("hunter2\n"), key.Recipient())
			} else {
				err = os.WriteFile(path, spoil(raw), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			_, err = openVault(dir, []byte(key.String()), func(string) {})
			if err == nil || errors.Is(err, errWrongKey) || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "restore") {
				t.Errorf("opening ended with %v", err)
			}
		})
	}
}

// TestAPassphraseThatWouldTakeForEverIsRefused: a file with a work factor of hours stops nothing.
func TestAPassphraseThatWouldTakeForEverIsRefused(t *testing.T) {
	raw := []byte(vaultseal.Intro + "-> scrypt bG9uZyBlbm91Z2ggc2FsdA 30\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n--- AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n0123456789abcdef")
	f := &identityFile{path: "identity.age", how: vaultseal.Passphrase, raw: raw}
	start := time.Now()
	if _, err := f.open([]byte(testPassphrase)); err == nil || time.Since(start) > 5*time.Second {
		t.Errorf("opening ended with %v after %v", err, time.Since(start))
	}
}

func FuzzIdentityFile(f *testing.F) {
	f.Add([]byte("AGE-SECRET-KEY-1GARBAGE\n"), []byte("x"))
	f.Add([]byte(vaultseal.Intro+"-> X25519 a\n"), []byte("AGE-SECRET-KEY-1"))
	f.Add([]byte(vaultseal.Intro+"-> scrypt a 1\n"), []byte(testPassphrase))
	f.Fuzz(func(t *testing.T, raw, key []byte) {
		how, err := vaultseal.How(raw)
		if err != nil {
			return
		}
		file := &identityFile{path: "identity.age", how: how, raw: bytes.Clone(raw)}
		if how == vaultseal.Passphrase {
			return // the work factor is bounded, and still takes a second
		}
		id, err := file.open(key)
		if (id == nil) == (err == nil) {
			t.Errorf("%v and %v", id, err)
		}
	})
}
