package execsocket

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Times. What a caller on this machine does not do in time the kernel knows better: it says when the caller is gone.
const (
	firstLimit = 10 * time.Second // for the first message
	lastLimit  = 5 * time.Second  // for saying why it is over
	pingEvery  = 15 * time.Second
	pongLimit  = 45 * time.Second // a caller from elsewhere who answers nothing for so long is gone
)

// maxInput bounds a message with input: base64 and its JSON around it.
const maxInput = wire.ExecMaxPiece*4/3 + 1024

// SameOrigin says whether no browser sent the request, or one that shows a page of the same address. Browsers let any
// page open a WebSocket anywhere, and add their user's certificate to it; they say truly which page asks.
func SameOrigin(r *http.Request) bool {
	origin := r.Header.Get("Origin")
	if len(r.Header.Values("Origin")) == 0 {
		return true
	}
	scheme := "http://"
	if r.TLS != nil {
		scheme = "https://"
	}
	return r.Host != "" && strings.EqualFold(origin, scheme+r.Host)
}

// Config says how a socket is served.
type Config struct {
	Origin func(*http.Request) bool // whether the page that asks may; SameOrigin, but in tests
	Ending <-chan struct{}          // closed when the daemon ends
	Remote bool                     // the caller is on another machine, for all that is known
	Counts func() error             // asked now and then: why the caller may go on no more; nil: it may

	every, patience time.Duration // pingEvery and pongLimit, but in tests
}

// Server is the daemon's end. Its owner calls Accept, then First where the caller has something to say first, Follow,
// any number of Send, and End.
type Server struct {
	cfg   Config
	ws    *websocket.Conn
	inbox *inbox
	input chan wire.ExecInput

	ctx    context.Context // the caller's interest
	leave  context.CancelCauseFunc
	io     context.Context // the connection
	broken context.CancelFunc
	work   sync.WaitGroup

	why atomic.Pointer[wire.Problem] // why the caller is left; nothing else is sent any more
}

// Accept makes the connection a WebSocket. Where it does not, it has answered.
func Accept(w http.ResponseWriter, r *http.Request, cfg Config) (*Server, bool) {
	switch {
	case !has(r.Header, "Connection", "upgrade") || !has(r.Header, "Upgrade", "websocket"):
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", "websocket")
		control.Refuse(w, http.StatusUpgradeRequired, reason.Malformed, "this route is a WebSocket: ask for one (RFC 6455) with the sub-protocol "+wire.ExecProtocol)
		return nil, false
	case !cfg.Origin(r):
		control.Refuse(w, http.StatusForbidden, reason.CrossOrigin, "a web page of another address asks")
		return nil, false
	case !has(r.Header, "Sec-WebSocket-Protocol", wire.ExecProtocol):
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, "the sub-protocol spoken here is "+wire.ExecProtocol)
		return nil, false
	}
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{wire.ExecProtocol}, InsecureSkipVerify: true}) // the origin is settled above
	if err != nil {
		return nil, false
	}
	cfg.every, cfg.patience = cmp.Or(cfg.every, pingEvery), cmp.Or(cfg.patience, pongLimit)
	s := &Server{cfg: cfg, ws: ws, inbox: newInbox(), input: make(chan wire.ExecInput)}
	s.io, s.broken = context.WithCancel(context.WithoutCancel(r.Context())) // which ends with the handler, not with a connection that was taken over
	s.ctx, s.leave = context.WithCancelCause(s.io)
	return s, true
}

// has says whether the header lists the token.
func has(h http.Header, name, token string) bool {
	for _, line := range h.Values(name) {
		for one := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(one), token) {
				return true
			}
		}
	}
	return false
}

// Context ends when the caller is gone, leaves or is left.
func (s *Server) Context() context.Context { return s.ctx }

// Input is what the caller sends for the command.
func (s *Server) Input() <-chan wire.ExecInput { return s.input }

// First reads the caller's first message, strictly. When it fails only End is left.
func (s *Server) First(v any, most int64) error {
	ctx, cancel := context.WithTimeout(s.io, firstLimit)
	defer cancel()
	s.ws.SetReadLimit(most)
	kind, raw, err := s.ws.Read(ctx)
	if err != nil {
		s.broken()
		return fmt.Errorf("reading the first message: %w", err)
	}
	if err := text(kind); err != nil {
		return s.refuse(err)
	}
	if err := decode(raw, v); err != nil {
		return s.refuse(err)
	}
	return nil
}

func text(kind websocket.MessageType) error {
	if kind != websocket.MessageText {
		return errors.New("a binary message: send JSON, as text")
	}
	return nil
}

// refuse leaves a caller who does not keep to the protocol.
func (s *Server) refuse(err error) error {
	s.give(http.StatusBadRequest, reason.Malformed, "reading a message: "+err.Error())
	return err
}

func (s *Server) give(status int, code reason.Code, detail string) {
	s.why.CompareAndSwap(nil, &wire.Problem{Title: http.StatusText(status), Status: status, Detail: detail, Reason: code})
	s.leave(errors.New(detail))
}

// Follow begins to read what the caller sends. resize and detach are called one at a time.
func (s *Server) Follow(resize func(wire.TermSize), detach func()) {
	s.ws.SetReadLimit(maxInput)
	s.work.Go(func() { s.read(resize, detach) })
	s.work.Go(func() {
		s.inbox.handOver(s.ctx, s.input, func(n int) { s.Send(wire.ExecFrame{Taken: n}) }) // a caller who is gone needs no word
	})
	s.work.Go(s.watch)
}

// read follows the caller until it is gone, or left.
func (s *Server) read(resize func(wire.TermSize), detach func()) {
	for {
		kind, raw, err := s.ws.Read(s.io)
		if err != nil {
			s.leave(err)
			s.broken() // nobody reads any more
			return
		}
		if s.ctx.Err() != nil {
			continue // only to its end
		}
		if err := text(kind); err != nil {
			s.refuse(err) // it is told by End
			continue
		}
		in, err := DecodeInput(raw)
		switch {
		case err != nil:
			s.refuse(err) // as above
		case in.Resize != nil:
			resize(*in.Resize)
		case in.Detach:
			detach()
		default:
			if err := s.inbox.put(in); err != nil {
				s.refuse(err) // as above
			}
		}
	}
}

// watch leaves a caller who is silent or counts no more, and everybody when the daemon ends.
func (s *Server) watch() {
	beat := time.NewTicker(s.cfg.every)
	defer beat.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.cfg.Ending:
			s.give(http.StatusServiceUnavailable, reason.Internal, "sandboxd ends: try again when it is back")
			return
		case <-beat.C:
		}
		if s.cfg.Counts != nil {
			if err := s.cfg.Counts(); err != nil {
				s.give(http.StatusUnauthorized, reason.Unauthenticated, err.Error())
				return
			}
		}
		if s.cfg.Remote && !s.answers() {
			s.leave(errors.New("the caller answered no ping"))
			s.broken()
			return
		}
	}
}

func (s *Server) answers() bool {
	ctx, cancel := context.WithTimeout(s.ctx, s.cfg.patience)
	defer cancel()
	err := s.ws.Ping(ctx)
	return err == nil || s.ctx.Err() != nil
}

// Send sends one frame. It waits for the caller to take it. Safe for concurrent use.
func (s *Server) Send(f wire.ExecFrame) error {
	if s.why.Load() != nil {
		return errors.New("the caller is left")
	}
	return s.write(s.io, f)
}

func (s *Server) write(ctx context.Context, f wire.ExecFrame) error {
	raw, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("sending a frame: %w", err)
	}
	return s.ws.Write(ctx, websocket.MessageText, raw)
}

// End says why it is over, where p is not nil or the caller is left, and closes the connection.
func (s *Server) End(p *wire.Problem) {
	s.leave(nil)
	if why := s.why.Load(); why != nil {
		p = why
	}
	code := websocket.StatusNormalClosure
	if p != nil {
		code = websocket.StatusPolicyViolation
		if p.Status >= http.StatusInternalServerError {
			code = websocket.StatusGoingAway
		}
		ctx, cancel := context.WithTimeout(s.io, lastLimit)
		s.write(ctx, wire.ExecFrame{Problem: p}) // one who does not listen learns it from the code
		cancel()
	}
	s.ws.Close(code, "") // gone is gone
	s.broken()
	s.work.Wait()
}
