package tokencheck_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/issuer"
	"tagout/tokencheck"
)

const audience = "https://books.own.test"

// world is an issuer that does what it is told, and a clock.
type world struct {
	t     testing.TB
	srv   *httptest.Server
	ring  *issuer.Ring
	clock atomic.Int64

	mu      sync.Mutex
	revoked map[int]bool
	lie     func(w http.ResponseWriter, r *http.Request) bool // answers in the issuer's place; nil: nobody does
	asked   map[string]int                                    // requests by path
	jti     map[string]string                                 // token -> id
	next    int
}

func newWorld(t testing.TB) *world { return newWorldOf(t, issuer.EdDSA) }

// newWorldOf has an issuer that signs with the algorithm.
func newWorldOf(t testing.TB, alg string) *world {
	w := &world{t: t, revoked: map[int]bool{}, asked: map[string]int{}, jti: map[string]string{}}
	w.clock.Store(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC).UnixNano())
	var err error
	if w.ring, err = issuer.NewRing(alg, w.now()); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/jwks.json", func(rw http.ResponseWriter, _ *http.Request) {
		raw, err := w.ring.Public()
		if err != nil {
			t.Error(err)
		}
		rw.Write(raw) // the asker is gone
	})
	mux.HandleFunc("POST /introspect", w.introspect)
	mux.HandleFunc("GET /statuslists/1", w.list)
	w.srv = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.asked[r.URL.Path]++
		lie := w.lie
		w.mu.Unlock()
		if lie == nil || !lie(rw, r) {
			mux.ServeHTTP(rw, r)
		}
	}))
	t.Cleanup(w.srv.Close)
	return w
}

func (w *world) now() time.Time       { return time.Unix(0, w.clock.Load()) }
func (w *world) pass(d time.Duration) { w.clock.Add(int64(d)) }

func (w *world) count(path string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.asked[path]
}

func (w *world) lying(lie func(rw http.ResponseWriter, r *http.Request) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lie = lie
}

func (w *world) introspect(rw http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Authorization") != "Bearer tgk_service" {
		rw.WriteHeader(http.StatusUnauthorized)
		return
	}
	token := r.PostFormValue("token")
	w.mu.Lock()
	defer w.mu.Unlock()
	id := w.jti[token]
	if id == "" || w.revoked[int(id[0])] {
		json.NewEncoder(rw).Encode(map[string]any{"active": false}) // the asker is gone
		return
	}
	json.NewEncoder(rw).Encode(map[string]any{"active": true, "jti": id}) // the asker is gone
}

func (w *world) list(rw http.ResponseWriter, _ *http.Request) {
	w.mu.Lock()
	bits := issuer.NewBits(1 << 10)
	for i := range w.revoked {
		bits.Set(i)
	}
	w.mu.Unlock()
	now := w.now().Unix()
	token, err := w.ring.StatusList(issuer.StatusClaims{Issuer: w.srv.URL, Subject: w.srv.URL + "/statuslists/1", IssuedAt: now, Expires: now + 60, TTL: 30}, bits)
	if err != nil {
		w.t.Error(err)
	}
	rw.Write([]byte(token)) // the asker is gone
}

// token returns a token and its bit.
func (w *world) token(change ...func(*issuer.Claims)) (string, int) {
	w.mu.Lock()
	w.next++
	bit := w.next
	w.mu.Unlock()
	now := w.now().Unix()
	c := issuer.Claims{
		Issuer: w.srv.URL, Subject: "spiffe://own.test/card/c/kid/k/session/S", Audience: audience, Scope: "books:read books:list", ID: string(rune(bit)) + "-id",
		IssuedAt: now, NotBefore: now, Expires: now + 300, Session: "S", Kid: "k", Card: "c",
		Status: issuer.Status{List: issuer.StatusRef{Index: bit, URI: w.srv.URL + "/statuslists/1"}},
	}
	for _, fn := range change {
		fn(&c)
	}
	token, err := w.ring.Access(c)
	if err != nil {
		w.t.Fatal(err)
	}
	w.mu.Lock()
	w.jti[token] = c.ID
	w.mu.Unlock()
	return token, bit
}

func (w *world) revoke(bit int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.revoked[bit] = true
}

func (w *world) checker(how tokencheck.How, stale time.Duration) *tokencheck.Checker {
	c, err := tokencheck.New(tokencheck.Config{Issuer: w.srv.URL, Audience: audience, How: how, Key: "tgk_service", MaxStale: stale, Now: w.now})
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

func (w *world) rotate() {
	w.t.Helper()
	if _, err := w.ring.Rotate(w.now(), 0, time.Hour, func([]byte) error { return nil }); err != nil {
		w.t.Fatal(err)
	}
}

func swap(token string, part int, with string) string {
	parts := strings.Split(token, ".")
	parts[part] = with
	return strings.Join(parts, ".")
}
