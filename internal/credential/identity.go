package credential

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"filippo.io/age"

	"tagout/internal/vaultseal"
)

// A passphrase costs whoever tries one about a second, and 256 MiB. A file that asks for more than four times that is not
// ours. Tests of other things make it cheaper.
var workFactor = 18

const maxWorkFactor = 20

// minPassphrase is what a passphrase has at least, in bytes.
const minPassphrase = 12

// identityFile is the vault's identity as it lies on disk.
type identityFile struct {
	path string
	how  string
	raw  []byte // of one that is sealed; of a plain one only until it is opened
}

// readIdentity reads the file at path, or makes a plain identity where neither it nor a vault exists.
func readIdentity(path, vaultPath string) (*identityFile, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(vaultPath); !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("opening the vault: %s is there but its identity %s is not: restore the identity, or move the vault away to start empty", vaultPath, path)
		}
		if _, err := makeIdentity(path); err != nil {
			return nil, err
		}
		raw, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the vault's identity: %w", err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("reading the vault's identity: %w", err)
	}
	f := &identityFile{path: path, raw: raw}
	if f.how, err = vaultseal.How(raw); err != nil {
		return nil, fmt.Errorf("reading the vault's identity: %s %w: restore it from a backup", path, err)
	}
	if f.how == vaultseal.Plain && info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("reading the vault's identity: %s has mode %04o, so others may have read it: rotate the secrets, then chmod 0600 it", path, info.Mode().Perm())
	}
	return f, nil
}

// open returns the identity. key is what opens a sealed one, as package documentation of Config.Unlock says; it is not
// needed for a plain one. Errors quote nothing of either.
func (f *identityFile) open(key []byte) (*age.X25519Identity, error) {
	plain := f.raw
	if f.how != vaultseal.Plain {
		var err error
		if plain, err = f.unseal(key); err != nil {
			return nil, err
		}
	}
	defer clear(plain)
	id := parseIdentity(plain)
	if id == nil {
		return nil, fmt.Errorf("reading the vault's identity: %s holds no age X25519 identity: restore it from a backup", f.path)
	}
	return id, nil
}

// opensWith says whether key opens the file as it lies there; any key opens a plain one.
func (f *identityFile) opensWith(key []byte) error {
	if f.how == vaultseal.Plain {
		return nil
	}
	raw, err := os.ReadFile(f.path)
	if err != nil {
		return fmt.Errorf("reading the vault's identity: %w", err)
	}
	plain, err := (&identityFile{path: f.path, how: f.how, raw: raw}).unseal(key)
	clear(plain)
	return err
}

// errWrongKey says that a sealed identity is not opened by what was given.
var errWrongKey = errors.New("this does not open the vault's identity")

func (f *identityFile) unseal(key []byte) ([]byte, error) {
	opener, err := f.opener(key)
	if err != nil {
		return nil, err
	}
	r, err := age.Decrypt(bytes.NewReader(f.raw), opener)
	var none *age.NoIdentityMatchError
	if errors.As(err, &none) {
		return nil, errWrongKey
	}
	if err != nil {
		return nil, fmt.Errorf("opening the vault's identity: %s is damaged: restore it from a backup: %w", f.path, err)
	}
	plain, err := io.ReadAll(io.LimitReader(r, 4<<10))
	if err != nil {
		return nil, fmt.Errorf("opening the vault's identity: %s is damaged: restore it from a backup: %w", f.path, err)
	}
	return plain, nil
}

func (f *identityFile) opener(key []byte) (age.Identity, error) {
	if f.how == vaultseal.Key {
		if id := parseIdentity(key); id != nil {
			return id, nil
		}
		return nil, fmt.Errorf("%w: it is sealed to a key, and this is a passphrase", errWrongKey)
	}
	id, err := age.NewScryptIdentity(string(key))
	if err != nil {
		return nil, fmt.Errorf("%w: it is empty", errWrongKey)
	}
	id.SetMaxWorkFactor(maxWorkFactor)
	return id, nil
}

// parseIdentity returns the first age X25519 identity in text; nil where there is none. The parser's own message
// may quote the key.
func parseIdentity(text []byte) *age.X25519Identity {
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		id, err := age.ParseX25519Identity(line)
		if err != nil {
			return nil
		}
		return id
	}
	return nil
}

func makeIdentity(path string) (*age.X25519Identity, error) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		return nil, fmt.Errorf("making the vault's identity: %w", err)
	}
	if err := writeIdentity(path, id, nil); err != nil {
		return nil, fmt.Errorf("making the vault's identity: %w", err)
	}
	return id, nil
}

// writeIdentity writes the identity whole or not at all, sealed to a recipient; nil: plain.
func writeIdentity(path string, id *age.X25519Identity, to age.Recipient) error {
	text := []byte("# credd's identity: whoever reads this reads every secret\n# public key: " + id.Recipient().String() + "\n" + id.String() + "\n")
	defer clear(text)
	if to == nil {
		return writeFile(path, text)
	}
	return encryptFile(path, text, to)
}

// encryptFile writes plain to path, readable by who holds the recipient's identity.
func encryptFile(path string, plain []byte, to age.Recipient) error {
	var sealed bytes.Buffer
	w, err := age.Encrypt(&sealed, to)
	if err == nil {
		_, err = w.Write(plain)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return err
	}
	return writeFile(path, sealed.Bytes())
}

// decryptFile reads what encryptFile wrote; the caller wipes it. The error is fs.ErrNotExist where there is no file.
func decryptFile(path string, id age.Identity) ([]byte, error) {
	sealed, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r, err := age.Decrypt(bytes.NewReader(sealed), id)
	if err != nil {
		return nil, fmt.Errorf("it is damaged or belongs to another identity: restore both from one backup: %w", err)
	}
	plain, err := io.ReadAll(r)
	if err != nil {
		clear(plain)
		return nil, fmt.Errorf("it is damaged: restore it from a backup: %w", err)
	}
	return plain, nil
}
