package tokencheck

import (
	"bytes"
	"compress/zlib"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// Bounds of what is kept of answers.
const (
	maxAsked = 4096
	maxLists = 16
	maxList  = 4 << 20 // bytes of a list, unpacked
	maxIndex = maxList * 8
)

// introspect asks the issuer whether the token is active, unless it said so less than MaxStale ago.
func (c *Checker) introspect(ctx context.Context, token string, t *tokenClaims) error {
	sum := sha256.Sum256([]byte(token))
	if c.asked.fresh(sum, c.cfg.MaxStale) {
		return nil
	}
	began := moment{c.cfg.Now()}
	raw, err := c.get.post(ctx, c.cfg.Issuer+"/introspect", c.cfg.Key, url.Values{"token": {token}, "token_type_hint": {"access_token"}})
	if err != nil {
		return err
	}
	var answer struct {
		Active bool   `json:"active"`
		ID     string `json:"jti"`
	}
	switch err := json.Unmarshal(raw, &answer); {
	case err != nil:
		return fmt.Errorf("%w: its answer about the token cannot be read", ErrUnavailable)
	case !answer.Active:
		c.asked.forget(sum)
		return ErrRevoked
	case answer.ID != t.ID:
		return fmt.Errorf("%w: it answers for another token", ErrUnavailable)
	}
	if c.cfg.MaxStale > 0 {
		c.asked.keep(sum, began)
	}
	return nil
}

// askCache remembers which tokens were active, and when. That one is not is never remembered: nothing would be gained.
type askCache struct {
	now func() time.Time

	mu     sync.Mutex
	active map[[sha256.Size]byte]moment // guarded by mu
}

func (a *askCache) fresh(sum [sha256.Size]byte, within time.Duration) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	at, ok := a.active[sum]
	return ok && at.age(a.now()) < within
}

func (a *askCache) keep(sum [sha256.Size]byte, at moment) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.active == nil || len(a.active) >= maxAsked {
		a.active = map[[sha256.Size]byte]moment{} // they are asked for again, which costs little
	}
	a.active[sum] = at
}

func (a *askCache) forget(sum [sha256.Size]byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.active, sum)
}

// checkList looks the token's bit up in its list, which is no older than MaxStale, and no older than its own ttl.
func (c *Checker) checkList(ctx context.Context, status *struct {
	List *listRef `json:"status_list"`
}) error {
	if status == nil || status.List == nil || status.List.Index == nil {
		return fmt.Errorf("%w: it names no status list", ErrMalformed)
	}
	ref := status.List
	if i := *ref.Index; i < 0 || i >= maxIndex || !strings.HasPrefix(ref.URI, c.cfg.Issuer+"/") {
		return fmt.Errorf("%w: it names a status list that is not the issuer's", ErrMalformed)
	}
	list := c.lists.get(ref.URI)
	select {
	case list.busy <- struct{}{}:
		defer func() { <-list.busy }()
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnavailable, ctx.Err())
	}
	if list.began.age(c.cfg.Now()) >= min(c.cfg.MaxStale, list.ttl) {
		if err := c.fetchList(ctx, ref.URI, list); err != nil {
			return err
		}
	}
	valid, ok := list.valid(*ref.Index)
	if !ok {
		return fmt.Errorf("%w: its status list is too short", ErrUnavailable)
	}
	if !valid {
		return ErrRevoked
	}
	return nil
}

// cachedList is one status list. Whoever has put something into busy owns the rest.
type cachedList struct {
	busy  chan struct{}
	began moment // when the fetch did; zero: there is no list
	ttl   time.Duration
	width int // bits of a token: 1, 2, 4 or 8
	bits  []byte
}

// valid says whether the token's status is 0; ok is false where the list does not reach so far.
func (l *cachedList) valid(index int64) (valid, ok bool) {
	at := index * int64(l.width)
	if l.width == 0 || at/8 >= int64(len(l.bits)) {
		return false, false
	}
	mask := byte(1<<l.width - 1)
	return l.bits[at/8]>>(at%8)&mask == 0, true
}

func (c *Checker) fetchList(ctx context.Context, uri string, list *cachedList) error {
	began := moment{c.cfg.Now()}
	raw, err := c.get.get(ctx, uri, "application/statuslist+jwt")
	if err != nil {
		return err
	}
	payload, err := c.verify(ctx, typeStatusList, strings.TrimSpace(string(raw)))
	if err != nil {
		return fmt.Errorf("%w: its status list: %w", ErrUnavailable, err)
	}
	width, bits, ttl, err := readList(payload, uri, c.cfg.Issuer, c.cfg.Now(), c.cfg.Ahead)
	if err != nil {
		return err
	}
	list.began, list.width, list.bits, list.ttl = began, width, bits, ttl
	return nil
}

// readList reads the payload of a status list token.
func readList(payload []byte, uri, issuer string, now time.Time, ahead time.Duration) (width int, bits []byte, ttl time.Duration, err error) {
	var t struct {
		Issuer   string `json:"iss"`
		Subject  string `json:"sub"`
		IssuedAt int64  `json:"iat"`
		Expires  int64  `json:"exp"`
		TTL      int64  `json:"ttl"`
		List     struct {
			Bits int    `json:"bits"`
			List string `json:"lst"`
		} `json:"status_list"`
	}
	bad := func(why string) (int, []byte, time.Duration, error) {
		return 0, nil, 0, fmt.Errorf("%w: its status list %s", ErrUnavailable, why)
	}
	switch err := json.Unmarshal(payload, &t); {
	case err != nil:
		return bad("cannot be read")
	case t.Subject != uri || t.Issuer != "" && t.Issuer != issuer:
		return bad("is another one")
	case t.IssuedAt <= 0 || t.IssuedAt > now.Add(ahead).Unix() || t.Expires != 0 && t.Expires <= now.Unix():
		return bad("is out of date")
	case !slices.Contains([]int{1, 2, 4, 8}, t.List.Bits):
		return bad("has an unknown form")
	}
	packed, err := base64.RawURLEncoding.DecodeString(t.List.List)
	if err != nil {
		return bad("is not base64url")
	}
	r, err := zlib.NewReader(bytes.NewReader(packed))
	if err != nil {
		return bad("is not packed with zlib")
	}
	defer r.Close() // only read
	if bits, err = io.ReadAll(io.LimitReader(r, maxList+1)); err != nil || len(bits) > maxList {
		return bad("cannot be unpacked, or is too long")
	}
	ttl = time.Duration(1<<63 - 1)
	if t.TTL > 0 && t.TTL < int64(ttl/time.Second) {
		ttl = time.Duration(t.TTL) * time.Second
	}
	if t.Expires != 0 {
		ttl = min(ttl, time.Unix(t.Expires, 0).Sub(now))
	}
	return t.List.Bits, bits, ttl, nil
}

// listCache holds a few lists.
type listCache struct {
	now func() time.Time

	mu    sync.Mutex
	lists map[string]*cachedList // guarded by mu
}

// get returns the list's entry, which may be empty.
func (l *listCache) get(uri string) *cachedList {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.lists[uri]
	if list == nil {
		if l.lists == nil || len(l.lists) >= maxLists {
			l.lists = map[string]*cachedList{} // they are fetched again, which costs little
		}
		list = &cachedList{busy: make(chan struct{}, 1)}
		l.lists[uri] = list
	}
	return list
}
