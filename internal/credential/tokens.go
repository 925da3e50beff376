package credential

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"regexp"
	"strings"
	"sync"
	"time"

	"tagout/internal/wire"
)

// tokenPrefix begins every token; 32 lower-case base32 characters (RFC 4648, 160 random bits) follow.
const tokenPrefix = "tgo_"

var (
	tokenRE   = regexp.MustCompile(`^tgo_[a-z2-7]{32}$`)
	tokenText = base32.StdEncoding.WithPadding(base32.NoPadding)
)

// digest is a token's SHA-256. Tokens themselves are never kept, so looking one up compares no secret bytes.
type digest [sha256.Size]byte

// id names a token in records; it cannot be turned back into one.
func (d digest) id() string { return hex.EncodeToString(d[:6]) }

func newToken() (string, digest) {
	raw := make([]byte, 20)
	rand.Read(raw) // never fails: it ends the process instead (crypto/rand)
	token := tokenPrefix + strings.ToLower(tokenText.EncodeToString(raw))
	return token, sha256.Sum256([]byte(token))
}

// holder is one session's entry. Its fields are set once.
type holder struct {
	kid, session, card string
	mark               uint32
	secrets            []string // names, in the order of the request
	digests            []digest
	expires            time.Duration // CLOCK_BOOTTIME; 0 = with the session
}

// grant is what one token stands for.
type grant struct {
	holder *holder
	secret string
}

// table is the truth about tokens. Revoking is one write under mu; every use looks here.
//
// delivering orders deliveries against acknowledgements: whoever accepts a token holds it for reading from
// before the decision until the answer is with the caller, and a revocation passes through it for writing
// after it has forgotten the tokens and before it is acknowledged. So no acceptance is decided after mu was
// released, and none is delivered after the acknowledgement.
type table struct {
	boottime   func() time.Duration
	delivering sync.RWMutex

	mu      sync.RWMutex
	epoch   uint64             // grows with every revocation of everything
	byMark  map[uint32]*holder // guarded by mu
	byKid   map[string]*holder // guarded by mu
	grants  map[digest]grant   // guarded by mu
	revoked revocations        // guarded by mu
	tags    map[uint32]string  // guarded by mu; what a stop that took a mark's tokens wants said
}

func newTable(boottime func() time.Duration, revoked revocations) *table {
	return &table{
		boottime: boottime, revoked: revoked,
		byMark: map[uint32]*holder{}, byKid: map[string]*holder{}, grants: map[digest]grant{}, tags: map[uint32]string{},
	}
}

// begin starts a mint: whatever is revoked between here and commit spoils it.
func (t *table) begin() uint64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.epoch
}

// mintResult says how a commit ended.
type mintResult int

const (
	minted       mintResult = iota
	mintConflict            // the kid or the mark has tokens already
	mintRevoked             // the session is revoked, or everything was while this mint was under way
)

// commit makes h and its tokens valid, or nothing.
func (t *table) commit(epoch uint64, h *holder) (map[string]string, mintResult) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.epoch != epoch || t.revoked.covers(h.mark, h.session) {
		return nil, mintRevoked
	}
	if t.byMark[h.mark] != nil || t.byKid[h.kid] != nil {
		return nil, mintConflict
	}
	tokens := make(map[string]string, len(h.secrets))
	for _, name := range h.secrets {
		token, d := newToken()
		tokens[name] = token
		h.digests = append(h.digests, d)
		t.grants[d] = grant{holder: h, secret: name}
	}
	t.byMark[h.mark], t.byKid[h.kid] = h, h
	return tokens, minted
}

// find returns what the token stands for now. ok is false for tokens that are malformed, unknown, revoked or
// expired. The caller holds t.delivering for reading until its answer is delivered.
func (t *table) find(token string) (d digest, g grant, ok bool) {
	d = sha256.Sum256([]byte(token))
	if !tokenRE.MatchString(token) {
		return d, grant{}, false
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	g, ok = t.grants[d]
	if ok && g.holder.expires != 0 && t.boottime() >= g.holder.expires {
		return d, g, false
	}
	return d, g, ok
}

// stoppedBy returns the text of the tag that took the mark's tokens; empty where none did.
func (t *table) stoppedBy(mark uint32) string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.tags[mark]
}

// revokeMarks forgets every token of the sessions and lets them never have any again. The returned entries
// are for the ledger and the records; tokens counts what was forgotten.
func (t *table) revokeMarks(marks []uint32, tag string) (entries []revocation, tokens int) {
	t.mu.Lock()
	for _, mark := range marks {
		e, n := t.forget(mark)
		t.say(mark, tag)
		entries, tokens = append(entries, e), tokens+n
	}
	t.mu.Unlock()
	t.settle()
	return entries, tokens
}

// revokeAll does the same for every session there is, and spoils the mints under way.
func (t *table) revokeAll(tag string) (entries []revocation, tokens int) {
	t.mu.Lock()
	t.epoch++
	for mark := range t.byMark {
		e, n := t.forget(mark)
		t.say(mark, tag)
		entries, tokens = append(entries, e), tokens+n
	}
	t.mu.Unlock()
	t.settle()
	return entries, tokens
}

// say keeps the first tag's text for a mark: later ones came when nothing was left to take. Callers hold mu.
func (t *table) say(mark uint32, tag string) {
	if _, ok := t.tags[mark]; !ok && tag != "" {
		t.tags[mark] = tag
	}
}

// revokeKid does the same for the kid's session; found is false where it has none.
func (t *table) revokeKid(kid string) (e revocation, tokens int, found bool) {
	t.mu.Lock()
	if h := t.byKid[kid]; h != nil {
		found = true
		e, tokens = t.forget(h.mark)
	}
	t.mu.Unlock()
	t.settle()
	return e, tokens, found
}

// forget removes the mark's session. Callers hold mu for writing.
func (t *table) forget(mark uint32) (revocation, int) {
	e := revocation{Mark: mark}
	h := t.byMark[mark]
	if h != nil {
		e.Session, e.Kid = h.session, h.kid
		for _, d := range h.digests {
			delete(t.grants, d)
		}
		delete(t.byMark, mark)
		delete(t.byKid, h.kid)
	}
	t.revoked.add(e)
	if h == nil {
		return e, 0
	}
	return e, len(h.digests)
}

// settle waits until every acceptance that was decided before has been delivered or given up. deliver bounds
// how long that takes.
func (t *table) settle() {
	t.delivering.Lock()
	//lint:ignore SA2001 passing through is the point
	t.delivering.Unlock()
}

func (t *table) size() (sessions, tokens int) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.byMark), len(t.grants)
}

// covers says whether a tag hangs on the session that req describes.
func covers(tag wire.Tag, req *wire.MintRequest) bool {
	if !tag.Released.IsZero() {
		return false
	}
	for _, mark := range tag.Marks {
		if mark == req.Mark {
			return true
		}
	}
	return tag.Scope.All ||
		tag.Scope.Kid != "" && tag.Scope.Kid == req.Kid ||
		tag.Scope.Card != "" && tag.Scope.Card == req.Card
}
