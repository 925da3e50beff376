package tokencheck

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
)

// How long keys are kept, and how often they are fetched at most, whatever strangers send.
const (
	keysFor    = 10 * time.Minute
	keysGap    = 5 * time.Second // between fetches that keys nobody knows cause
	keysRetry  = time.Second     // after a fetch that failed
	maxKeys    = 64
	keySetType = "application/jwk-set+json, application/json"
)

// keySet is the issuer's keys.
type keySet struct {
	url string
	get *fetcher
	now func() time.Time

	mu      sync.Mutex
	keys    map[string]jose.JSONWebKey // guarded by mu
	fetched moment                     // guarded by mu; when a fetch that succeeded began
	tried   moment                     // guarded by mu; when any ended
	gap     time.Duration              // guarded by mu; how long after tried nothing is fetched
	err     error                      // guarded by mu; of the last fetch
	flight  chan struct{}              // guarded by mu; closed when the fetch under way has ended; nil: none is
}

func newKeySet(url string, get *fetcher, now func() time.Time) *keySet {
	return &keySet{url: url, get: get, now: now}
}

// find returns the key of that id. It fetches the keys where it is not among them or they are old, but not more often
// than allowed, and one fetch serves all who wait.
func (k *keySet) find(ctx context.Context, id string) (jose.JSONWebKey, error) {
	for waited := false; ; waited = true {
		k.mu.Lock()
		now := k.now()
		key, known := k.keys[id]
		fresh := k.fetched.age(now) < keysFor
		recent := k.tried.age(now) < k.gap
		flight, err := k.flight, k.err
		if flight == nil && !(known && fresh) && !recent && !waited {
			flight = make(chan struct{})
			k.flight = flight
			go k.fetch(flight)
		}
		k.mu.Unlock()
		switch {
		case known && fresh:
			return key, nil
		case flight == nil && fresh:
			return key, fmt.Errorf("%w: it names a key that the issuer does not have", ErrSignature)
		case flight == nil && err != nil:
			return key, err
		case flight == nil:
			return key, fmt.Errorf("%w: its keys are too old", ErrUnavailable)
		}
		select {
		case <-flight:
		case <-ctx.Done():
			return key, fmt.Errorf("%w: %w", ErrUnavailable, ctx.Err())
		}
	}
}

// fetch replaces the keys. It belongs to no one request: whoever started it may have gone.
func (k *keySet) fetch(done chan struct{}) {
	began := k.now()
	ctx, cancel := context.WithTimeout(context.Background(), fetchTime)
	defer cancel()
	raw, err := k.get.get(ctx, k.url, keySetType)
	var keys map[string]jose.JSONWebKey
	if err == nil {
		keys, err = readKeys(raw)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tried, k.err, k.gap, k.flight = moment{k.now()}, err, keysRetry, nil
	if err == nil {
		k.keys, k.fetched, k.gap = keys, moment{began}, keysGap
	}
	close(done)
}

// readKeys returns the keys of a set that can check tokens. Others are passed over.
func readKeys(raw []byte) (map[string]jose.JSONWebKey, error) {
	var set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if err := json.Unmarshal(raw, &set); err != nil || len(set.Keys) > maxKeys {
		return nil, fmt.Errorf("%w: its keys cannot be read", ErrUnavailable)
	}
	out := map[string]jose.JSONWebKey{}
	for _, raw := range set.Keys {
		var key jose.JSONWebKey
		if json.Unmarshal(raw, &key) != nil || !checks(key) {
			continue
		}
		if _, twice := out[key.KeyID]; twice {
			return nil, fmt.Errorf("%w: two of its keys have one name", ErrUnavailable)
		}
		out[key.KeyID] = key
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: it has no key for EdDSA or ES256", ErrUnavailable)
	}
	return out, nil
}

// checks says whether a key is the public half of one for signatures, and of its algorithm's own kind.
func checks(key jose.JSONWebKey) bool {
	if key.KeyID == "" || key.Use != "" && key.Use != "sig" || !key.Valid() || !key.IsPublic() {
		return false
	}
	switch public := key.Key.(type) {
	case ed25519.PublicKey:
		return key.Algorithm == string(jose.EdDSA)
	case *ecdsa.PublicKey:
		return key.Algorithm == string(jose.ES256) && public.Curve == elliptic.P256()
	}
	return false
}
