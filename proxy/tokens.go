package proxy

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/tokenshape"
	"tagout/internal/wire"
)

// secret is what a token stood for, for the length of one request.
type secret struct{ name, value string }

func secretNames(all []secret) string {
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.name
	}
	return strings.Join(names, ",")
}

// Places of a request in which no token is ever swapped, as credd is told of them.
const (
	inPath   = "path"
	inName   = "a name" // of a field, a parameter, a cookie
	inFollow = "trailer"
	inHost   = "host"
	inTunnel = "tunnel"
)

// swap puts secrets in the place of one request's tokens. credd is asked for every token in every place of every
// request; any other answer than a value refuses the request.
type swap struct {
	x       *exchange
	r       *http.Request
	known   map[shown]wire.ResolveReply
	aws     *awsScope // the request is to be signed; nil where it is not
	body    []byte    // of the request, where it was read whole
	whole   bool      // body is all of it
	changed bool      // body is not what the kid sent
}

// maxShown is in how many places a request may show tokens: credd is asked for each.
const maxShown = 16

// shown is a token in a place.
type shown struct {
	token string
	at    wire.Presentation
}

// swapTokens puts secrets in the place of the tokens in r, and refuses tokens that stand where none belongs.
func (x *exchange) swapTokens(r *http.Request) *refusal {
	s := &swap{x: x, r: r}
	for _, step := range []func() *refusal{s.strays, s.findAWS, s.query, s.fields, s.guardBody, s.signAWS} {
		if why := step(); why != nil {
			return why
		}
	}
	if len(x.swapped) > 0 {
		r.Header.Del("Accept-Encoding") // what comes back must be readable to be masked
	}
	return nil
}

// text puts secrets in the place of the tokens in a text that stood at a place of the request.
func (s *swap) text(text string, at wire.Presentation) (string, *refusal) {
	i := tokenshape.Next(text, 0)
	if i < 0 {
		return text, nil
	}
	var out strings.Builder
	from := 0
	for ; i >= 0; i = tokenshape.Next(text, from) {
		reply, why := s.ask(lowerASCII(text[i:i+tokenshape.Len]), at)
		if why != nil {
			return "", why
		}
		out.WriteString(text[from:i])
		out.WriteString(reply.Value)
		from = i + tokenshape.Len
	}
	out.WriteString(text[from:])
	return out.String(), nil
}

// ask asks credd what a token stands for, shown at that place of the request.
func (s *swap) ask(token string, at wire.Presentation) (wire.ResolveReply, *refusal) {
	key := shown{token, at}
	if reply, ok := s.known[key]; ok {
		return reply, nil
	}
	if len(s.known) == maxShown {
		return wire.ResolveReply{}, &refusal{reason.Capacity, "tokens in more than " + strconv.Itoa(maxShown) + " places of one request", s.x.rule}
	}
	reply, why := s.x.resolve(token, at)
	if why != nil {
		return wire.ResolveReply{}, why
	}
	if s.known == nil {
		s.known = map[shown]wire.ResolveReply{}
		s.r.Header = s.r.Header.Clone() // the HTTP server keeps the kid's request until the next one comes
	}
	s.known[key] = reply
	s.x.swapped = append(s.x.swapped, secret{reply.Secret, reply.Value})
	return reply, nil
}

// resolve asks credd what a token stands for towards the exchange's target, shown at that place.
func (x *exchange) resolve(token string, at wire.Presentation) (wire.ResolveReply, *refusal) {
	if x.rule.Credential == "" {
		return wire.ResolveReply{}, x.stray(token, at, "the rule for "+x.rule.Host+" names no credential")
	}
	reply, err := x.askFor(token, at, false)
	if err != nil {
		return wire.ResolveReply{}, x.tokenRefusal(err)
	}
	switch {
	case reply.Secret != x.rule.Credential:
		return wire.ResolveReply{}, &refusal{reason.TokenScope, "the token is for " + reply.Secret + ", the rule names " + x.rule.Credential, x.rule}
	case reply.Value == "" || strings.ContainsFunc(reply.Value, func(r rune) bool { return r < 0x20 || r == 0x7f }):
		return wire.ResolveReply{}, &refusal{reason.Internal, "the value of " + reply.Secret + " cannot stand in a request", x.rule}
	}
	return reply, nil
}

// askFor asks credd about a token that was shown to the exchange's target. none says that no credential belongs
// there: then credd writes the attempt down, and refuses it in any case.
func (x *exchange) askFor(token string, at wire.Presentation, none bool) (wire.ResolveReply, error) {
	return x.c.inquire(x.target, wire.ResolveRequest{Token: token, None: none, Method: x.head.method, Path: x.path, Place: at})
}

func (c *conn) inquire(t target, req wire.ResolveRequest) (wire.ResolveReply, error) {
	ctx, cancel := context.WithTimeout(c.ctx, c.p.cfg.Limits.Tokens)
	defer cancel()
	req.Mark, req.Host, req.Port = c.sess.doc.Mark, t.name, t.port
	return c.p.cfg.Tokens.Resolve(ctx, req)
}

// strayName refuses a destination, of a connection that nobody looks into, that is named with a token; nil where it is not.
func (c *conn) strayName(name string, rule *policy.Rule) *refusal {
	return c.strayText(name, inHost, "a token in a name", rule)
}

// strayText refuses a token in what was seen of a connection that nobody looks into; nil where there is none.
func (c *conn) strayText(text, where, detail string, rule *policy.Rule) *refusal {
	token := tokenshape.First(text)
	if token == "" {
		return nil
	}
	_, err := c.inquire(c.aimedAt(), wire.ResolveRequest{Token: token, None: true, Place: wire.Presentation{As: where}})
	why := strayRefusal(err, detail, rule)
	return &why
}

// stray refuses a token that stands where none is swapped, whatever credd says. credd hears of it, and tells what it
// was: a canary's, one that a stop took, or nobody's.
func (x *exchange) stray(token string, at wire.Presentation, detail string) *refusal {
	_, err := x.askFor(token, at, true)
	why := strayRefusal(err, detail, x.rule)
	return &why
}

func strayRefusal(err error, detail string, rule *policy.Rule) refusal {
	var ce *control.Error
	if errors.As(err, &ce) {
		switch ce.Problem.Reason {
		case reason.Canary, reason.Tagged, reason.Stopped, reason.TokenUnknown:
			return refusal{ce.Problem.Reason, detail + ": " + ce.Problem.Detail, rule}
		}
	}
	return refusal{reason.TokenScope, detail, rule}
}

func (x *exchange) tokenRefusal(err error) *refusal {
	var ce *control.Error
	if errors.As(err, &ce) {
		switch ce.Problem.Reason {
		case reason.TokenUnknown, reason.TokenScope, reason.Canary, reason.Tagged, reason.Stopped:
			return &refusal{ce.Problem.Reason, ce.Problem.Detail, x.rule}
		}
	}
	return &refusal{reason.CreddDown, oneLine(err), x.rule}
}
