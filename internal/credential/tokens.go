package credential

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tagout/internal/leased"
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

// holder is one session's entry. Its fields are set once but for left.
type holder struct {
	kid, session, card string
	mark               uint32
	secrets            []string // names, in the order of the request
	digests            []digest
	minted             time.Time           // wall clock, for people
	expires            time.Duration       // CLOCK_BOOTTIME; 0 = with the session
	left               int                 // tokens that are valid; guarded by the table's mu
	mints              map[string]*minting // those of secrets that are tokens of the box's own issuer
	leases             *leased.Set         // nil: none
}

// grant is what one token stands for.
type grant struct {
	holder *holder
	secret string
}

// table is the truth about tokens. Revoking is one write under mu, which takes the session's entry out of byMark, or
// begins a new generation of everything; every use looks here. What a dead entry leaves behind is cleared away later.
//
// delivering orders deliveries against acknowledgements: whoever accepts a token holds it for reading from
// before the decision until the answer is with the caller, and a revocation passes through it for writing
// after it has forgotten the tokens and before it is acknowledged. So no acceptance is decided after mu was
// released, and none is delivered after the acknowledgement.
type table struct {
	boottime   func() time.Duration
	delivering sync.RWMutex

	changes atomic.Uint64 // grows with everything that makes a token invalid, but for its time; written under mu

	mu      sync.RWMutex
	epoch   uint64             // grows with every revocation of everything
	byMark  map[uint32]*holder // guarded by mu
	byKid   map[string]*holder // guarded by mu
	grants  map[digest]grant   // guarded by mu
	revoked revocations        // guarded by mu
	tags    map[uint32]string  // guarded by mu; what a stop that took a mark's tokens wants said
	told    subscribers        // guarded by mu; hear of every revocation in its order
}

func newTable(boottime func() time.Duration, revoked revocations) *table {
	return &table{
		boottime: boottime, revoked: revoked,
		byMark: map[uint32]*holder{}, byKid: map[string]*holder{}, grants: map[digest]grant{}, tags: map[uint32]string{}, told: subscribers{},
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
		if m := h.mints[name]; m != nil {
			m.d = d
		}
	}
	h.left = len(h.digests)
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
	if ok && t.byMark[g.holder.mark] != g.holder {
		return d, g, false
	}
	if ok && g.holder.expires != 0 && t.boottime() >= g.holder.expires {
		return d, g, false
	}
	return d, g, ok
}

// of returns the kid's entry; nil where it has none.
func (t *table) of(kid string) *holder {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byKid[kid]
}

// holds says whether the session still has the token.
func (t *table) holds(h *holder, d digest) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.grants[d].holder == h && t.byMark[h.mark] == h && (h.expires == 0 || t.boottime() < h.expires)
}

// stoppedBy returns the text of the tag that took the mark's tokens; empty where none did.
func (t *table) stoppedBy(mark uint32) string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.tags[mark]
}

// revokeMarks forgets every token of the sessions and lets them never have any again. What it returns is for the
// ledger, the records and the clearing away.
func (t *table) revokeMarks(marks []uint32, tag string) gone {
	var g gone
	t.mu.Lock()
	for _, mark := range marks {
		t.forget(mark, &g)
		t.say(mark, tag)
	}
	t.told.tell(wire.Revoked{Marks: marks})
	t.mu.Unlock()
	t.settle()
	return g
}

// revokeAll does the same for every session there is, and spoils the mints under way.
func (t *table) revokeAll(tag string) gone {
	var g gone
	t.mu.Lock()
	t.epoch++
	for mark := range t.byMark {
		t.forget(mark, &g)
		t.say(mark, tag)
	}
	t.told.tell(wire.Revoked{All: true})
	t.mu.Unlock()
	t.settle()
	return g
}

// say keeps the first tag's text for a mark: later ones came when nothing was left to take. Callers hold mu.
func (t *table) say(mark uint32, tag string) {
	if _, ok := t.tags[mark]; !ok && tag != "" {
		t.tags[mark] = tag
	}
}

// revokeSessions does the same for the sessions that match.
func (t *table) revokeSessions(match func(*holder) bool) gone {
	var g gone
	t.mu.Lock()
	for mark, h := range t.byMark {
		if match(h) {
			t.forget(mark, &g)
		}
	}
	t.told.tell(wire.Revoked{Marks: g.marks()})
	t.mu.Unlock()
	t.settle()
	return g
}

// revokeKid does the same for the kid's session, if it has one.
func (t *table) revokeKid(kid string) gone {
	var g gone
	t.mu.Lock()
	if h := t.byKid[kid]; h != nil {
		t.forget(h.mark, &g)
		t.told.tell(wire.Revoked{Marks: g.marks()})
	}
	t.mu.Unlock()
	t.settle()
	return g
}

// gone is what a revocation took.
type gone struct {
	entries []revocation
	holders []*holder // those that there were
	tokens  int
}

func (g *gone) marks() []uint32 {
	out := make([]uint32, len(g.entries))
	for i, e := range g.entries {
		out[i] = e.Mark
	}
	return out
}

// forget takes the mark's session out: from then on none of its tokens is found. Callers hold mu for writing.
func (t *table) forget(mark uint32, g *gone) {
	e := revocation{Mark: mark}
	t.changes.Add(1)
	if h := t.byMark[mark]; h != nil {
		e.Session, e.Kid = h.session, h.kid
		delete(t.byMark, mark)
		delete(t.byKid, h.kid)
		g.holders, g.tokens = append(g.holders, h), g.tokens+h.left
	}
	t.revoked.add(e)
	g.entries = append(g.entries, e)
}

// clear frees what the tokens of dead sessions took. A few at a time: uses wait for none of it.
func (t *table) clear(holders []*holder) {
	for _, h := range holders {
		t.mu.Lock()
		for _, d := range h.digests {
			if t.grants[d].holder == h {
				delete(t.grants, d)
			}
		}
		t.mu.Unlock()
	}
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
