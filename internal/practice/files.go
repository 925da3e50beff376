package practice

import (
	"io"
	"net/http"
	"strconv"
	"sync"
)

// maxFile bounds what /bytes/{n} sends.
const maxFile = 1 << 30

// Files is the plain HTTP server at http://files.vendor.test.
//
//	GET  /hello.txt   a short text
//	GET  /bytes/{n}   n zero bytes
//	POST /upload      reads the body, answers its length
type Files struct {
	mu       sync.Mutex
	requests map[string]int // guarded by mu; Host header -> requests
	uploaded int64          // guarded by mu
}

func (n *Internet) startFiles() error {
	f := &Files{requests: map[string]int{}}
	n.Files = f
	mux := http.NewServeMux()
	mux.HandleFunc("GET /hello.txt", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "hello from "+NameFiles+"\n") // the client is gone
	})
	mux.HandleFunc("GET /bytes/{n}", sendBytes)
	mux.HandleFunc("POST /upload", f.upload)
	return n.serveHTTP(n.FilesAddr(), 80, "", f.counted(mux))
}

// Requests returns how many requests came with each Host header.
func (f *Files) Requests() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make(map[string]int, len(f.requests))
	for host, n := range f.requests {
		out[host] = n
	}
	return out
}

// Uploaded is how many body bytes arrived at /upload.
func (f *Files) Uploaded() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.uploaded
}

func (f *Files) counted(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		f.requests[r.Host]++
		f.mu.Unlock()
		next.ServeHTTP(w, r)
	})
}

func (f *Files) upload(w http.ResponseWriter, r *http.Request) {
	n, _ := io.Copy(io.Discard, r.Body) // what arrived is what counts
	f.mu.Lock()
	f.uploaded += n
	f.mu.Unlock()
	io.WriteString(w, strconv.FormatInt(n, 10)+"\n") // the client is gone
}

func sendBytes(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
	if err != nil || n < 0 || n > maxFile {
		http.Error(w, "want a number of bytes up to 1 GiB", http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
	io.CopyN(w, zeros{}, n) // the client is gone
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
