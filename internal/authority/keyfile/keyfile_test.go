package keyfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/authority"
)

func TestMain(m *testing.M) {
	scryptWork = 10
	os.Exit(m.Run())
}

func TestKeyFiles(t *testing.T) {
	t.Parallel()
	for name, secret := range map[string][]byte{"clear": nil, "encrypted": []byte("correct horse")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "ada.key")
			public, err := New(path, "Ada Operator", secret)
			if err != nil {
				t.Fatal(err)
			}
			info, err := os.Stat(path)
			if err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("mode %v, %v", info.Mode(), err)
			}
			raw, err := os.ReadFile(path)
			if err != nil || strings.Contains(string(raw), "PRIVATE") != (secret == nil) {
				t.Errorf("%v\n%s", err, raw)
			}
			if got, err := Public(path); err != nil || got != public {
				t.Errorf("public key %q, %v", got, err)
			}
			private, err := Private(path, secret)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := authority.Public(private); err != nil || got != public {
				t.Errorf("%q, %v", got, err)
			}
			if _, err := New(path, "Ada Operator", secret); !errors.Is(err, fs.ErrExist) {
				t.Errorf("a key was written over: %v", err)
			}
			if secret != nil {
				for _, wrong := range [][]byte{nil, []byte("battery staple")} {
					if _, err := Private(path, wrong); !errors.Is(err, ErrPassphrase) {
						t.Errorf("passphrase %q: %v", wrong, err)
					}
				}
			}
			if err := os.Chmod(path, 0o640); err != nil {
				t.Fatal(err)
			}
			if _, err := Private(path, secret); err == nil || !strings.Contains(err.Error(), "chmod 600") {
				t.Errorf("a key that others can read: %v", err)
			}
		})
	}
}

func TestFilesThatAreNoKeys(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	private, _, err := authority.NewKey("ada")
	if err != nil {
		t.Fatal(err)
	}
	_, other, err := authority.NewKey("ada")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ text, want string }{
		"empty":         {"", "is no key file"},
		"no public key": {private + "\n", "is no key file"},
		"another's":     {publicMark + other + "\n" + private + "\n", "not the private key of the public key"},
		"cut off":       {publicMark + other + "\n" + private[:30], "no private key"},
		"broken armor":  {publicMark + other + "\n-----BEGIN AGE ENCRYPTED FILE-----\nx\n", "reading key"},
	} {
		path := filepath.Join(dir, "key")
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := Private(path, []byte("x")); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), private[20:30]) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}
