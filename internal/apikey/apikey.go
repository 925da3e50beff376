// Package apikey keeps the API keys of a box: who has one, what for, and a hash of it. A key itself is shown once, when
// it is made, and kept nowhere.
package apikey

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/atomicfile"
)

// Role is what a caller of the API may do.
type Role string

// Roles. Who comes over the unix socket is root and holds all of them.
const (
	RoleRead    Role = "read"    // see kids, their events and grants
	RoleSpawn   Role = "spawn"   // make kids
	RoleExec    Role = "exec"    // run commands in kids
	RoleFiles   Role = "files"   // read and write kids' files
	RoleDestroy Role = "destroy" // remove kids
	RoleGrant   Role = "grant"   // open hosts for a living kid, in the name of a person of the box's authority list
	RoleImages  Role = "images"  // add and remove images
)

// Roles at the box's issuer. They are of no use at the API.
const (
	RoleIntrospect Role = "introspect" // ask whether tokens are active
	RoleRevoke     Role = "revoke"     // revoke tokens
)

// IssuerRoles lists the roles at the issuer.
func IssuerRoles() []Role { return []Role{RoleIntrospect, RoleRevoke} }

// Roles lists all roles at the API.
func Roles() []Role {
	return []Role{RoleRead, RoleSpawn, RoleExec, RoleFiles, RoleDestroy, RoleGrant, RoleImages}
}

// Prefix begins every key, so that it is told from other secrets.
const Prefix = "tgk_"

const (
	maxKeys = 256
	version = 1
)

// Key is what is kept of a key.
type Key struct {
	Name  string    `json:"name"`
	Roles []Role    `json:"roles"`
	Hash  string    `json:"hash"` // SHA-256 of the key, hex: it has 256 random bits, so nothing slower is needed
	Made  time.Time `json:"made"`
	Ends  time.Time `json:"ends,omitzero"` // wall clock; zero: no end
}

type file struct {
	Version int   `json:"version"`
	Keys    []Key `json:"keys"`
}

// ErrTaken says that a key of that name exists.
var ErrTaken = errors.New("a key of this name exists: remove it first, or choose another name")

var nameRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)

// Load reads the keys in file; one that does not exist holds none.
func Load(path string) ([]Key, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var f file
	if err == nil {
		err = json.Unmarshal(raw, &f)
	}
	if err == nil && f.Version != version {
		err = fmt.Errorf("version %d, this build reads %d", f.Version, version)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the API keys in %s: %w", path, err)
	}
	return f.Keys, nil
}

// Add makes a key and returns it. ends may be zero.
func Add(path, name string, roles []Role, ends time.Time) (secret string, err error) {
	switch {
	case !nameRE.MatchString(name):
		return "", fmt.Errorf("key name %q: use 1 to 63 letters, digits, dots, dashes and underscores", name)
	case len(roles) == 0:
		return "", errors.New("a key without roles is of no use: give some")
	}
	for _, r := range roles {
		if !slices.Contains(Roles(), r) && !slices.Contains(IssuerRoles(), r) {
			return "", fmt.Errorf("there is no role %q", r)
		}
	}
	var raw [32]byte
	rand.Read(raw[:]) // never fails
	secret = Prefix + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(raw[:]))
	return secret, change(path, func(keys []Key) ([]Key, error) {
		switch {
		case slices.ContainsFunc(keys, func(k Key) bool { return k.Name == name }):
			return nil, ErrTaken
		case len(keys) >= maxKeys:
			return nil, fmt.Errorf("there are %d keys already: remove some", len(keys))
		}
		return append(keys, Key{Name: name, Roles: roles, Hash: hash(secret), Made: time.Now().UTC().Truncate(time.Second), Ends: ends.UTC()}), nil
	})
}

// Remove forgets the key of that name and says whether there was one. It counts from the next request on.
func Remove(path, name string) (found bool, err error) {
	return found, change(path, func(keys []Key) ([]Key, error) {
		return slices.DeleteFunc(keys, func(k Key) bool {
			found = found || k.Name == name
			return k.Name == name
		}), nil
	})
}

// change writes the keys that fn makes of those that there are. Changes do not overlap.
func change(path string, fn func([]Key) ([]Key, error)) error {
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("changing the API keys: %w", err)
	}
	defer lock.Close() // lets go of the lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("changing the API keys: %w", err)
	}
	keys, err := Load(path)
	if err == nil {
		keys, err = fn(keys)
	}
	if err != nil {
		return err
	}
	raw, err := json.MarshalIndent(file{Version: version, Keys: keys}, "", "  ")
	if err == nil {
		err = errors.Join(atomicfile.Sweep(path), atomicfile.Write(path, append(raw, '\n'), 0o600, -1, -1))
	}
	if err != nil {
		return fmt.Errorf("changing the API keys: %w", err)
	}
	return nil
}

func hash(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}

// Book answers which key a secret is. It follows the file. Safe for concurrent use.
type Book struct {
	path string

	mu   sync.Mutex
	seen unix.Stat_t // of the file that keys are from; guarded by mu
	keys []Key       // guarded by mu
}

// NewBook returns a book of the keys in file.
func NewBook(path string) *Book { return &Book{path: path} }

// Find returns the key that secret is; ok is false where it is none, or its time is over. An error means that the keys
// cannot be read: then nobody has one.
func (b *Book) Find(secret string, now time.Time) (key Key, ok bool, err error) {
	keys, err := b.current()
	if err != nil {
		return Key{}, false, err
	}
	want := []byte(hash(secret))
	for _, k := range keys { // all of them, so that time says nothing
		if subtle.ConstantTimeCompare([]byte(k.Hash), want) == 1 {
			key, ok = k, k.Ends.IsZero() || now.Before(k.Ends)
		}
	}
	return key, ok, nil
}

// current returns the keys that the file holds now. It is replaced whole, never written into.
func (b *Book) current() ([]Key, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var st unix.Stat_t
	if err := unix.Stat(b.path, &st); errors.Is(err, unix.ENOENT) {
		b.seen, b.keys = unix.Stat_t{}, nil
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("reading the API keys: %w", err)
	}
	if st.Ino == b.seen.Ino && st.Mtim == b.seen.Mtim && st.Size == b.seen.Size && st.Dev == b.seen.Dev {
		return b.keys, nil
	}
	keys, err := Load(b.path)
	if err != nil {
		return nil, err
	}
	b.seen, b.keys = st, keys
	return keys, nil
}
