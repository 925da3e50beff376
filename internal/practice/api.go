package practice

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"time"
)

// Identity is the answer of GET /v1/whoami.
type Identity struct {
	Accepted bool   `json:"accepted"`
	SHA256   string `json:"credential_sha256"` // of the credential that arrived, hex; empty where none did
}

// API is the vendor's API at https://api.vendor.test.
//
//	GET /v1/hello   200, needs no credential
//	GET /v1/whoami  Identity: 200 where the credential is the real one, 401 otherwise
//	POST /v1/stream 200 when the body has ended; needs no credential
//
// The credential is read from "Authorization: Bearer …" or from X-Api-Key.
type API struct {
	// Uses counts /v1/whoami by presenter.
	Uses Ledger

	secret string

	mu   sync.Mutex
	last map[string]time.Duration // guarded by mu; presenter -> its last request of any kind, or byte of a stream
	raw  int                      // guarded by mu; requests that carried a kid's token unswapped

	streamed map[string]map[string]int64 // guarded by mu; presenter -> "HTTP/2.0" -> bytes of streams
}

func (n *Internet) startAPI() error {
	n.API = &API{secret: n.secret, last: map[string]time.Duration{}, streamed: map[string]map[string]int64{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/hello", func(w http.ResponseWriter, _ *http.Request) {
		w.Write([]byte("hello from " + NameAPI + "\n")) // the client is gone
	})
	mux.HandleFunc("GET /v1/whoami", n.API.whoami)
	mux.HandleFunc("POST /v1/stream", n.API.stream)
	return n.serveHTTP(n.APIAddr(), 443, NameAPI, n.API.watched(mux))
}

// LastRequest is when the presenter's last request of any kind, or the last byte of a stream, arrived; 0 where
// none did.
func (a *API) LastRequest(presenter string) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.last[presenter]
}

// TokensSeen is how many requests carried a kid's own token instead of the secret: each is a swap that failed
// to happen and was let out anyway.
func (a *API) TokensSeen() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.raw
}

// Streamed is how many bytes the presenter's streams brought over a protocol, as net/http names it.
func (a *API) Streamed(presenter, proto string) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.streamed[presenter][proto]
}

// stream takes a body for as long as it comes.
func (a *API) stream(w http.ResponseWriter, r *http.Request) {
	presenter := r.Header.Get(HeaderPresenter)
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Body.Read(buf)
		a.mu.Lock()
		if n > 0 { // an end is not an arrival: a cut shows as one
			a.last[presenter] = Now()
		}
		if a.streamed[presenter] == nil {
			a.streamed[presenter] = map[string]int64{}
		}
		a.streamed[presenter][r.Proto] += int64(n)
		a.mu.Unlock()
		if err != nil {
			break
		}
	}
	w.WriteHeader(http.StatusOK)
}

func (a *API) watched(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.mu.Lock()
		a.last[r.Header.Get(HeaderPresenter)] = Now()
		if strings.HasPrefix(credential(r), "tgo_") {
			a.raw++
		}
		a.mu.Unlock()
		next.ServeHTTP(w, r)
	})
}

func (a *API) whoami(w http.ResponseWriter, r *http.Request) {
	got := credential(r)
	id := Identity{Accepted: subtle.ConstantTimeCompare([]byte(got), []byte(a.secret)) == 1}
	if got != "" {
		id.SHA256 = Hash(got)
	}
	a.Uses.note(r.Header.Get(HeaderPresenter), id.Accepted)
	w.Header().Set("Content-Type", "application/json")
	if !id.Accepted {
		w.WriteHeader(http.StatusUnauthorized)
	}
	json.NewEncoder(w).Encode(id) // the client is gone
}

// Hash is the form in which the practice internet talks about credentials: SHA-256, hex.
func Hash(credential string) string {
	sum := sha256.Sum256([]byte(credential))
	return hex.EncodeToString(sum[:])
}

func credential(r *http.Request) string {
	if key := r.Header.Get("X-Api-Key"); key != "" {
		return key
	}
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		return ""
	}
	return token
}
