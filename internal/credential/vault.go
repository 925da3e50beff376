package credential

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
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
	"tagout/internal/wire"
)

// Bounds of a secret's value. Shorter ones cannot be told from ordinary words when records are redacted;
// longer ones do not fit into an HTTP header that servers accept.
const (
	minValue = 8
	maxValue = 8 << 10
	maxHosts = 64
)

const vaultVersion = 1

var secretNameRE = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_.-]{0,63}$`)

// errUnknownSecret is returned for a name that the vault does not hold.
var errUnknownSecret = errors.New("no such secret")

// vault holds the secrets, in memory and in one encrypted file. Every change is on disk before it is in
// memory, so that a change that was acknowledged survives a crash.
type vault struct {
	path      string
	id        *age.X25519Identity
	addSecret func(string) // tells the audit log what to redact
	lock      *os.File     // held while the process lives

	mu      sync.RWMutex
	secrets map[string]*secret // guarded by mu; the values are owned by the vault
}

// secret is one entry as the encrypted file carries it.
type secret struct {
	Value   []byte    `json:"value"`
	Hosts   []string  `json:"hosts"` // canonical "name:port", sorted
	Canary  bool      `json:"canary,omitempty"`
	Updated time.Time `json:"updated"`
}

type vaultFile struct {
	Version int                `json:"version"`
	Secrets map[string]*secret `json:"secrets"`
}

func openVault(dir string, addSecret func(string)) (*vault, error) {
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	v := &vault{path: filepath.Join(dir, "vault.age"), addSecret: addSecret, lock: lock, secrets: map[string]*secret{}}
	err = removeLeftovers(dir)
	if err == nil {
		v.id, err = openIdentity(filepath.Join(dir, "identity.age"), v.path)
	}
	if err == nil {
		err = v.load()
	}
	if err != nil {
		lock.Close() // already failing
		return nil, err
	}
	return v, nil
}

func (v *vault) load() error {
	sealed, err := os.ReadFile(v.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the vault: %w", err)
	}
	r, err := age.Decrypt(bytes.NewReader(sealed), v.id)
	if err != nil {
		return fmt.Errorf("decrypting the vault %s: it is damaged or belongs to another identity: restore both from one backup: %w", v.path, err)
	}
	plain, err := io.ReadAll(r)
	defer clear(plain)
	if err != nil {
		return fmt.Errorf("decrypting the vault %s: it is damaged: restore it from a backup: %w", v.path, err)
	}
	var f vaultFile
	// The decoder's message is left out: it may quote a value.
	if json.Unmarshal(plain, &f) != nil || f.Version != vaultVersion {
		return fmt.Errorf("reading the vault %s: it is not of version %d: restore it from a backup, or use the build that wrote it", v.path, vaultVersion)
	}
	for name, s := range f.Secrets {
		if s == nil {
			return fmt.Errorf("reading the vault %s: secret %s is empty: restore the vault from a backup", v.path, name)
		}
		v.addSecret(string(s.Value))
		v.secrets[name] = s
	}
	return nil
}

// save writes the given secrets. Callers hold mu.
func (v *vault) save(secrets map[string]*secret) error {
	plain, err := json.Marshal(vaultFile{Version: vaultVersion, Secrets: secrets})
	defer clear(plain)
	if err != nil {
		return fmt.Errorf("writing the vault: %w", err)
	}
	var sealed bytes.Buffer
	w, err := age.Encrypt(&sealed, v.id.Recipient())
	if err == nil {
		_, err = w.Write(plain)
	}
	if err == nil {
		err = w.Close()
	}
	if err == nil {
		err = writeFile(v.path, sealed.Bytes())
	}
	if err != nil {
		return fmt.Errorf("writing the vault: nothing was changed: %w", err)
	}
	return nil
}

// put sets a secret; tokens that exist resolve to the new value from the next use on. Errors of the caller's
// making are *badEntry.
func (v *vault) put(name string, e wire.VaultEntry) error {
	hosts, err := checkEntry(name, e)
	if err != nil {
		return err
	}
	// Redaction first: whatever happens next may be logged.
	v.addSecret(e.Value)
	v.mu.Lock()
	defer v.mu.Unlock()
	next := make(map[string]*secret, len(v.secrets)+1)
	for n, s := range v.secrets {
		next[n] = s
	}
	next[name] = &secret{Value: []byte(e.Value), Hosts: hosts, Canary: e.Canary, Updated: time.Now().UTC()}
	return v.replace(next, name)
}

func (v *vault) delete(name string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.secrets[name] == nil {
		return errUnknownSecret
	}
	next := make(map[string]*secret, len(v.secrets))
	for n, s := range v.secrets {
		if n != name {
			next[n] = s
		}
	}
	return v.replace(next, name)
}

// replace saves next, makes it the vault's content and wipes the value that name had before. Callers hold mu.
func (v *vault) replace(next map[string]*secret, name string) error {
	if err := v.save(next); err != nil {
		return err
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

// value returns the secret's value where it is bound to hostport; bound is false where it is bound elsewhere.
func (v *vault) value(name, hostport string) (value string, bound bool, err error) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	s := v.secrets[name]
	if s == nil {
		return "", false, errUnknownSecret
	}
	if !slices.Contains(s.Hosts, hostport) {
		return "", false, nil
	}
	return string(s.Value), true, nil
}

func (v *vault) list() []wire.VaultInfo {
	v.mu.RLock()
	defer v.mu.RUnlock()
	out := make([]wire.VaultInfo, 0, len(v.secrets))
	for name, s := range v.secrets {
		out = append(out, wire.VaultInfo{Name: name, Hosts: slices.Clone(s.Hosts), Canary: s.Canary, Updated: s.Updated})
	}
	slices.SortFunc(out, func(a, b wire.VaultInfo) int { return strings.Compare(a.Name, b.Name) })
	return out
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
	v.secrets = map[string]*secret{}
	v.lock.Close() // nothing was written through it
}

// badEntry is a vault entry that cannot be taken; its text never holds the value.
type badEntry struct{ text string }

func (e *badEntry) Error() string { return e.text }

func checkEntry(name string, e wire.VaultEntry) (hosts []string, err error) {
	switch {
	case !secretNameRE.MatchString(name):
		return nil, &badEntry{"a secret's name is 1 to 64 letters, digits, dots, dashes and underscores, starting with a letter"}
	case len(e.Value) < minValue || len(e.Value) > maxValue:
		return nil, &badEntry{fmt.Sprintf("a secret's value has %d to %d bytes, this one has %d", minValue, maxValue, len(e.Value))}
	case strings.ContainsFunc(e.Value, func(r rune) bool { return r < 0x20 || r == 0x7f }):
		return nil, &badEntry{"a secret's value is put into HTTP headers and cannot hold control characters: is there a line end at its end?"}
	case strings.TrimSpace(e.Value) != e.Value:
		return nil, &badEntry{"a secret's value cannot begin or end with a space"}
	case len(e.Hosts) == 0 && !e.Canary || len(e.Hosts) > maxHosts:
		return nil, &badEntry{fmt.Sprintf("a secret is bound to 1 to %d hosts: name them as host:port, for example api.vendor.test:443", maxHosts)}
	}
	for _, h := range e.Hosts {
		canonical, err := hostPort(h)
		if err != nil {
			return nil, &badEntry{err.Error()}
		}
		hosts = append(hosts, canonical)
	}
	slices.Sort(hosts)
	return slices.Compact(hosts), nil
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
