// Package keyfile keeps a person's private key in a file of that person's own: in clear, or encrypted with a
// passphrase (age, scrypt). killswitchd never sees such a file, and knows nothing of this package.
package keyfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"filippo.io/age"
	"filippo.io/age/armor"

	"tagout/internal/authority"
)

// maxFile bounds what is read.
const maxFile = 64 << 10

// scryptWork is the logarithm of what a guess at a passphrase costs: about a second, and 256 MB. Tests lower it.
var scryptWork = 18

// publicMark begins the line that holds the public key.
const publicMark = "# public key: "

// ErrPassphrase is returned for a file that needs a passphrase, or another one.
var ErrPassphrase = errors.New("the key is encrypted")

// New makes a key for a person and writes it to path, which must not exist yet, with mode 0600. A passphrase
// encrypts it; nil leaves it in clear. It returns the public key.
func New(path, person string, passphrase []byte) (public string, err error) {
	private, public, err := authority.NewKey(person)
	if err != nil {
		return "", err
	}
	body := []byte(private + "\n")
	defer func() { clear(body) }()
	if passphrase != nil {
		if body, err = seal(body, passphrase); err != nil {
			return "", fmt.Errorf("encrypting the key: %w", err)
		}
	}
	text := fmt.Appendf(nil, "# whoever can read the private key below gives orders as %s\n%s%s\n%s", authority.KeyName(person), publicMark, public, body)
	defer clear(text)
	w, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", fmt.Errorf("writing the key: %w", err)
	}
	_, err = w.Write(text)
	if err = errors.Join(err, w.Sync(), w.Close()); err != nil {
		os.Remove(path) // half a key is none
		return "", fmt.Errorf("writing the key: %w", err)
	}
	return public, nil
}

func seal(plain, passphrase []byte) ([]byte, error) {
	to, err := age.NewScryptRecipient(string(passphrase))
	if err != nil {
		return nil, err
	}
	to.SetWorkFactor(scryptWork)
	var out bytes.Buffer
	a := armor.NewWriter(&out)
	w, err := age.Encrypt(a, to)
	if err != nil {
		return nil, err
	}
	_, err = w.Write(plain)
	err = errors.Join(err, w.Close(), a.Close())
	return out.Bytes(), err
}

// Public returns the public key that the file says it belongs to. Where the file is encrypted nothing proves it.
func Public(path string) (string, error) {
	public, _, err := read(path)
	return public, err
}

// Private returns the private key. passphrase is nil where the caller has none; an error that wraps ErrPassphrase
// says that another is needed.
func Private(path string, passphrase []byte) (string, error) {
	public, body, err := read(path)
	if err != nil {
		return "", err
	}
	if bytes.HasPrefix(body, []byte(armor.Header)) {
		if body, err = open(body, passphrase); err != nil {
			return "", fmt.Errorf("reading key %s: %w", path, err)
		}
	}
	private := strings.TrimSpace(string(body))
	got, err := authority.Public(private)
	if err != nil {
		return "", fmt.Errorf("reading key %s: %w", path, err)
	}
	if got != public {
		return "", fmt.Errorf("reading key %s: it is not the private key of the public key that the file names", path)
	}
	return private, nil
}

func open(sealed, passphrase []byte) ([]byte, error) {
	if passphrase == nil {
		return nil, fmt.Errorf("%w: give --passphrase-file FILE", ErrPassphrase)
	}
	id, err := age.NewScryptIdentity(string(passphrase))
	if err != nil {
		return nil, err
	}
	r, err := age.Decrypt(armor.NewReader(bytes.NewReader(sealed)), id)
	var wrong *age.NoIdentityMatchError
	if errors.As(err, &wrong) {
		return nil, fmt.Errorf("%w with another passphrase", ErrPassphrase)
	}
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(r, maxFile))
}

// read returns the public key and what follows the comments. A file that others can read is refused: what it
// holds is no secret any more.
func read(path string) (public string, body []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", nil, fmt.Errorf("reading the key: %w", err)
	}
	defer f.Close() // only read
	info, err := f.Stat()
	if err != nil {
		return "", nil, fmt.Errorf("reading the key: %w", err)
	}
	if info.Mode().IsRegular() && info.Mode().Perm()&0o077 != 0 {
		return "", nil, fmt.Errorf("reading the key: %s has mode %v, so others may have read it: make a new key, or `chmod 600 %s` if nobody has", path, info.Mode().Perm(), path)
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return "", nil, fmt.Errorf("reading the key: %w", err)
	}
	for bytes.HasPrefix(raw, []byte("#")) {
		line, rest, _ := bytes.Cut(raw, []byte("\n"))
		if bytes.HasPrefix(line, []byte(publicMark)) {
			public = string(line[len(publicMark):])
		}
		raw = rest
	}
	if authority.KeyID(public) == "" {
		return "", nil, fmt.Errorf("reading the key: %s is no key file as `tagout key new` writes it", path)
	}
	return public, raw, nil
}
