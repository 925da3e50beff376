package credential

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"filippo.io/age"
)

// openIdentity reads the X25519 identity at path, or makes one where neither it nor a vault exists.
func openIdentity(path, vaultPath string) (*age.X25519Identity, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(vaultPath); !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("opening the vault: %s is there but its identity %s is not: restore the identity, or move the vault away to start empty", vaultPath, path)
		}
		return makeIdentity(path)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the vault's identity: %w", err)
	}
	defer clear(raw)
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("reading the vault's identity: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("reading the vault's identity: %s has mode %04o, so others may have read it: rotate the secrets, then chmod 0600 it", path, info.Mode().Perm())
	}
	for line := range strings.Lines(string(raw)) {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		id, err := age.ParseX25519Identity(line)
		if err != nil {
			// The parser's message may quote the key.
			return nil, fmt.Errorf("reading the vault's identity: %s holds no age X25519 identity: restore it from a backup", path)
		}
		return id, nil
	}
	return nil, fmt.Errorf("reading the vault's identity: %s is empty: restore it from a backup", path)
}

func makeIdentity(path string) (*age.X25519Identity, error) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		return nil, fmt.Errorf("making the vault's identity: %w", err)
	}
	text := []byte("# credd's identity: whoever reads this reads every secret\n# public key: " + id.Recipient().String() + "\n" + id.String() + "\n")
	defer clear(text)
	if err := writeFile(path, text); err != nil {
		return nil, fmt.Errorf("making the vault's identity: %w", err)
	}
	return id, nil
}
