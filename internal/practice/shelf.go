package practice

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
)

// Names of the shelf: one server, so that what differs between them is only what a card says.
const (
	NameRegistry = "registry.vendor.test"
	NameMirror   = "mirror.vendor.test"
	NameGit      = "git.vendor.test"
)

func shelfNames() []string { return []string{NameRegistry, NameMirror, NameGit} }

// Shelf is the server at registry, mirror and git.vendor.test, over HTTP and HTTPS, HTTP/1.1 and 2. It
// has what ordinary clients fetch; package registries and repositories are put on it by whoever needs them.
//
//	GET  /hello.txt     a short text
//	GET  /proto         the protocol that arrived, such as HTTP/2.0
//	GET  /bytes/{n}     n zero bytes
//	GET  /events/{n}    server-sent events 1 to n, flushed one by one; 0 sends one and never ends
//	POST /upload        reads the body, answers its length
//	GET  /redirect      to https://evil.test/
type Shelf struct {
	mux *http.ServeMux

	mu   sync.Mutex
	seen []Served // guarded by mu; the first keepQueries
}

// Served is one request that reached the shelf.
type Served struct {
	Method, Host, Path, Proto, Agent string
	TLS                              bool
}

// Handle puts a handler on the shelf. The pattern is http.ServeMux's, and must be new.
func (s *Shelf) Handle(pattern string, h http.Handler) { s.mux.Handle(pattern, h) }

// Served returns what was asked for, in order, up to the first few thousand.
func (s *Shelf) Served() []Served {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Served(nil), s.seen...)
}

func (n *Internet) startShelf() error {
	s := &Shelf{mux: http.NewServeMux()}
	n.Shelf = s
	s.mux.HandleFunc("GET /hello.txt", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "hello from %s\n", r.Host)
	})
	s.mux.HandleFunc("GET /proto", func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.Proto+"\n")
	})
	s.mux.HandleFunc("GET /bytes/{n}", sendBytes)
	s.mux.HandleFunc("GET /events/{n}", sendEvents)
	s.mux.HandleFunc("POST /upload", func(w http.ResponseWriter, r *http.Request) {
		size, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%d\n", size)
	})
	s.mux.Handle("GET /redirect", http.RedirectHandler("https://"+NameEvil+"/", http.StatusFound))
	for _, name := range shelfNames() {
		n.DNS.SetHost(name, n.ShelfAddr())
	}
	return errors.Join(n.serveHTTP(n.ShelfAddr(), 80, "", s), n.serveShelfTLS(s))
}

// ShelfAddr is where the shelf listens.
func (n *Internet) ShelfAddr() netip.Addr { return addr(n.inst, 9) }

// serveShelfTLS serves all names, each with its own certificate.
func (n *Internet) serveShelfTLS(s *Shelf) error {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}}
	for _, name := range shelfNames() {
		one, err := n.ca.serverTLS(name)
		if err != nil {
			return err
		}
		cfg.Certificates = append(cfg.Certificates, one.Certificates...) // the hello's server name picks one
	}
	return n.serveTLS(n.ShelfAddr(), 443, cfg, s)
}

// ServeHTTP implements http.Handler.
func (s *Shelf) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	if len(s.seen) < keepQueries {
		s.seen = append(s.seen, Served{Method: r.Method, Host: r.Host, Path: r.URL.Path, Proto: r.Proto, Agent: r.UserAgent(), TLS: r.TLS != nil})
	}
	s.mu.Unlock()
	s.mux.ServeHTTP(w, r)
}

// sendEvents sends n server-sent events and, where n is 0, one event after which it waits for the client to go.
func sendEvents(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.Atoi(r.PathValue("n"))
	if err != nil || n < 0 || n > 1000 {
		http.Error(w, "want a number of events up to 1000", http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	for i := range max(n, 1) {
		fmt.Fprintf(w, "data: %d\n\n", i+1)
		if out.Flush() != nil {
			return
		}
	}
	if n == 0 {
		<-r.Context().Done()
	}
}
