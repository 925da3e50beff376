package vaultseal

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/age"

	"tagout/internal/testroot"
)

func TestHow(t *testing.T) {
	for raw, want := range map[string]string{
		"AGE-SECRET-KEY-1X\n":                  Plain,
		"# a comment\nAGE-SECRET-KEY-1X\n":     Plain,
		Intro + "-> scrypt abc 18\nx\n--- y\n": Passphrase,
		Intro + "-> X25519 abc\nx\n--- y\n":    Key,
		Intro + "-> piv-p256 abc\nx\n":         "",
		Intro:                                  "",
		"":                                     "",
		" \n":                                  "",
	} {
		if got, err := How([]byte(raw)); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", raw, got, err)
		}
	}
}

// hostKey has systemd-creds use a host key of the test's own.
func hostKey(t *testing.T) {
	t.Helper()
	testroot.Require(t) // systemd's host key is root's
	if _, err := exec.LookPath("systemd-creds"); err != nil {
		t.Fatal("systemd-creds is needed here (Debian package systemd):", err)
	}
	t.Setenv("SYSTEMD_CREDENTIAL_SECRET", filepath.Join(t.TempDir(), "credential.secret"))
}

// TestSystemdKeepsTheKey, the real one, with a host key: what it keeps is not in clear, opens what is sealed to it under
// its own name alone, and a second one takes its place only after it is used.
func TestSystemdKeepsTheKey(t *testing.T) {
	hostKey(t)
	c := Credential{Name: "tagout-credd", File: filepath.Join(t.TempDir(), "tagout-test")}
	var first, second string
	if err := c.Make(t.Context(), "host", func(r string) error { first = r; return nil }); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(c.File)
	info, statErr := os.Stat(c.File)
	if err != nil || statErr != nil || bytes.Contains(raw, []byte("AGE-SECRET")) || info.Mode().Perm() != 0o600 {
		t.Fatalf("the credential: %v, %v, %v", err, statErr, info)
	}
	if got := decrypted(t, c); got.Recipient().String() != first {
		t.Errorf("systemd keeps another key than the one that was sealed to")
	}
	if out, err := exec.Command("systemd-creds", "decrypt", "--name=other", c.File, "-").CombinedOutput(); err == nil {
		t.Errorf("under another name it was given out: %d bytes", len(out))
	}
	broken := errors.New("credd is away")
	if err := c.Make(t.Context(), "host", func(string) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("a key that was not used: %v", err)
	}
	if got := decrypted(t, c); got.Recipient().String() != first {
		t.Error("the key that opens the vault is gone")
	}
	if err := c.Make(t.Context(), "host", func(r string) error { second = r; return nil }); err != nil || second == first {
		t.Fatalf("the second key: %v", err)
	}
	if got := decrypted(t, c); got.Recipient().String() != second {
		t.Error("the second key has not taken the first one's place")
	}
	left, err := os.ReadDir(filepath.Dir(c.File))
	if err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func decrypted(t *testing.T, c Credential) *age.X25519Identity {
	t.Helper()
	out, err := exec.Command("systemd-creds", "decrypt", "--name="+c.Name, c.File, "-").Output()
	if err != nil {
		t.Fatal(err)
	}
	id, err := age.ParseX25519Identity(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal("systemd gave back something else than a key")
	}
	return id
}

// TestNothingIsSealedToWhatSystemdCannotKeep.
func TestNothingIsSealedToWhatSystemdCannotKeep(t *testing.T) {
	hostKey(t)
	used := func(string) error { t.Error("the key was used"); return nil }
	c := Credential{Name: "tagout-credd", File: filepath.Join(t.TempDir(), "gone", "tagout-test")}
	if err := c.Make(t.Context(), "host", used); err == nil {
		t.Error("a credential was made where there is no directory")
	}
	c.File = filepath.Join(t.TempDir(), "tagout-test")
	if err := c.Make(t.Context(), "no-such-key", used); err == nil {
		t.Error("a credential was made with an unknown kind of key")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Make(ctx, "host", used); err == nil {
		t.Error("a credential was made although it was called off")
	}
	t.Setenv("PATH", t.TempDir())
	if err := c.Make(t.Context(), "host", used); err == nil || !strings.Contains(err.Error(), "passphrase needs none") {
		t.Errorf("without systemd-creds: %v", err)
	}
}
