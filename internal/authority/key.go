package authority

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"unicode"

	"golang.org/x/mod/sumdb/note"
)

// privatePrefix begins every private key.
const privatePrefix = "PRIVATE+KEY+"

// KeyName is the name that a person's key carries: the person's own, with what a key's name cannot hold replaced.
func KeyName(person string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) || r == '+' {
			return '_'
		}
		return r
	}, person)
}

// NewKey makes a key pair for a person. private is a secret; public goes into the box's configuration.
func NewKey(person string) (private, public string, err error) {
	if !plain(person) {
		return "", "", fmt.Errorf("making a key: %q cannot name a person", clip(person))
	}
	return note.GenerateKey(rand.Reader, KeyName(person))
}

// CheckKey says whether key is a public key made for the person.
func CheckKey(key, person string) error {
	v, err := note.NewVerifier(key)
	switch {
	case err != nil && strings.HasPrefix(key, privatePrefix):
		return errors.New("this is the private key: it belongs into nobody's configuration")
	case err != nil:
		return errors.New("this is no key as `tagout key new` prints it")
	case v.Name() != KeyName(person):
		return fmt.Errorf("this key was made for %s", clip(v.Name()))
	}
	return nil
}

// KeyID is how a public key is named in records: NAME+HASH. "" where it is none.
func KeyID(key string) string {
	v, err := note.NewVerifier(key)
	if err != nil {
		return ""
	}
	return SignatureID(note.Signature{Name: v.Name(), Hash: v.KeyHash()})
}

// SignatureID is KeyID of the key that a signature says it was made with.
func SignatureID(s note.Signature) string { return fmt.Sprintf("%s+%08x", s.Name, s.Hash) }

// SameKey says whether two public keys are the same key, whatever names they carry.
func SameKey(a, b string) bool {
	ka, kb := material(a), material(b)
	return ka != nil && bytes.Equal(ka, kb)
}

// material is the last part of a key, its algorithm and its bytes. Base64 has a + of its own.
func material(key string) []byte {
	_, rest, _ := strings.Cut(strings.TrimPrefix(key, privatePrefix), "+")
	_, data, _ := strings.Cut(rest, "+")
	raw, err := base64.StdEncoding.DecodeString(data)
	if err != nil || len(raw) == 0 {
		return nil
	}
	return raw
}

// Sign signs an order with a private key. The key is not kept.
func Sign(o Order, private string) ([]byte, error) {
	signer, err := note.NewSigner(private)
	if err != nil {
		return nil, errors.New("signing: this is no private key as `tagout key new` writes it")
	}
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("signing: %w", err)
	}
	text, err := o.text()
	if err != nil {
		return nil, fmt.Errorf("signing: %w", err)
	}
	raw, err := note.Sign(&note.Note{Text: string(text)}, signer)
	if err != nil {
		return nil, fmt.Errorf("signing: %w", err)
	}
	return raw, nil
}

// Public returns the public key that belongs to a private one.
func Public(private string) (string, error) {
	signer, err := note.NewSigner(private)
	if err != nil {
		return "", errors.New("this is no private key as `tagout key new` writes it")
	}
	key := ed25519.NewKeyFromSeed(material(private)[1:]) // NewSigner has checked the length
	return note.NewEd25519VerifierKey(signer.Name(), key.Public().(ed25519.PublicKey))
}
