package credential

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"filippo.io/age"

	"tagout/internal/policy"
	"tagout/internal/vaultseal"
	"tagout/internal/wire"
)

// Bounds of a secret's value. Shorter ones cannot be told from ordinary words when records are redacted;
// longer ones do not fit into an HTTP header that servers accept.
const (
	minValue = 8
	maxValue = 8 << 10
	maxHosts = 64
)

// vaultVersion is what is written. Version 1 knew hosts alone; it is read, and a build that only knows it does not read
// what is narrower.
const vaultVersion = 2

var secretNameRE = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_.-]{0,63}$`)

// errUnknownSecret is returned for a name that the vault does not hold.
var errUnknownSecret = errors.New("no such secret")

// vault holds the secrets, in memory and in one encrypted file. Every change is on disk before it is in
// memory, so that a change that was acknowledged survives a crash.
type vault struct {
	path      string
	addSecret func(string)           // tells the audit log what to redact
	lock      *os.File               // held while the process lives
	denied    func(name string) bool // whether a secret can never be granted; nil: none; set before the first change

	changing sync.Mutex // held by whoever changes something, with the disk or without; taken before mu
	write    func(path string, plain []byte, to age.Recipient) error

	mu      sync.RWMutex
	disk    *identityFile       // guarded by mu
	id      *age.X25519Identity // guarded by mu; nil while it is sealed
	whyShut string              // guarded by mu; while it is sealed: what is wrong with what was to open it
	secrets map[string]*secret  // guarded by mu; the values are owned by the vault
}

// secret is one entry as the encrypted file carries it.
type secret struct {
	Value []byte `json:"value"`
	binding
	Canary  bool      `json:"canary,omitempty"`
	Lease   string    `json:"lease,omitempty"` // PROVIDER/ROLE; Value is empty then
	Version uint64    `json:"version"`         // from 1
	Updated time.Time `json:"updated"`
	Rotated time.Time `json:"rotated,omitzero"`
}

type vaultFile struct {
	Version int                `json:"version"`
	Secrets map[string]*secret `json:"secrets"`
}

// openVault reads the vault in dir. key opens an identity that is sealed; where it does not, or is nil, the vault stays
// shut until unlock.
func openVault(dir string, key []byte, addSecret func(string)) (*vault, error) {
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	v := &vault{path: filepath.Join(dir, "vault.age"), addSecret: addSecret, write: encryptFile, lock: lock, secrets: map[string]*secret{}}
	err = removeLeftovers(dir)
	if err == nil {
		v.disk, err = readIdentity(filepath.Join(dir, "identity.age"), v.path)
	}
	if err == nil && (v.disk.how == vaultseal.Plain || key != nil) {
		if err = v.unlock(key); errors.Is(err, errWrongKey) {
			err = nil // shut, and it says why
		}
	}
	if err != nil {
		lock.Close() // already failing
		return nil, err
	}
	return v, nil
}

// load reads the secrets.
func (v *vault) load(id *age.X25519Identity) (map[string]*secret, error) {
	plain, err := decryptFile(v.path, id)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]*secret{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("decrypting the vault %s: %w", v.path, err)
	}
	defer clear(plain)
	var f vaultFile
	// The decoder's message is left out: it may quote a value.
	if json.Unmarshal(plain, &f) != nil || f.Version < 1 || f.Version > vaultVersion {
		return nil, fmt.Errorf("reading the vault %s: it is not of version 1 to %d: restore it from a backup, or use the build that wrote it", v.path, vaultVersion)
	}
	secrets := map[string]*secret{}
	for name, s := range f.Secrets {
		if s == nil {
			return nil, fmt.Errorf("reading the vault %s: secret %s is empty: restore the vault from a backup", v.path, name)
		}
		s.Version = max(s.Version, 1)
		v.addSecret(string(s.Value))
		secrets[name] = s
	}
	return secrets, nil
}

// content returns what the vault's file is to hold with the given secrets, and for whom. Nothing of it is wiped meanwhile.
func (v *vault) content(secrets map[string]*secret) (plain []byte, to age.Recipient, err error) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if v.id == nil {
		return nil, nil, errShut
	}
	if plain, err = json.Marshal(vaultFile{Version: vaultVersion, Secrets: secrets}); err != nil {
		return nil, nil, fmt.Errorf("writing the vault: %w", err)
	}
	return plain, v.id.Recipient(), nil
}

// put sets a secret and returns what it is now; tokens that exist resolve to the new value from the next use on. Errors
// of the caller's making are *badEntry.
func (v *vault) put(name string, e wire.VaultEntry) (wire.VaultInfo, error) {
	b, err := checkEntry(name, e)
	if err != nil {
		return wire.VaultInfo{}, err
	}
	// Redaction first: whatever happens next may be logged.
	v.addSecret(e.Value)
	v.changing.Lock()
	defer v.changing.Unlock()
	s := &secret{Value: []byte(e.Value), binding: b, Canary: e.Canary, Lease: e.Lease, Version: 1, Updated: time.Now().UTC()}
	if err := v.follow(name, s); err != nil {
		return wire.VaultInfo{}, err
	}
	return s.info(name), v.set(name, s)
}

// follow makes s the successor of the secret that has the name, if any. Callers hold changing.
func (v *vault) follow(name string, s *secret) error {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if err := v.twin(name, string(s.Value)); err != nil && s.Lease == "" { // what is leased has no value of its own
		return err
	}
	if old := v.secrets[name]; old != nil {
		s.Version, s.Rotated = old.Version+1, old.Rotated
	}
	return nil
}

// rotate replaces a secret's value and keeps all else.
func (v *vault) rotate(name, value string) (wire.VaultInfo, error) {
	if err := checkValue(value); err != nil {
		return wire.VaultInfo{}, err
	}
	v.addSecret(value)
	v.changing.Lock()
	defer v.changing.Unlock()
	s, err := v.rotated(name, value)
	if err != nil {
		return wire.VaultInfo{}, err
	}
	return s.info(name), v.set(name, s)
}

// rotated returns the secret with another value. Callers hold changing.
func (v *vault) rotated(name, value string) (*secret, error) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if v.id == nil {
		return nil, errShut
	}
	old := v.secrets[name]
	if old == nil {
		return nil, errUnknownSecret
	}
	if old.Lease != "" {
		return nil, &badEntry{"this secret is leased from " + old.Lease + " for each session, and has no value to rotate"}
	}
	if string(old.Value) == value {
		return nil, &badEntry{"this is the value that the secret has already: nothing was rotated"}
	}
	if err := v.twin(name, value); err != nil {
		return nil, err
	}
	s := *old
	s.Value, s.Version, s.Updated = []byte(value), old.Version+1, time.Now().UTC()
	s.Rotated = s.Updated
	return &s, nil
}

// set saves the vault with s under name. Callers hold changing.
func (v *vault) set(name string, s *secret) error {
	next := v.copied()
	next[name] = s
	return v.replace(next, name)
}

// copied returns a map of the secrets that there are.
func (v *vault) copied() map[string]*secret {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return maps.Clone(v.secrets)
}

func (v *vault) delete(name string) error {
	v.changing.Lock()
	defer v.changing.Unlock()
	if !v.open() {
		return errShut
	}
	next := v.copied()
	if next[name] == nil {
		return errUnknownSecret
	}
	delete(next, name)
	return v.replace(next, name)
}

// replace saves next, makes it the vault's content and wipes the value that name had before. Callers hold changing, and
// not mu: no use of a secret, and so no revocation, waits for the disk.
func (v *vault) replace(next map[string]*secret, name string) error {
	plain, to, err := v.content(next)
	if err != nil {
		return err
	}
	defer clear(plain)
	if err := v.write(v.path, plain, to); err != nil {
		return fmt.Errorf("writing the vault: nothing was changed: %w", err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.id == nil { // closed meanwhile
		if s := next[name]; s != nil {
			clear(s.Value)
		}
		return errShut
	}
	old := v.secrets[name]
	v.secrets = next
	if old != nil {
		clear(old.Value)
	}
	return nil
}

// has says whether the vault holds the secret.
func (v *vault) has(name string) bool {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.secrets[name] != nil
}

// canary says whether the secret is one that nobody has a reason to use.
func (v *vault) canary(name string) bool {
	v.mu.RLock()
	defer v.mu.RUnlock()
	s := v.secrets[name]
	return s != nil && s.Canary
}

// errNotFor is why a secret is not shown in a request: scope says what of it was wrong, detail says so in words.
type errNotFor struct{ scope, detail string }

func (e *errNotFor) Error() string { return e.detail }

// bindingOf returns what a secret is bound to, which nobody changes; nil where there is no such secret.
func (v *vault) bindingOf(name string) *binding {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if s := v.secrets[name]; s != nil {
		return &s.binding
	}
	return nil
}

// value returns the secret's value for a request to hostport, which is canonical. The error is errUnknownSecret, or an
// *errNotFor where the secret is bound to something else.
func (v *vault) value(name, hostport string, req *wire.ResolveRequest) (wire.ResolveReply, error) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	s := v.secrets[name]
	if s == nil {
		return wire.ResolveReply{}, errUnknownSecret
	}
	if scope, detail := s.refuses(hostport, req); scope != "" {
		return wire.ResolveReply{}, &errNotFor{scope, "secret " + name + " " + detail}
	}
	return wire.ResolveReply{Secret: name, Value: string(s.Value), Present: s.Present}, nil
}

func (v *vault) list() []wire.VaultInfo {
	v.mu.RLock()
	defer v.mu.RUnlock()
	out := make([]wire.VaultInfo, 0, len(v.secrets))
	for name, s := range v.secrets {
		out = append(out, s.info(name))
	}
	slices.SortFunc(out, func(a, b wire.VaultInfo) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// info describes the secret without its value.
func (s *secret) info(name string) wire.VaultInfo {
	return wire.VaultInfo{Name: name, Hosts: slices.Clone(s.Hosts), Canary: s.Canary, Lease: s.Lease, Present: s.Present, Methods: slices.Clone(s.Methods),
		Paths: slices.Clone(s.Paths), Version: s.Version, Updated: s.Updated, Rotated: s.Rotated}
}

func (v *vault) len() int {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return len(v.secrets)
}

// close wipes every value and gives the directory free.
func (v *vault) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, s := range v.secrets {
		clear(s.Value)
	}
	v.secrets, v.id = map[string]*secret{}, nil
	v.lock.Close() // nothing was written through it
}

// badEntry is a vault entry that cannot be taken; its text never holds the value.
type badEntry struct{ text string }

func (e *badEntry) Error() string { return e.text }

func checkEntry(name string, e wire.VaultEntry) (binding, error) {
	if !secretNameRE.MatchString(name) {
		return binding{}, &badEntry{"a secret's name is 1 to 64 letters, digits, dots, dashes and underscores, starting with a letter"}
	}
	if e.Lease != "" {
		return checkLeased(e)
	}
	if err := checkValue(e.Value); err != nil {
		return binding{}, err
	}
	return checkBinding(e)
}

func checkValue(value string) error {
	switch {
	case len(value) < minValue || len(value) > maxValue:
		return &badEntry{fmt.Sprintf("a secret's value has %d to %d bytes, this one has %d", minValue, maxValue, len(value))}
	case strings.ContainsFunc(value, func(r rune) bool { return r < 0x20 || r == 0x7f }):
		return &badEntry{"a secret's value is put into HTTP headers and cannot hold control characters: is there a line end at its end?"}
	case strings.TrimSpace(value) != value:
		return &badEntry{"a secret's value cannot begin or end with a space"}
	}
	return nil
}

// hostPort returns "host:port" with the host in its canonical form.
func hostPort(s string) (string, error) {
	host, port, ok := strings.Cut(s, ":")
	n, err := strconv.ParseUint(port, 10, 16)
	if !ok || err != nil || n == 0 {
		return "", fmt.Errorf("host %q: write it as host:port with a port from 1 to 65535", s)
	}
	return joinHostPort(host, uint16(n))
}

func joinHostPort(host string, port uint16) (string, error) {
	name, err := policy.Name(host)
	if err != nil {
		return "", fmt.Errorf("host %q: %w", host, err)
	}
	return name + ":" + strconv.Itoa(int(port)), nil
}
