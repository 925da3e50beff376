package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/sandboxd/once"
)

// keyHeader carries a request's key (draft-ietf-httpapi-idempotency-key-header).
const keyHeader = "Idempotency-Key"

func statusText(status int) string { return strconv.Itoa(status) }

type originKey struct{}

// originOf stands for the caller and the key of a request with an Idempotency-Key; "" where it has none.
func originOf(ctx context.Context) string {
	id, _ := ctx.Value(originKey{}).(string)
	return id
}

// once carries a POST with an Idempotency-Key out once. Only what took effect is remembered: a refusal made nothing,
// and whoever repeats it is asked to be judged anew.
func (s *server) once(r route) middleware {
	return func(ctx huma.Context, next func(huma.Context)) {
		req, w := humago.Unwrap(ctx)
		key := req.Header.Get(keyHeader)
		if r.method != http.MethodPost || len(req.Header.Values(keyHeader)) == 0 || s.keys == nil {
			next(ctx)
			return
		}
		body, err := s.reread(req)
		if err != nil {
			control.Refuse(w, http.StatusBadRequest, reason.Malformed, "reading the request: "+err.Error())
			return
		}
		print := once.Print([]byte(req.Method), []byte(req.URL.Path), []byte(req.URL.RawQuery), body)
		ticket, answer, err := s.keys.Begin(req.Context(), CallerOf(req.Context()).Name, key, print, r.resumes)
		switch {
		case err != nil:
			refuseKey(w, err)
		case answer != nil:
			repeat(w, answer)
		default:
			s.carryOut(ctx, ticket, next)
		}
	}
}

// carryOut keeps what the handler answers. When the handler panics the outcome is not known.
func (s *server) carryOut(ctx huma.Context, t *once.Ticket, next func(huma.Context)) {
	req, w := humago.Unwrap(ctx)
	rec := &recorder{ResponseWriter: w}
	over := false
	defer func() {
		if !over {
			t.Keep(once.Answer{Lost: true}) // the panic is what is told
		}
	}()
	next(humago.NewContext(ctx.Operation(), req.WithContext(context.WithValue(req.Context(), originKey{}, t.ID)), rec))
	over = true
	if rec.status == 0 {
		rec.status = http.StatusOK
	}
	if rec.status >= http.StatusBadRequest {
		t.Forget()
		return
	}
	a := once.Answer{Status: rec.status, Body: rec.body, Lost: rec.long, Header: map[string]string{"Content-Type": rec.Header().Get("Content-Type")}}
	if err := t.Keep(a); err != nil {
		s.log.Error("a repeat of this request will be refused", "error", err)
	}
}

// reread returns the body, which buffer has read already, and leaves it to be read again.
func (s *server) reread(r *http.Request) ([]byte, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return nil, nil
	}
	seeker, ok := r.Body.(interface{ Bytes() []byte })
	if !ok {
		return nil, errors.New("a request whose body is a stream takes no Idempotency-Key")
	}
	return seeker.Bytes(), nil
}

// wholeBody is a request's body in memory.
type wholeBody struct {
	io.Reader
	raw []byte
}

func (b *wholeBody) Bytes() []byte { return b.raw }
func (b *wholeBody) Close() error  { return nil }

func refuseKey(w http.ResponseWriter, err error) {
	status, code := http.StatusConflict, reason.Internal
	switch {
	case errors.Is(err, once.ErrKey):
		status, code = http.StatusBadRequest, reason.Malformed
	case errors.Is(err, once.ErrOther):
		code = reason.KeyReused
	case errors.Is(err, once.ErrBusy):
		w.Header().Set("Retry-After", "1")
		code = reason.KeyBusy
	case errors.Is(err, once.ErrUnknown):
		code = reason.KeyUnknown
	case errors.Is(err, once.ErrFull):
		status, code = http.StatusTooManyRequests, reason.Capacity
	default:
		status = http.StatusInsufficientStorage
	}
	control.Refuse(w, status, code, keyHeader+": "+err.Error())
}

// repeatedHeader marks an answer that was given before.
const repeatedHeader = "Idempotent-Replayed"

func repeat(w http.ResponseWriter, a *once.Answer) {
	if a.Lost {
		control.Refuse(w, http.StatusConflict, reason.KeyUnknown, "the request with this key was carried out, and its answer was too long to be kept")
		return
	}
	for name, value := range a.Header {
		if value != "" {
			w.Header().Set(name, value)
		}
	}
	w.Header().Set(repeatedHeader, "true")
	w.WriteHeader(a.Status)
	w.Write(a.Body) // the peer is gone: nothing to do
}

// recorder passes an answer on and keeps its beginning.
type recorder struct {
	http.ResponseWriter
	status int
	body   []byte
	long   bool
}

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 && status >= http.StatusOK {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	if len(r.body)+len(p) > once.MaxBody {
		r.body, r.long = nil, true
	}
	if !r.long {
		r.body = append(r.body, p...)
	}
	return r.ResponseWriter.Write(p)
}

// recorderOf finds what keeps the answer for repeats; nil: nothing does.
func recorderOf(w http.ResponseWriter) *recorder {
	for {
		if r, ok := w.(*recorder); ok {
			return r
		}
		u, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return nil
		}
		w = u.Unwrap()
	}
}

// disown has an answer that has begun counted as a refusal: what it is about did not take effect, and a repeat of the request
// is carried out anew.
func disown(w http.ResponseWriter) {
	if r := recorderOf(w); r != nil {
		r.status = http.StatusInternalServerError
	}
}

// keepFromHere has repeats answered with what follows alone.
func keepFromHere(w http.ResponseWriter) {
	if r := recorderOf(w); r != nil {
		r.body, r.long = nil, false
	}
}

// Unwrap lets http.ResponseController flush and set deadlines.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }
