// Package seal encrypts closed pieces of audit logs with age, and reads them. internal/audit itself does without age: the
// watchdog writes a log too and pulls in as little as it can.
package seal

import (
	"fmt"
	"io"
	"os"

	"filippo.io/age"

	"tagout/internal/audit"
)

// With returns what opens a piece that was encrypted for one of the identities.
func With(ids ...age.Identity) audit.Unseal {
	return func(r io.Reader) (io.Reader, error) { return age.Decrypt(r, ids...) }
}

// Identities reads an age identity file (age-keygen(1)).
func Identities(path string) ([]age.Identity, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading identities: %w", err)
	}
	defer f.Close() // only read
	ids, err := age.ParseIdentities(f)
	if err != nil {
		return nil, fmt.Errorf("reading identities from %s: %w", path, err)
	}
	return ids, nil
}

// Recipient reads one age recipient (age1…).
func Recipient(s string) (age.Recipient, error) {
	r, err := age.ParseHybridRecipient(s)
	if err == nil {
		return r, nil
	}
	return age.ParseX25519Recipient(s)
}

// Encrypt copies from to to, encrypted for all recipients.
func Encrypt(to io.Writer, from io.Reader, recipients ...age.Recipient) error {
	w, err := age.Encrypt(to, recipients...)
	if err != nil {
		return fmt.Errorf("encrypting: %w", err)
	}
	if _, err := io.Copy(w, from); err != nil {
		return fmt.Errorf("encrypting: %w", err)
	}
	if err := w.Close(); err != nil {
		return fmt.Errorf("encrypting: %w", err)
	}
	return nil
}
