package issuer

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
)

// key signs. What it holds is never printed.
type key struct {
	id      string // RFC 7638 thumbprint, so that an id never comes to mean another key
	alg     jose.SignatureAlgorithm
	private crypto.Signer
	since   time.Time // when it was made, or began to sign
}

// retired is a key that signs no more and still counts.
type retired struct {
	*key
	until time.Duration // of the caller's clock
}

// Ring holds an issuer's keys: one that signs, one that is published and will sign after the next rotation, so that
// those who check know it before they meet it, and those that have signed what may still be good. Safe for concurrent use.
type Ring struct {
	rotating sync.Mutex // held by a rotation; taken before mu

	mu      sync.RWMutex
	alg     jose.SignatureAlgorithm // of keys that are made
	current *key                    // guarded by mu; nil once wiped
	next    *key                    // guarded by mu
	old     []retired               // guarded by mu
}

// KeyInfo describes a key to people.
type KeyInfo struct {
	ID        string    `json:"kid"`
	Algorithm string    `json:"alg"`
	State     string    `json:"state"` // next, current or old
	Since     time.Time `json:"since"` // it is in use, or was made; for people
}

// NewRing makes the first keys of an issuer. now is for people.
func NewRing(algorithm string, now time.Time) (*Ring, error) {
	r := &Ring{alg: jose.SignatureAlgorithm(algorithm)}
	var err error
	if r.current, err = newKey(r.alg, now); err == nil {
		r.next, err = newKey(r.alg, now)
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

func newKey(alg jose.SignatureAlgorithm, now time.Time) (*key, error) {
	var private crypto.Signer
	var err error
	switch alg {
	case jose.EdDSA:
		_, private, err = ed25519.GenerateKey(rand.Reader)
	case jose.ES256:
		private, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	default:
		err = fmt.Errorf("%q is neither EdDSA nor ES256", string(alg))
	}
	if err != nil {
		return nil, fmt.Errorf("making a signing key: %w", err)
	}
	return wrap(private, alg, now.UTC().Truncate(time.Second))
}

func wrap(private crypto.Signer, alg jose.SignatureAlgorithm, since time.Time) (*key, error) {
	sum, err := (&jose.JSONWebKey{Key: private.Public()}).Thumbprint(crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("naming a signing key: %w", err)
	}
	return &key{id: base64.RawURLEncoding.EncodeToString(sum), alg: alg, private: private, since: since}, nil
}

// Rotate makes the next key the one that signs. Keys that signed before count until the clock that now is of says
// until. keep is called with the new ring's content (Marshal) before anything is changed; its error changes nothing. Nobody
// waits for keep but another rotation: it may take as long as a disk does.
func (r *Ring) Rotate(at time.Time, now, until time.Duration, keep func([]byte) error) (current string, err error) {
	fresh, err := newKey(r.alg, at)
	if err != nil {
		return "", err
	}
	r.rotating.Lock()
	defer r.rotating.Unlock()
	signs, raw, err := r.turn(fresh)
	if err != nil {
		return "", err
	}
	defer clear(raw)
	if err := keep(raw); err != nil {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.current == nil { // wiped meanwhile, and next with it
		return "", errors.New("rotating the signing keys: they are gone")
	}
	r.dropOld(now)
	r.old = append(r.old, retired{r.current, until})
	r.current, r.next = signs, fresh
	return r.current.id, nil
}

// turn returns the key that signs next, and the ring's content with it and fresh. No key is wiped meanwhile.
func (r *Ring) turn(fresh *key) (signs *key, raw []byte, err error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.next == nil {
		return nil, nil, errors.New("rotating the signing keys: they are gone")
	}
	signs = &key{id: r.next.id, alg: r.next.alg, private: r.next.private, since: fresh.since}
	raw, err = marshal(signs, fresh)
	return signs, raw, err
}

// Expire forgets the old keys whose time is over.
func (r *Ring) Expire(now time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropOld(now)
}

// dropOld wipes old keys whose time is over. Callers hold mu.
func (r *Ring) dropOld(now time.Duration) {
	r.old = slices.DeleteFunc(r.old, func(k retired) bool {
		if now < k.until {
			return false
		}
		k.wipe()
		return true
	})
}

// find returns the key of that id; nil where there is none. Callers hold mu.
func (r *Ring) find(id string) *key {
	for _, k := range r.all() {
		if k.id == id {
			return k
		}
	}
	return nil
}

// all lists the keys, the current one first. Callers hold mu.
func (r *Ring) all() []*key {
	if r.current == nil {
		return nil
	}
	keys := []*key{r.current, r.next}
	for _, k := range r.old {
		keys = append(keys, k.key)
	}
	return keys
}

// Public returns the key set that others check with, as JSON: public halves alone.
func (r *Ring) Public() ([]byte, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{}}
	for _, k := range r.all() {
		set.Keys = append(set.Keys, jose.JSONWebKey{Key: k.private.Public(), KeyID: k.id, Algorithm: string(k.alg), Use: "sig"})
	}
	return json.Marshal(set)
}

// Info describes the keys, the current one first.
func (r *Ring) Info() []KeyInfo {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var out []KeyInfo
	for i, k := range r.all() {
		out = append(out, KeyInfo{ID: k.id, Algorithm: string(k.alg), State: []string{"current", "next", "old"}[min(i, 2)], Since: k.since})
	}
	return out
}

// Since is when the current key began to sign.
func (r *Ring) Since() time.Time {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.current == nil {
		return time.Time{}
	}
	return r.current.since
}

// Wipe forgets the private keys. Nothing can be signed or read any more.
func (r *Ring) Wipe() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range r.all() {
		k.wipe()
	}
	r.current, r.next, r.old = nil, nil, nil
}

func (k *key) wipe() {
	switch private := k.private.(type) {
	case ed25519.PrivateKey:
		clear(private)
	case *ecdsa.PrivateKey:
		//lint:ignore SA1019 nothing computes with it any more: it is overwritten
		clear(private.D.Bits())
	}
}

const ringVersion = 1

// ringFile is a ring as it is kept: what was retired is not, because whoever opens a ring anew has forgotten what its
// old keys have signed.
type ringFile struct {
	Version int     `json:"version"`
	Current keyFile `json:"current"`
	Next    keyFile `json:"next"`
}

type keyFile struct {
	Key   jose.JSONWebKey `json:"key"` // private
	Since time.Time       `json:"since"`
}

// Marshal returns the ring as OpenRing reads it: private keys in clear, for the caller to seal and wipe.
func (r *Ring) Marshal() ([]byte, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.current == nil {
		return nil, errors.New("writing the signing keys: they are gone")
	}
	return marshal(r.current, r.next)
}

func marshal(current, next *key) ([]byte, error) {
	raw, err := json.Marshal(ringFile{Version: ringVersion, Current: current.file(), Next: next.file()})
	if err != nil {
		return nil, fmt.Errorf("writing the signing keys: %w", err)
	}
	return raw, nil
}

func (k *key) file() keyFile {
	return keyFile{Key: jose.JSONWebKey{Key: k.private, KeyID: k.id, Algorithm: string(k.alg)}, Since: k.since}
}

// OpenRing reads what Marshal wrote. Keys that are made from now on are of the algorithm. Errors quote nothing.
func OpenRing(raw []byte, algorithm string) (*Ring, error) {
	var f ringFile
	if json.Unmarshal(raw, &f) != nil || f.Version != ringVersion {
		return nil, fmt.Errorf("reading the signing keys: they are not of version %d", ringVersion)
	}
	r := &Ring{alg: jose.SignatureAlgorithm(algorithm)}
	if !slices.Contains(accepted, r.alg) {
		return nil, fmt.Errorf("reading the signing keys: %q is neither EdDSA nor ES256", algorithm)
	}
	var err error
	if r.current, err = f.Current.open(); err == nil {
		r.next, err = f.Next.open()
	}
	if err != nil {
		return nil, err
	}
	if r.current.id == r.next.id {
		return nil, errors.New("reading the signing keys: the next one is the current one")
	}
	return r, nil
}

// open checks that the key is of its algorithm's own kind, so that no other algorithm can be read into it.
func (f keyFile) open() (*key, error) {
	alg := jose.SignatureAlgorithm(f.Key.Algorithm)
	var private crypto.Signer
	switch k := f.Key.Key.(type) {
	case ed25519.PrivateKey:
		if alg == jose.EdDSA {
			private = k
		}
	case *ecdsa.PrivateKey:
		if alg == jose.ES256 && k.Curve == elliptic.P256() {
			private = k
		}
	}
	if private == nil {
		return nil, errors.New("reading the signing keys: one is no private key of its algorithm")
	}
	return wrap(private, alg, f.Since)
}
