package vaultseal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"filippo.io/age"

	"tagout/internal/atomicfile"
	"tagout/internal/instance"
)

// Dir is where systemd looks for encrypted credentials that a unit names (systemd.exec(5)).
const Dir = "/etc/credstore.encrypted"

// unused ends the name of a credential to which nothing may be sealed yet.
const unused = ".new"

// Credential is a key that systemd keeps, encrypted by the machine's TPM or its host key, in File.
type Credential struct {
	Name string // under which a unit gets it; part of what is encrypted
	File string
}

// Of returns the credential of an instance, where its unit looks for it.
func Of(name string) Credential {
	return Credential{Name: instance.UnlockCredential, File: filepath.Join(Dir, "tagout-"+name)}
}

// Files are those that there may be of the credential.
func (c Credential) Files() []string { return []string{c.File, c.File + unused} }

// Make makes a new key and returns its public half once systemd keeps the private one and has given it back. use is
// called with that half before a credential of the same file is replaced, since until then that one may be needed; use's
// error leaves it as it was. withKey is one of systemd-creds' own words.
func (c Credential) Make(ctx context.Context, withKey string, use func(recipient string) error) error {
	key, err := age.GenerateX25519Identity()
	if err != nil {
		return fmt.Errorf("making the key: %w", err)
	}
	text := []byte(key.String() + "\n")
	defer clear(text)
	fresh := c.File + unused
	err = c.encrypt(ctx, text, fresh, withKey)
	if err == nil {
		err = c.check(ctx, text, fresh)
	}
	if err == nil { // killed from here on, one of the two files is the key
		err = errors.Join(syncFile(fresh), atomicfile.SyncDir(filepath.Dir(fresh)))
	}
	if err == nil {
		err = use(key.Recipient().String())
	}
	if err != nil {
		os.Remove(fresh) // nothing is sealed to it; it may not even be there
		return err
	}
	if err := os.Rename(fresh, c.File); err != nil {
		return fmt.Errorf("putting the credential in its place: what opens the vault is in %s: move it to %s: %w", fresh, c.File, err)
	}
	return atomicfile.SyncDir(filepath.Dir(c.File))
}

// encrypt has systemd write the text to file. The text goes through a pipe.
func (c Credential) encrypt(ctx context.Context, text []byte, file, withKey string) error {
	cmd := exec.CommandContext(ctx, "systemd-creds", "encrypt", "--name="+c.Name, "--with-key="+withKey, "-", file)
	cmd.Stdin = bytes.NewReader(text)
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return errors.New("systemd-creds is not there: it comes with systemd 250 or newer; a passphrase needs none")
	case err != nil:
		return fmt.Errorf("having systemd encrypt the key: %s: %w", strings.TrimSpace(string(out)), err)
	}
	return os.Chmod(file, 0o600)
}

// check sees that systemd gives back what it was given.
func (c Credential) check(ctx context.Context, want []byte, file string) error {
	cmd := exec.CommandContext(ctx, "systemd-creds", "decrypt", "--name="+c.Name, file, "-")
	got, err := cmd.Output()
	defer clear(got)
	if err == nil && !bytes.Equal(bytes.TrimSpace(got), bytes.TrimSpace(want)) {
		err = errors.New("it is not what was encrypted")
	}
	if err != nil {
		return fmt.Errorf("having systemd decrypt the key again: %w", err)
	}
	return nil
}

// syncFile returns when the file's content is on disk.
func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
