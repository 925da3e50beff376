package proxy

import (
	"encoding/base64"
	"net/http"
	"net/textproto"
	"net/url"
	"strings"

	"tagout/internal/reason"
	"tagout/internal/tokenshape"
	"tagout/internal/wire"
)

// strays refuses tokens in those parts of a request that name things: a token there goes to whoever logs them.
func (s *swap) strays() *refusal {
	for _, part := range [][2]string{
		{inPath, s.r.URL.Path}, {inPath, s.r.URL.EscapedPath()}, {inPath, s.x.head.target[:pathEnd(s.x.head.target)]},
	} {
		if why := s.stray(part[1], part[0]); why != nil {
			return why
		}
	}
	for name := range s.r.Header {
		if why := s.stray(name, inName); why != nil {
			return why
		}
	}
	for name := range s.r.Trailer {
		if why := s.stray(name, inName); why != nil {
			return why
		}
	}
	return nil
}

// pathEnd returns where the query of a request target begins.
func pathEnd(target string) int {
	if i := strings.IndexByte(target, '?'); i >= 0 {
		return i
	}
	return len(target)
}

// stray refuses a token in text, which stands where none is swapped.
func (s *swap) stray(text, where string) *refusal {
	if token := tokenshape.First(text); token != "" {
		return s.x.stray(token, wire.Presentation{As: where}, "a token in "+where+" of the request, where none is swapped")
	}
	return nil
}

// query swaps the tokens in the values of the query's parameters. The others stay byte for byte.
func (s *swap) query() *refusal {
	if why := s.stray(s.r.URL.Fragment, inPath); why != nil { // never sent, and never there
		return why
	}
	swapped, why := s.pairs(s.r.URL.RawQuery, wire.AsQuery)
	if why == nil {
		s.r.URL.RawQuery = swapped
	}
	return why
}

// pairs swaps tokens in the values of "name=value&…" (WHATWG URL, 5), which stand in a place of that kind.
func (s *swap) pairs(text, as string) (string, *refusal) {
	if !strings.Contains(text, "_") && !strings.Contains(text, "%") {
		return text, nil
	}
	pairs := strings.Split(text, "&")
	for i, pair := range pairs {
		rawName, rawValue, found := strings.Cut(pair, "=")
		name, value := unescape(rawName), unescape(rawValue)
		if why := s.stray(name, inName); why != nil {
			return "", why
		}
		if !found {
			continue
		}
		swapped, why := s.text(value, wire.Presentation{As: as, Name: name})
		if why != nil {
			return "", why
		}
		if swapped != value {
			pairs[i] = rawName + "=" + url.QueryEscape(swapped)
		}
	}
	return strings.Join(pairs, "&"), nil
}

// unescape decodes what can be decoded.
func unescape(raw string) string {
	if text, err := url.QueryUnescape(raw); err == nil {
		return text
	}
	return raw
}

// fields swaps the tokens in the values of header fields.
func (s *swap) fields() *refusal {
	for name, values := range s.r.Header {
		for i, value := range values {
			swapped, why := s.field(name, value)
			if why != nil {
				return why
			}
			if swapped != value {
				s.r.Header[name][i] = swapped
			}
		}
	}
	return nil
}

func (s *swap) field(name, value string) (string, *refusal) {
	switch textproto.CanonicalMIMEHeaderKey(name) {
	case "Authorization":
		scheme, _, _ := strings.Cut(value, " ")
		switch lowerASCII(scheme) {
		case "bearer":
			return s.text(value, wire.Presentation{As: wire.AsBearer})
		case "basic":
			return s.basic(scheme, value)
		}
	case "Cookie":
		return s.cookies(value)
	}
	return s.text(value, wire.Presentation{As: wire.AsHeader, Name: name})
}

// basic swaps the token in credentials after RFC 7617.
func (s *swap) basic(scheme, value string) (string, *refusal) {
	encoded := strings.TrimSpace(value[len(scheme):])
	plain, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		plain, err = base64.RawStdEncoding.DecodeString(encoded)
	}
	at := wire.Presentation{As: wire.AsBasic}
	token := tokenshape.First(plain)
	if err != nil || token == "" {
		return s.text(value, at)
	}
	reply, why := s.ask(token, at)
	if why != nil {
		return "", why
	}
	pair := reply.Present.User + ":" + reply.Value
	if reply.Present.As != wire.AsBasic || reply.Present.User == "" {
		if pair, why = s.text(string(plain), at); why != nil {
			return "", why
		}
	}
	return scheme + " " + base64.StdEncoding.EncodeToString([]byte(pair)), nil
}

// cookies swaps the tokens in the values of cookies (RFC 6265, 4.2.1).
func (s *swap) cookies(value string) (string, *refusal) {
	if tokenshape.Next(value, 0) < 0 {
		return value, nil
	}
	parts := strings.Split(value, ";")
	for i, part := range parts {
		name, value, _ := strings.Cut(part, "=")
		if why := s.stray(name, inName); why != nil {
			return "", why
		}
		swapped, why := s.text(value, wire.Presentation{As: wire.AsCookie, Name: strings.TrimSpace(name)})
		if why != nil {
			return "", why
		}
		if swapped == value {
			continue
		}
		if (&http.Cookie{Name: "a", Value: swapped}).Valid() != nil {
			return "", &refusal{reason.Internal, "the secret cannot stand in a cookie: it holds a space, a quote, a comma, a semicolon or a backslash", s.x.rule}
		}
		parts[i] = name + "=" + swapped
	}
	return strings.Join(parts, ";"), nil
}
