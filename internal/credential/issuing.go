package credential

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/big"
	"net/http"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tagout/internal/apikey"
	"tagout/internal/issuer"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// IssuerConfig makes credd an issuer of tokens for services of the user's own.
type IssuerConfig struct {
	URL         string        // the tokens' iss, and where its routes are: https://name[:port], without a path
	TrustDomain string        // of the SPIFFE IDs that are the tokens' sub
	Algorithm   string        // issuer.EdDSA or issuer.ES256; counts for keys that are made from now on
	Lifetime    time.Duration // of a JWT at most, and of those for which the card does not say; above 0
	RotateEvery time.Duration // after which another key signs; 0: only by order
	Audiences   []string      // path.Match globs of what tokens may be for; empty: whatever a card says
}

// Sizes of status lists, in bits. A list takes no more tokens once it is half full, so that a free bit is found soon
// and where a token's bit lies says nothing of when it was made.
const (
	listBits = 1 << 16
	listFull = listBits / 2
)

const (
	sweepEvery = 30 * time.Second
	overlap    = time.Minute // that an old key counts for longer than any token that it signed
)

// issuing makes JWTs and knows what became of them. A JWT is good as long as the opaque token that stands for it in the
// session's table: nothing here has to be told of a revocation. What it knows lives in memory alone, so that after a
// restart nothing that was made before is good.
type issuing struct {
	cfg      IssuerConfig
	ring     atomic.Pointer[issuer.Ring] // never nil
	file     string                      // holds the keys, sealed
	vault    *vault
	clients  *apikey.Book
	tokens   *table
	boottime func() time.Duration
	walltime func() time.Time
	building chan struct{} // bounds how many status lists are put together at once

	mu    sync.Mutex
	byID  map[string]*issued // guarded by mu; jti ->
	lists []*statusList      // guarded by mu; tokens get bits of the last one
	swept time.Duration      // guarded by mu
}

// minting is one token of a session's identity.mint. Its fields are set before anybody knows of it.
type minting struct {
	want    wire.MintToken
	bound   binding
	subject string
	d       digest // of the opaque token

	mu     sync.Mutex
	latest *issued // guarded by mu; what is handed out while half of its life is left
	token  string  // guarded by mu; latest's JWT
}

// issued is what is known of a JWT. Its fields are set once.
type issued struct {
	claims     issuer.Claims
	h          *holder
	m          *minting
	list       *statusList
	bit        int
	from, ends time.Duration // CLOCK_BOOTTIME
}

// statusList is one list; issuing.mu guards it.
type statusList struct {
	id   string // random: no process knows another one's lists
	uri  string
	live map[int]*issued
	dead issuer.Bits // of those that have expired
	used int
	made madeList
}

// madeList is a signed list, good until something changes in the session's table, a token in it expires, or a second is
// over: asked for as often as strangers like, it costs no more.
type madeList struct {
	token   string
	changes uint64 // table.changes before it was made
	until   time.Duration
}

func clientsFile(dir string) string { return filepath.Join(dir, "clients.json") }

// newIssuing returns an issuer without keys, which open gives it.
func newIssuing(cfg Config, v *vault, tokens *table) (*issuing, error) {
	c := *cfg.Issuer
	for _, pattern := range c.Audiences {
		if _, err := path.Match(pattern, ""); err != nil {
			return nil, fmt.Errorf("opening the issuer: %q is neither an audience nor a pattern: %w", pattern, err)
		}
	}
	if _, err := issuer.ID(c.TrustDomain, "card", "kid", "session"); err != nil {
		return nil, fmt.Errorf("opening the issuer: %w", err)
	}
	s := &issuing{
		cfg: c, file: filepath.Join(cfg.Dir, "issuer.age"), vault: v, tokens: tokens, boottime: cfg.Boottime, walltime: cfg.Walltime,
		clients: apikey.NewBook(clientsFile(cfg.Dir)), building: make(chan struct{}, 2), byID: map[string]*issued{},
	}
	if s.walltime == nil {
		s.walltime = time.Now
	}
	s.ring.Store(&issuer.Ring{})
	return s, nil
}

// keys returns the signing keys; the ring is empty, and signs and reads nothing, until the vault is open.
func (s *issuing) keys() *issuer.Ring { return s.ring.Load() }

// open reads the signing keys, or makes them where there are none. The vault is open.
func (s *issuing) open() error {
	ring, err := s.readRing()
	if errors.Is(err, fs.ErrNotExist) {
		ring, err = s.makeRing()
	}
	if err != nil {
		return fmt.Errorf("opening the issuer: %w", err)
	}
	s.ring.Store(ring)
	return nil
}

func (s *issuing) readRing() (*issuer.Ring, error) {
	plain, err := s.vault.readSealed(s.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("decrypting the signing keys in %s: restore them from a backup, or remove the file to have new ones made: %w", s.file, err)
	}
	defer clear(plain)
	return issuer.OpenRing(plain, s.cfg.Algorithm)
}

func (s *issuing) makeRing() (*issuer.Ring, error) {
	ring, err := issuer.NewRing(s.cfg.Algorithm, s.walltime())
	if err != nil {
		return nil, err
	}
	plain, err := ring.Marshal()
	defer clear(plain)
	if err == nil {
		err = s.keep(plain)
	}
	if err != nil {
		return nil, fmt.Errorf("keeping the signing keys: %w", err)
	}
	return ring, nil
}

// keep seals what Marshal wrote on disk.
func (s *issuing) keep(plain []byte) error { return s.vault.writeSealed(s.file, plain) }

// checkMinted judges what a session asks the issuer for. names are those of its secrets.
func (s *Service) checkMinted(req *wire.MintRequest, names map[string]bool) *refusal {
	if len(req.Mint) > 0 && s.issuing == nil {
		return refuse(http.StatusForbidden, reason.SecretDenied, "minting: this box is no issuer: write `issuer:` into its configuration, or take identity.mint off the card")
	}
	if err := s.vault.shut(); err != nil && len(req.Mint) > 0 {
		return refuse(http.StatusServiceUnavailable, reason.VaultSealed, "minting: %v", err)
	}
	for _, want := range req.Mint {
		switch {
		case !secretNameRE.MatchString(want.Name) || !scopeRE.MatchString(want.Audience):
			return refuse(http.StatusBadRequest, reason.Malformed, "minting: %q for %q has no name or no audience", cut(want.Name, 64), cut(want.Audience, 256))
		case names[want.Name]:
			return refuse(http.StatusBadRequest, reason.Malformed, "minting: %q is named twice", want.Name)
		case want.Lifetime < 0:
			return refuse(http.StatusBadRequest, reason.Malformed, "minting: the lifetime of %s is negative", want.Name)
		case s.denied(want.Name) || s.deniedWord(want.Audience):
			return refuse(http.StatusForbidden, reason.SecretDenied, "minting: %q for %q can never be granted to a kid: take it off the card", want.Name, want.Audience)
		case !s.issuing.mayBeFor(want.Audience):
			return refuse(http.StatusForbidden, reason.SecretDenied, "minting: this box issues no tokens for %q: add it to issuer.audiences in its configuration, or take it off the card", want.Audience)
		case want.Inside == (len(want.Hosts) > 0):
			return refuse(http.StatusBadRequest, reason.Malformed, "minting: %s needs hosts, or to be given to the kid itself, and not both", want.Name)
		}
		for _, word := range want.Scope {
			if !scopeRE.MatchString(word) {
				return refuse(http.StatusBadRequest, reason.Malformed, "minting: %q is not a scope", cut(word, 128))
			}
			if s.deniedWord(word) {
				return refuse(http.StatusForbidden, reason.SecretDenied, "minting: the scope %q can never be granted to a kid: take it off the card", word)
			}
		}
		names[want.Name] = true
	}
	return nil
}

// scopeRE is what can stand in a scope, and in an audience (RFC 6749 section 3.3).
var scopeRE = regexp.MustCompile(`^[!#-\[\]-~]{1,256}$`)

// deniedWord is denied for what is no secret's name: in a pattern a star does not stand for a slash.
func (s *Service) deniedWord(word string) bool {
	return s.denied(word) || s.denied(strings.ReplaceAll(word, "/", "_"))
}

func (s *issuing) mayBeFor(audience string) bool {
	for _, pattern := range s.cfg.Audiences {
		if ok, err := path.Match(pattern, audience); ok && err == nil {
			return true
		}
	}
	return len(s.cfg.Audiences) == 0
}

// prepare makes the entries of what req asks for. They are of use once commit has made their opaque tokens.
func (s *issuing) prepare(req *wire.MintRequest) (map[string]*minting, *refusal) {
	if len(req.Mint) == 0 {
		return nil, nil
	}
	subject, err := issuer.ID(s.cfg.TrustDomain, req.Card, req.Kid, req.Session)
	if err != nil {
		return nil, refuse(http.StatusBadRequest, reason.Malformed, "minting: %v", err)
	}
	out := map[string]*minting{}
	for _, want := range req.Mint {
		m := &minting{want: want, subject: subject}
		if len(want.Hosts) > 0 {
			if m.bound, err = checkBinding(wire.VaultEntry{Hosts: want.Hosts, Present: mintedPresentation}); err != nil {
				return nil, refuse(http.StatusBadRequest, reason.Malformed, "minting: %s: %v", want.Name, err)
			}
		}
		out[want.Name] = m
	}
	return out, nil
}

// handOut returns a JWT for m's session: the latest one while half of its life is left, by either clock, and a new one
// otherwise. made says whether it was made just now.
func (s *issuing) handOut(h *holder, m *minting) (token string, i *issued, made bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now, wall := s.boottime(), s.walltime().Unix()
	if i := m.latest; i != nil && now < (i.from+i.ends)/2 && wall >= i.claims.IssuedAt && 2*wall < i.claims.IssuedAt+i.claims.Expires {
		return m.token, i, false, nil
	}
	if i, token, err = s.issue(h, m); err != nil {
		return "", nil, false, err
	}
	m.latest, m.token = i, token
	return token, i, true, nil
}

// life is how long a JWT of m lives that is made now.
func (s *issuing) life(h *holder, m *minting, now time.Duration) time.Duration {
	life := s.cfg.Lifetime
	if m.want.Lifetime > 0 {
		life = min(life, m.want.Lifetime)
	}
	if h.expires != 0 {
		life = min(life, h.expires-now)
	}
	return life.Truncate(time.Second)
}

// issue makes a JWT.
func (s *issuing) issue(h *holder, m *minting) (*issued, string, error) {
	now, wall := s.boottime(), s.walltime().Round(0) // without its monotonic part: it is compared with what is on paper
	life := s.life(h, m, now)
	if life <= 0 {
		return nil, "", errors.New("less than a second of the session is left")
	}
	id := make([]byte, 16)
	rand.Read(id)                                   // never fails
	expires := wall.Add(life).Truncate(time.Second) // and the boot clock's end is the same moment
	i := &issued{h: h, m: m, from: now, ends: now + expires.Sub(wall), claims: issuer.Claims{
		Issuer: s.cfg.URL, Subject: m.subject, Client: m.subject, Audience: m.want.Audience, Scope: strings.Join(m.want.Scope, " "),
		ID: hex.EncodeToString(id), IssuedAt: wall.Unix(), NotBefore: wall.Unix(), Expires: expires.Unix(),
		Session: h.session, Kid: h.kid, Card: h.card,
	}}
	s.enter(i)
	token, err := s.keys().Access(i.claims)
	if err != nil {
		s.mu.Lock()
		s.bury(i)
		s.mu.Unlock()
		return nil, "", err
	}
	return i, token, nil
}

// enter gives i its bit, in i.claims too, and makes it known.
func (s *issuing) enter(i *issued) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i.from-s.swept >= sweepEvery {
		s.sweep(i.from)
	}
	if len(s.lists) == 0 || s.lists[len(s.lists)-1].used >= listFull {
		random := make([]byte, 8)
		rand.Read(random) // never fails
		id := hex.EncodeToString(random)
		s.lists = append(s.lists, &statusList{id: id, uri: s.cfg.URL + "/statuslists/" + id, live: map[int]*issued{}, dead: issuer.NewBits(listBits)})
	}
	l := s.lists[len(s.lists)-1]
	i.list, i.bit = l, l.free()
	l.live[i.bit], l.used = i, l.used+1
	i.claims.Status.List = issuer.StatusRef{Index: i.bit, URI: l.uri}
	s.byID[i.claims.ID] = i
}

// free returns a bit that no token has had.
func (l *statusList) free() int {
	for {
		n, err := rand.Int(rand.Reader, big.NewInt(listBits))
		if err != nil {
			panic("reading random bytes: " + err.Error()) // never fails
		}
		if bit := int(n.Int64()); l.live[bit] == nil && !l.dead.Invalid(bit) {
			return bit
		}
	}
}

// sweep forgets what has expired, and lists that are full and hold nothing else. Callers hold mu.
func (s *issuing) sweep(now time.Duration) {
	s.swept = now
	for _, i := range s.byID {
		if now >= i.ends {
			s.bury(i)
		}
	}
	var keep []*statusList
	for n, l := range s.lists {
		if n == len(s.lists)-1 || len(l.live) > 0 {
			keep = append(keep, l)
		}
	}
	s.lists = keep
}

// bury forgets a JWT that is good for nothing any more. Callers hold mu.
func (s *issuing) bury(i *issued) {
	delete(s.byID, i.claims.ID)
	delete(i.list.live, i.bit)
	i.list.dead.Set(i.bit)
}

// good says whether a JWT would be accepted now: its session has the opaque token that stands for it, and the boot clock
// has not passed its end. No wall clock counts.
func (s *issuing) good(i *issued) bool {
	return s.boottime() < i.ends && s.tokens.holds(i.h, i.m.d)
}

// find returns what is known of a JWT that this issuer has signed and that has not expired long ago.
func (s *issuing) find(token string) (*issued, error) {
	claims, err := s.keys().ReadAccess(token)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.byID[claims.ID]
	if i == nil || i.claims != claims {
		return nil, errors.New("it has expired, or was made before credd started")
	}
	return i, nil
}

// statusList returns the signed list of that id as it is now.
func (s *issuing) statusList(id string) (token string, ok bool, err error) {
	next := madeList{changes: s.tokens.changes.Load(), until: s.boottime() + listFor} // before anything is looked at
	s.mu.Lock()
	n := slices.IndexFunc(s.lists, func(l *statusList) bool { return l.id == id })
	if n < 0 {
		s.mu.Unlock()
		return "", false, nil
	}
	l := s.lists[n]
	if l.made.token != "" && l.made.changes == next.changes && s.boottime() < l.made.until {
		defer s.mu.Unlock()
		return l.made.token, true, nil
	}
	bits, live := slices.Clone(l.dead), slices.Collect(maps.Values(l.live))
	s.mu.Unlock()
	for _, i := range live { // not under one lock: a revocation must not wait for it
		if s.good(i) {
			next.until = min(next.until, i.ends)
		} else {
			bits.Set(i.bit)
		}
	}
	now := s.walltime().Unix()
	next.token, err = s.keys().StatusList(issuer.StatusClaims{
		Issuer: s.cfg.URL, Subject: l.uri, IssuedAt: now, Expires: now + listExpires, TTL: listTTL,
	}, bits)
	if err != nil {
		return "", true, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l.made = next
	return next.token, true, nil
}

// listFor is how long a list is handed out again where nothing changes.
const listFor = time.Second

// Seconds that a status list is good for, and that it may be kept by those who can wait.
const (
	listExpires = 60
	listTTL     = 10
)

// rotate makes the next key sign.
func (s *issuing) rotate() (current string, err error) {
	now := s.boottime()
	return s.keys().Rotate(s.walltime(), now, now+s.cfg.Lifetime+overlap, s.keep)
}

// live is how many JWTs have not expired.
func (s *issuing) live() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sweep(s.boottime())
	return len(s.byID)
}
