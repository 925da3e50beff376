package proxy

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"regexp"
	"strings"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// tokenRE is the shape of a session's token.
var tokenRE = regexp.MustCompile(`tgo_[a-z2-7]{32}`)

// secret is what a token stood for, for the length of one request.
type secret struct{ name, value string }

func secretNames(all []secret) string {
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.name
	}
	return strings.Join(names, ",")
}

// swapTokens puts secrets in the place of the tokens in r's header fields. credd is asked for every token of
// every request; any other answer than a value refuses the request.
func (x *exchange) swapTokens(r *http.Request) *refusal {
	if why := x.canaries(r); why != nil {
		return why
	}
	known := map[string]string{}
	for name, values := range r.Header {
		for i, value := range values {
			swapped, why := x.swapValue(value, known)
			if why != nil {
				return why
			}
			r.Header[name][i] = swapped
		}
	}
	if len(x.swapped) > 0 {
		r.Header.Del("Accept-Encoding") // what comes back must be readable to be masked
	}
	return nil
}

func (x *exchange) swapValue(value string, known map[string]string) (string, *refusal) {
	if scheme, encoded, ok := strings.Cut(value, " "); ok && strings.EqualFold(scheme, "basic") {
		encoded = strings.TrimSpace(encoded)
		plain, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil {
			plain, err = base64.RawStdEncoding.DecodeString(encoded)
		}
		if err == nil && tokenRE.Match(plain) {
			swapped, why := x.swapText(string(plain), known)
			return scheme + " " + base64.StdEncoding.EncodeToString([]byte(swapped)), why
		}
	}
	return x.swapText(value, known)
}

func (x *exchange) swapText(text string, known map[string]string) (string, *refusal) {
	for _, token := range tokenRE.FindAllString(text, -1) {
		if _, ok := known[token]; !ok {
			s, why := x.resolve(token)
			if why != nil {
				return "", why
			}
			known[token] = s.value
			x.swapped = append(x.swapped, s)
		}
	}
	return tokenRE.ReplaceAllStringFunc(text, func(token string) string { return known[token] }), nil
}

// resolve asks credd what a token stands for towards the exchange's target.
func (x *exchange) resolve(token string) (secret, *refusal) {
	if x.rule.Credential == "" {
		if why := x.canary(token); why != nil {
			return secret{}, why
		}
		return secret{}, &refusal{reason.TokenScope, "the rule for " + x.rule.Host + " names no credential", x.rule}
	}
	reply, err := x.askFor(token, false)
	if err != nil {
		return secret{}, x.tokenRefusal(err)
	}
	x.c.p.cfg.Audit.AddSecret(reply.Value)
	switch {
	case reply.Secret != x.rule.Credential:
		return secret{}, &refusal{reason.TokenScope, "the token is for " + reply.Secret + ", the rule names " + x.rule.Credential, x.rule}
	case reply.Value == "" || strings.ContainsFunc(reply.Value, func(r rune) bool { return r < 0x20 || r == 0x7f }):
		return secret{}, &refusal{reason.Internal, "the value of " + reply.Secret + " cannot stand in a header", x.rule}
	}
	return secret{reply.Secret, reply.Value}, nil
}

// askFor asks credd about a token that was presented to the exchange's target. none says that no credential belongs
// there: then credd knows of the use, should the token be a canary, and refuses it in any case.
func (x *exchange) askFor(token string, none bool) (wire.ResolveReply, error) {
	p := x.c.p
	ctx, cancel := context.WithTimeout(x.c.ctx, p.cfg.Limits.Tokens)
	defer cancel()
	return p.cfg.Tokens.Resolve(ctx, wire.ResolveRequest{
		Mark: x.c.sess.doc.Mark, Token: token, Host: x.target.name, Port: x.target.port, None: none,
	})
}

// canaries refuses a request that carries a canary's token in its target. Other tokens there mean nothing to anybody,
// and go nowhere but where they were sent.
func (x *exchange) canaries(r *http.Request) *refusal {
	for _, token := range tokenRE.FindAllString(r.URL.RequestURI(), -1) {
		if why := x.canary(token); why != nil {
			return why
		}
	}
	return nil
}

// canary asks credd about a token where none belongs; nil where it is no canary's.
func (x *exchange) canary(token string) *refusal {
	var ce *control.Error
	if _, err := x.askFor(token, true); errors.As(err, &ce) && ce.Problem.Reason == reason.Canary {
		return x.tokenRefusal(err)
	}
	return nil
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
