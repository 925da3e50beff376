// Package vaultseal is about how the vault's identity lies on disk: it tells the ways from each other by what is in the
// file, and has systemd keep the key that a sealed one is sealed to. It never sees an identity in clear.
package vaultseal

import (
	"bytes"
	"errors"
)

// The ways.
const (
	Plain      = "plain"      // whoever reads the file reads every secret
	Passphrase = "passphrase" // age's scrypt
	Key        = "key"        // to another X25519 identity, which systemd, a TPM or a person keeps
)

// Intro begins every age file.
const Intro = "age-encryption.org/v1\n"

// How tells a plain identity from sealed ones by the file's first lines; what is neither is an error.
func How(raw []byte) (string, error) {
	rest, sealed := bytes.CutPrefix(raw, []byte(Intro))
	switch {
	case !sealed && len(bytes.TrimSpace(raw)) == 0:
		return "", errors.New("is empty")
	case !sealed:
		return Plain, nil
	case bytes.HasPrefix(rest, []byte("-> scrypt ")):
		return Passphrase, nil
	case bytes.HasPrefix(rest, []byte("-> X25519 ")):
		return Key, nil
	}
	return "", errors.New("is sealed in a way that this build does not know")
}
