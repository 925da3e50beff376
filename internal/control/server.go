// Package control is how the daemons talk: HTTP with JSON over unix sockets, each request judged by the
// credentials that the kernel reports for the peer (SO_PEERCRED, unix(7)). A handler that no rule admits is
// refused; there is no default allow.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

// MaxBody bounds every request body.
const MaxBody = 4 << 20

// Peer is who is at the other end of a socket, as the kernel saw it when the connection was made.
type Peer struct {
	PID int32
	UID uint32
	GID uint32
}

type peerKey struct{}

// PeerOf returns the peer of the connection that carries ctx; ok is false outside a control server.
func PeerOf(ctx context.Context) (Peer, bool) {
	p, ok := ctx.Value(peerKey{}).(Peer)
	return p, ok
}

// Listen makes the unix socket at path, readable and writable for its owner and the group gid, replacing a
// socket that a dead predecessor left. A socket on which somebody still listens is an error. The directory
// must exist.
func Listen(path string, gid int) (net.Listener, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close() // only a probe
		return nil, fmt.Errorf("listening on %s: another process is serving it: stop that one first", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listening on %s: %w", path, err)
	}
	// Made closed and then opened: nobody can connect between bind and chmod.
	old := unix.Umask(0o177)
	l, err := net.Listen("unix", path)
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: is %s there and ours? %w", path, filepath.Dir(path), err)
	}
	if err := errors.Join(os.Chown(path, -1, gid), os.Chmod(path, 0o660)); err != nil { // the group is the instance's daemons
		l.Close() // already failing
		return nil, fmt.Errorf("opening %s to the instance's group: %w", path, err)
	}
	return l, nil
}

// Serve runs handler on l until ctx ends, then closes l, gives requests under way up to grace to finish and
// returns nil. Any other end is an error.
func Serve(ctx context.Context, l net.Listener, handler http.Handler, grace time.Duration) error {
	srv := &http.Server{
		Handler:           Bounded(handler),
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		ConnContext:       withPeer,
		ConnState:         noteState,
	}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(arrivalListener{l}) }()
	select {
	case err := <-done:
		return fmt.Errorf("serving %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	if err := srv.Shutdown(stop); err != nil {
		return srv.Close()
	}
	return nil
}

type wholeKey struct{}

// Bounded lets h read MaxBody bytes of a request's body.
func Bounded(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		whole := r.WithContext(context.WithValue(r.Context(), wholeKey{}, r.Body))
		whole.Body = http.MaxBytesReader(w, r.Body, MaxBody)
		h.ServeHTTP(w, whole)
	})
}

// WholeBody is the request's body without the bound, for handlers that have one of their own.
func WholeBody(r *http.Request) io.Reader {
	if body, ok := r.Context().Value(wholeKey{}).(io.Reader); ok {
		return body
	}
	return r.Body
}

func withPeer(ctx context.Context, c net.Conn) context.Context {
	if ac, ok := c.(*arrivalConn); ok {
		ctx, c = context.WithValue(ctx, arrivalKey{}, ac), ac.Conn
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return ctx
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || credErr != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, Peer{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid})
}

// Admit wraps h so that only peers with one of the uids reach it; everybody else, and a request whose peer
// is not known, gets 403.
func Admit(h http.HandlerFunc, uids ...int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		peer, ok := PeerOf(r.Context())
		if ok {
			for _, uid := range uids {
				if uint64(peer.UID) == uint64(uid) { // uids are not negative
					h(w, r)
					return
				}
			}
		}
		Refuse(w, http.StatusForbidden, reason.OK, fmt.Sprintf("uid %d may not do this", peer.UID))
	}
}

// Reply writes v as JSON with status 200.
func Reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v) // the peer is gone: nothing to do
}

// Refuse writes an RFC 9457 problem body.
func Refuse(w http.ResponseWriter, status int, code reason.Code, detail string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(wire.Problem{ // the peer is gone: nothing to do
		Title: http.StatusText(status), Status: status, Detail: detail, Reason: code,
	})
}

// Read decodes the request's JSON body into v, strictly: unknown fields and trailing bytes are errors. On
// an error it has already answered 400.
func Read(w http.ResponseWriter, r *http.Request, v any) bool {
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	err := dec.Decode(v)
	if err == nil && dec.More() {
		err = errors.New("more than one JSON value")
	}
	if err != nil {
		Refuse(w, http.StatusBadRequest, reason.Malformed, "reading the request: "+err.Error())
		return false
	}
	io.Copy(io.Discard, r.Body) // lets the connection be used again
	return true
}

// Stream writes a stream of JSON values, one a line, each flushed at once.
type Stream struct {
	w   http.ResponseWriter
	enc *json.Encoder
}

// NewStream starts an NDJSON answer with status 200.
func NewStream(w http.ResponseWriter) *Stream {
	w.Header().Set("Content-Type", "application/x-ndjson")
	return &Stream{w: w, enc: json.NewEncoder(w)}
}

// Send writes one value. Not safe for concurrent use.
func (s *Stream) Send(v any) error {
	if err := s.enc.Encode(v); err != nil {
		return fmt.Errorf("sending: %w", err)
	}
	return http.NewResponseController(s.w).Flush()
}
