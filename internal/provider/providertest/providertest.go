// Package providertest has issuers to test with: each is written from the published documents of the real one, keeps
// what is valid in memory, and can be asked from outside whether a credential still is. They are no more than that
// part of the real thing that Tagout uses.
package providertest

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Fault takes a request's place: it returns true where it has answered, or has decided that nobody will.
type Fault func(w http.ResponseWriter, r *http.Request) bool

// base is what all issuers share.
type base struct {
	fault atomic.Pointer[Fault]
	calls atomic.Int64

	mu    sync.Mutex
	valid map[string]bool // credential -> whether the issuer still takes it; guarded by mu
}

// SetFault has every request go through f first; nil: none.
func (b *base) SetFault(f Fault) {
	if f == nil {
		b.fault.Store(nil)
		return
	}
	b.fault.Store(&f)
}

// Calls is how many requests have arrived.
func (b *base) Calls() int64 { return b.calls.Load() }

// Accepts says whether the issuer takes the credential now.
func (b *base) Accepts(credential string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.valid[credential]
}

// Live is how many credentials the issuer takes now.
func (b *base) Live() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, ok := range b.valid {
		if ok {
			n++
		}
	}
	return n
}

func (b *base) set(credential string, valid bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.valid == nil {
		b.valid = map[string]bool{}
	}
	b.valid[credential] = valid
}

// serve counts the request and lets the fault have it first.
func (b *base) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	b.calls.Add(1)
	if f := b.fault.Load(); f != nil && (*f)(w, r) {
		return
	}
	next.ServeHTTP(w, r)
}

// Hang is a Fault: the issuer takes the request and never answers, until the client gives up.
func Hang(_ http.ResponseWriter, r *http.Request) bool {
	io.Copy(io.Discard, r.Body) // net/http notices that the client is gone once the body is read
	<-r.Context().Done()
	return true
}

// Answer is a Fault that answers everything alike.
func Answer(status int, body string) Fault {
	return func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(status)
		w.Write([]byte(body)) // the client is gone
		return true
	}
}

// Lose is a Fault: what it lets through is carried out, and the answer never arrives.
func Lose(when func(*http.Request) bool, handler http.Handler) Fault {
	return func(_ http.ResponseWriter, r *http.Request) bool {
		if !when(r) {
			return false
		}
		handler.ServeHTTP(nowhere{http.Header{}}, r)
		panic(http.ErrAbortHandler) // the connection breaks
	}
}

type nowhere struct{ h http.Header }

func (n nowhere) Header() http.Header         { return n.h }
func (n nowhere) Write(p []byte) (int, error) { return len(p), nil }
func (n nowhere) WriteHeader(int)             {}

// random returns prefix and 40 hex digits.
func random(prefix string) string {
	raw := make([]byte, 20)
	rand.Read(raw) // never fails
	return prefix + hex.EncodeToString(raw)
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v) // the client is gone
}

func seconds(d time.Duration) int64 { return int64(d / time.Second) }
