package practice

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"

	"tagout/tokencheck"
)

// What BooksAudience's tokens let do.
const (
	BooksAudience = "https://" + NameBooks
	ScopeRead     = "books:read"
	ScopeWrite    = "books:write"
)

// Books is a service of the user's own at https://books.own.test, and an example of how one accepts the JWTs that credd
// mints: it checks each with package tokencheck and asks credd at every use whether it is active.
//
//	GET  /books  200 and who asks, with the scope books:read
//	POST /books  200, with the scope books:write
//	GET  /debug  200 and the request as it came, token and all, as careless services have it
type Books struct {
	// Uses counts requests by presenter.
	Uses Ledger

	mu   sync.Mutex
	last string // guarded by mu
}

// Who is the answer of GET /books: what the service learned from the token.
type Who struct {
	Subject string   `json:"sub"`
	Kid     string   `json:"kid"`
	Scopes  []string `json:"scopes"`
}

func (n *Internet) startBooks(creddSocket string) error {
	client := tokencheck.OverUnix(creddSocket)
	n.undo = append(n.undo, func() error { client.CloseIdleConnections(); return nil })
	checker, err := tokencheck.New(tokencheck.Config{Issuer: IssuerURL, Audience: BooksAudience, Client: client})
	if err != nil {
		return err
	}
	b := &Books{}
	n.Books = b
	mux := http.NewServeMux()
	mux.Handle("GET /books", checker.Require(ScopeRead)(http.HandlerFunc(b.list)))
	mux.Handle("POST /books", checker.Require(ScopeWrite)(http.HandlerFunc(b.add)))
	mux.HandleFunc("GET /debug", debug)
	return n.serveHTTP(n.BooksAddr(), 443, NameBooks, b.watched(mux))
}

// LastToken is the bearer token that arrived last, whatever became of it.
func (b *Books) LastToken() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.last
}

func (b *Books) watched(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		b.last = credential(r)
		b.mu.Unlock()
		seen := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		next.ServeHTTP(seen, r)
		b.Uses.note(r.Header.Get(HeaderPresenter), seen.status == http.StatusOK)
	})
}

// statusWriter remembers the status.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

func (b *Books) list(w http.ResponseWriter, r *http.Request) {
	claims, _ := tokencheck.FromContext(r.Context()) // Require put them there
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(Who{Subject: claims.Subject, Kid: claims.Kid, Scopes: claims.Scopes}) // the client is gone
}

func debug(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Debug", r.Header.Get("Authorization"))
	json.NewEncoder(w).Encode(r.Header) // the client is gone
}

func (b *Books) add(w http.ResponseWriter, r *http.Request) {
	n, _ := io.Copy(io.Discard, r.Body) // what arrived is what counts
	fmt.Fprintf(w, "%d bytes\n", n)     // the client is gone
}
