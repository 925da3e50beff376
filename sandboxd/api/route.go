package api

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"reflect"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/sandboxd/once"
)

// route is one operation of the API.
type route struct {
	id      string // operationId
	method  string
	path    string
	summary string
	role    Role
	status  int  // of a success; 0: 200
	resumes bool // a POST that finds by itself what it made under an Idempotency-Key before the daemon died
}

// security names the role for OpenAPI: there is no other place in it for roles.
func (r route) operation() huma.Operation {
	status := r.status
	if status == 0 {
		status = http.StatusOK
	}
	roles, text := []string{string(r.role)}, string(r.role)
	if r.role == RoleAny {
		roles, text = []string{}, "any"
	}
	op := huma.Operation{
		OperationID: r.id, Method: r.method, Path: r.path, Summary: r.summary, Description: "Role: " + text + ".",
		DefaultStatus: status, MaxBodyBytes: control.MaxBody, BodyReadTimeout: -1, // read by buffer, below
		Security: []map[string][]string{{"key": roles}, {"certificate": roles}},
	}
	if r.method == http.MethodPost {
		op.Parameters = []*huma.Param{idempotencyKey()}
	}
	return op
}

func idempotencyKey() *huma.Param {
	one, most := 1, once.MaxKey
	return &huma.Param{Name: keyHeader, In: "header",
		Description: "Repeating a request with the same key is carried out once and answered the same, for 24 hours; the key with another request is refused with 409.",
		Schema:      &huma.Schema{Type: huma.TypeString, MinLength: &one, MaxLength: &most}}
}

// add serves a route whose request and answer are JSON.
func add[I, O any](s *server, r route, h func(context.Context, *I) (*O, error)) {
	op := r.operation()
	op.Middlewares = huma.Middlewares{s.admit(r), s.buffer, s.once(r)}
	huma.Register(s.api, op, h)
}

// stream serves a route whose answer is not one JSON document. in and out describe the bodies, nil: none.
type stream struct {
	in     any    // a value of the request's type, for JSON
	inType string // media type of a request that is not JSON
	out    any    // a value of the type of one line, event or answer; nil: bytes
	kind   string // media type of the answer
	params []*huma.Param
	raw    bool // the handler reads the body itself, however long it is

	extensions map[string]any // of the operation's description
}

// addStream serves a route with a plain handler.
func addStream(s *server, r route, st stream, h http.HandlerFunc) {
	op := r.operation()
	registry := s.api.OpenAPI().Components.Schemas
	op.Parameters = append(op.Parameters, st.params...)
	op.Extensions = st.extensions
	if st.in != nil {
		op.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{"application/json": {Schema: registry.Schema(reflect.TypeOf(st.in), true, r.id)}}}
	} else if st.inType != "" {
		op.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{st.inType: {Schema: bytesSchema()}}}
	}
	answer := &huma.Response{Description: http.StatusText(op.DefaultStatus)}
	switch {
	case st.kind == "":
	case st.out != nil:
		answer.Content = map[string]*huma.MediaType{st.kind: {Schema: registry.Schema(reflect.TypeOf(st.out), true, r.id)}}
	default:
		answer.Content = map[string]*huma.MediaType{st.kind: {Schema: bytesSchema()}}
	}
	problems := &huma.Response{Description: "Refused", Content: map[string]*huma.MediaType{"application/problem+json": {Schema: registry.Schema(reflect.TypeFor[Problem](), true, "")}}}
	op.Responses = map[string]*huma.Response{statusText(op.DefaultStatus): answer, "default": problems}
	s.api.OpenAPI().AddOperation(&op)
	chain := huma.Middlewares{s.admit(r)}
	if !st.raw {
		chain = append(chain, s.buffer)
	}
	chain = append(chain, s.once(r))
	s.api.Adapter().Handle(&op, chain.Handler(func(ctx huma.Context) {
		req, w := humago.Unwrap(ctx)
		h(w, req)
	}))
}

func bytesSchema() *huma.Schema { return &huma.Schema{Type: huma.TypeString, Format: "binary"} }

func pathParam(name, doc string) *huma.Param {
	return &huma.Param{Name: name, In: "path", Required: true, Description: doc, Schema: &huma.Schema{Type: huma.TypeString}}
}

// middleware is a step before a route's handler.
type middleware = func(ctx huma.Context, next func(huma.Context))

// admit lets callers with the route's role through.
func (s *server) admit(r route) middleware {
	return func(ctx huma.Context, next func(huma.Context)) {
		req, w := humago.Unwrap(ctx)
		noteKid(req)
		if c := CallerOf(ctx.Context()); !c.May(r.role) {
			refuseRole(w, c, r.role)
			return
		}
		next(ctx)
	}
}

// bodyLimit is how long a request's body may take.
const bodyLimit = 30 * time.Second

// buffer reads the body whole. The deadline is off again before the handler runs: a handler may take as long as it
// needs, and a deadline that passes meanwhile would look as if the caller had gone away.
func (s *server) buffer(ctx huma.Context, next func(huma.Context)) {
	r, w := humago.Unwrap(ctx)
	if r.Body == nil || r.Body == http.NoBody {
		next(ctx)
		return
	}
	conn := http.NewResponseController(w)
	conn.SetReadDeadline(time.Now().Add(bodyLimit)) // a connection without deadlines is a test's
	body, err := io.ReadAll(r.Body)
	conn.SetReadDeadline(time.Time{}) // as above
	var long *http.MaxBytesError
	switch {
	case errors.As(err, &long):
		control.Refuse(w, http.StatusRequestEntityTooLarge, reason.TooLarge, "the request's body is longer than can be taken")
		return
	case err != nil:
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, "reading the request: "+err.Error())
		return
	}
	noteCall(r, body)
	r.Body = &wholeBody{Reader: bytes.NewReader(body), raw: body}
	next(ctx)
}
