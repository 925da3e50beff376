package inspectca

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"filippo.io/age"

	"tagout/internal/atomicfile"
)

// Credential is the name under which systemd may hand the identity over.
const Credential = "tagout-ca-identity"

// maxKey bounds what is decrypted; a P-256 key takes some 140 bytes.
const maxKey = 16 << 10

// Write stores the CA in dir: the key first, since a certificate without its key would be offered to kids in
// vain. Key and identity belong to uid and gid with mode 0400, the certificate to root with mode 0644. Each file
// is written whole or not at all.
func (ca *CA) Write(dir, credentials string, uid, gid int) error {
	certFile, keyFile, idFile := Files(dir)
	id, err := credentialIdentity(credentials)
	if err != nil {
		return err
	}
	if id == nil {
		if id, err = age.GenerateX25519Identity(); err != nil {
			return fmt.Errorf("making an identity: %w", err)
		}
		text := []byte("# whoever reads this and ca.key.age can speak for every inspected host\n" + id.String() + "\n")
		defer clear(text)
		if err := atomicfile.Write(idFile, text, 0o400, uid, gid); err != nil {
			return fmt.Errorf("writing the identity: %w", err)
		}
	} else if err := os.Remove(idFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing an identity that the credential replaces: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(ca.Key)
	if err != nil {
		return fmt.Errorf("encoding the key: %w", err)
	}
	defer clear(der)
	sealed, err := seal(der, id.Recipient())
	if err != nil {
		return fmt.Errorf("encrypting the key: %w", err)
	}
	if err := atomicfile.Write(keyFile, sealed, 0o400, uid, gid); err != nil {
		return fmt.Errorf("writing the key: %w", err)
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Cert.Raw})
	if err := atomicfile.Write(certFile, certPEM, 0o644, -1, -1); err != nil {
		return fmt.Errorf("writing the certificate: %w", err)
	}
	return nil
}

func seal(plain []byte, to age.Recipient) ([]byte, error) {
	var out bytes.Buffer
	w, err := age.Encrypt(&out, to)
	if err != nil {
		return nil, err
	}
	_, err = w.Write(plain)
	err = errors.Join(err, w.Close())
	return out.Bytes(), err
}

// readKey decrypts the key with the credential's identity or else with that in the file.
func readKey(dir, credentials string) ([]byte, error) {
	_, keyFile, idFile := Files(dir)
	sealed, err := os.ReadFile(keyFile)
	if err != nil {
		return nil, fmt.Errorf("run `tagout setup`: %w", err)
	}
	var ids []age.Identity
	id, err := credentialIdentity(credentials)
	if err != nil {
		return nil, err
	}
	if id != nil {
		ids = append(ids, id)
	}
	id, err = fileIdentity(idFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if id != nil {
		ids = append(ids, id)
	}
	if len(ids) == 0 {
		return nil, fmt.Errorf("neither the credential %s nor %s is there: give the service the credential, or run `tagout setup`", Credential, idFile)
	}
	r, err := age.Decrypt(bytes.NewReader(sealed), ids...)
	if err != nil {
		return nil, fmt.Errorf("decrypting %s: run `tagout setup` with the same credential as the proxy: %w", keyFile, err)
	}
	plain, err := io.ReadAll(io.LimitReader(r, maxKey))
	if err != nil {
		return nil, fmt.Errorf("decrypting %s: run `tagout setup`: %w", keyFile, err)
	}
	return plain, nil
}

// credentialIdentity reads the identity that systemd hands over, nil where it hands over none.
func credentialIdentity(credentials string) (*age.X25519Identity, error) {
	if credentials == "" {
		return nil, nil
	}
	raw, err := os.ReadFile(filepath.Join(credentials, Credential))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the credential %s: %w", Credential, err)
	}
	return parseIdentity(raw, "the credential "+Credential)
}

func fileIdentity(file string) (*age.X25519Identity, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading the identity: %w", err)
	}
	info, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("reading the identity: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		clear(raw)
		return nil, fmt.Errorf("reading the identity: %s has mode %04o, so others may have read it: remove it and run `tagout setup` for a new CA", file, info.Mode().Perm())
	}
	return parseIdentity(raw, file)
}

// parseIdentity reads the first identity in raw and clears raw. Its errors never quote the text.
func parseIdentity(raw []byte, where string) (*age.X25519Identity, error) {
	defer clear(raw)
	for line := range strings.Lines(string(raw)) {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		id, err := age.ParseX25519Identity(line)
		if err != nil {
			return nil, fmt.Errorf("%s holds no age X25519 identity", where)
		}
		return id, nil
	}
	return nil, fmt.Errorf("%s is empty", where)
}
