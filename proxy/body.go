package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"

	"tagout/internal/reason"
	"tagout/internal/tokenshape"
	"tagout/internal/wire"
)

// Bounds of request bodies that are read whole before anything is sent: those in which a token can be swapped, and those
// that are hashed to be signed.
const (
	maxSwapBody = 1 << 20
	maxSignBody = 8 << 20
)

// guardBody swaps tokens in a body of JSON or of a form's fields, where the rule has a secret and the body is short and
// plain. Any other body is looked through on its way: what holds a token is not sent on.
func (s *swap) guardBody() *refusal {
	r := s.r
	if r.Body == nil || r.Body == http.NoBody {
		return nil
	}
	coding := bodyCoding(r.Header)
	form := formOf(r.Header.Get("Content-Type"))
	if s.x.rule.Credential == "" || form == nil || coding != "" {
		return s.scanBody(nil, coding, "")
	}
	if why := s.read(maxSwapBody); why != nil {
		return why
	}
	if !s.whole {
		return s.scanBody(s.body, "", " that is longer than "+strconv.Itoa(maxSwapBody>>20)+" MiB")
	}
	swapped, why := form(s, s.body)
	if why != nil {
		return why
	}
	s.changed = !bytes.Equal(swapped, s.body)
	s.body = swapped
	return s.replay()
}

// formOf returns how the tokens in a body of that type are swapped, nil where they are not.
func formOf(contentType string) func(*swap, []byte) ([]byte, *refusal) {
	kind, _, err := mime.ParseMediaType(contentType)
	switch {
	case err != nil:
	case kind == "application/json" || strings.HasSuffix(kind, "+json"):
		return (*swap).json
	case kind == "application/x-www-form-urlencoded":
		return (*swap).form
	}
	return nil
}

// bodyCoding returns a request's one content coding in lower case; "" where the body is plain. S3 calls chunks of its own
// a coding, in which the data is plain.
func bodyCoding(h http.Header) string {
	coding := lowerASCII(strings.TrimSpace(strings.Join(h.Values("Content-Encoding"), ",")))
	coding = strings.Trim(strings.TrimPrefix(coding, "aws-chunked"), ", ")
	if coding == "identity" {
		return ""
	}
	return coding
}

// read reads up to limit bytes of the request's body, on the session's share of memory. What is read is in s.body;
// s.whole says that this is all.
func (s *swap) read(limit int) *refusal {
	if s.whole {
		return nil
	}
	x := s.x
	var buf bytes.Buffer
	room := 0
	for buf.Len() <= limit {
		if room < buf.Len()+bodyStep {
			if !x.hold(bodyStep) {
				return x.crowded()
			}
			room += bodyStep
		}
		n, err := io.CopyN(&buf, s.r.Body, bodyStep)
		switch {
		case errors.Is(err, io.EOF):
			s.body, s.whole = buf.Bytes(), true
			return s.trailers()
		case err != nil:
			if why := x.fault(); why != nil {
				return why
			}
			return &refusal{reason.Malformed, "reading the request's body: " + oneLine(err), x.rule}
		case n == 0:
			return &refusal{reason.Malformed, "the request's body does not go on", x.rule}
		}
	}
	s.body = buf.Bytes()
	return nil
}

// bodyStep is how much of a body is read, and booked, at a time.
const bodyStep = 32 << 10

// replay makes the body that was read whole the one that is sent.
func (s *swap) replay() *refusal {
	r := s.r
	r.Body = &heldBody{Reader: bytes.NewReader(s.body), kid: r.Body}
	r.Header.Del("Expect") // the kid has sent it all
	if len(r.Trailer) > 0 {
		return nil // it goes in chunks, as it came
	}
	r.ContentLength, r.TransferEncoding = int64(len(s.body)), nil
	if r.Header.Get("Content-Length") != "" {
		r.Header.Set("Content-Length", strconv.Itoa(len(s.body)))
	}
	if s.changed { // of what the kid sent
		for _, name := range []string{"Content-Md5", "Digest", "Content-Digest", "Repr-Digest"} {
			r.Header.Del(name)
		}
	}
	return nil
}

// heldBody is a body that was read before it is sent.
type heldBody struct {
	*bytes.Reader
	kid io.Closer
}

// Close implements io.Closer.
func (b *heldBody) Close() error { return b.kid.Close() }

// trailers refuses tokens in the fields behind a body.
func (s *swap) trailers() *refusal {
	for name, values := range s.r.Trailer {
		for _, text := range append([]string{name}, values...) {
			if why := s.stray(text, inFollow); why != nil {
				return why
			}
		}
	}
	return nil
}

// form swaps the tokens in the fields of a form (WHATWG URL, 5).
func (s *swap) form(body []byte) ([]byte, *refusal) {
	swapped, why := s.pairs(string(body), wire.AsBody)
	return []byte(swapped), why
}

// json swaps the tokens in the strings of a JSON text (RFC 8259), whatever way they are written in, and leaves every
// other byte as it is. Text that is no JSON is looked through as it stands.
func (s *swap) json(body []byte) ([]byte, *refusal) {
	if tokenshape.Next(body, 0) < 0 && !bytes.ContainsRune(body, '\\') {
		return body, nil
	}
	out, rest, why := s.jsonStrings(body)
	if why != nil {
		return nil, why
	}
	if token := tokenshape.First(rest); token != "" {
		return nil, s.x.stray(token, wire.Presentation{As: wire.AsBody}, "a token in a body that is no JSON")
	}
	return append(out, rest...), nil
}

// jsonStrings returns the swapped text as far as it is JSON, and the rest.
func (s *swap) jsonStrings(body []byte) (out, rest []byte, why *refusal) {
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	var at jsonPath
	done := 0 // bytes of body that are in out
	for {
		tok, err := dec.Token()
		if err != nil {
			return out, body[done:], nil
		}
		text, isString := tok.(string)
		if !isString {
			at.step(tok)
			continue
		}
		end := int(dec.InputOffset())
		if at.isKey() {
			at.key(text)
			if why := s.stray(text, inName); why != nil {
				return nil, nil, why
			}
			continue
		}
		swapped, why := s.text(text, wire.Presentation{As: wire.AsBody, Name: at.String()})
		if why != nil {
			return nil, nil, why
		}
		at.step(tok)
		if swapped == text {
			continue
		}
		out = append(out, body[done:stringStart(body, end)]...)
		out = append(out, quoteJSON(swapped)...)
		done = end
	}
}

// stringStart returns where the JSON string that ends at end begins.
func stringStart(body []byte, end int) int {
	for i := end - 2; i >= 0; i-- {
		if body[i] != '"' {
			continue
		}
		slashes := 0
		for i-slashes > 0 && body[i-slashes-1] == '\\' {
			slashes++
		}
		if slashes%2 == 0 {
			return i
		}
	}
	return 0
}

func quoteJSON(text string) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if enc.Encode(text) != nil { // a string always encodes
		return []byte(`""`)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// jsonPath follows where in a JSON text a decoder is.
type jsonPath struct{ open []jsonLevel }

type jsonLevel struct {
	array bool
	index int
	name  string // of the field whose value is next
	named bool
}

// isKey says whether the next string is a field's name.
func (p *jsonPath) isKey() bool {
	if len(p.open) == 0 {
		return false
	}
	top := &p.open[len(p.open)-1]
	return !top.array && !top.named
}

func (p *jsonPath) key(name string) {
	top := &p.open[len(p.open)-1]
	top.name, top.named = name, true
}

// step goes past a token that is no field's name.
func (p *jsonPath) step(tok json.Token) {
	switch tok {
	case json.Delim('{'), json.Delim('['):
		p.open = append(p.open, jsonLevel{array: tok == json.Delim('[')})
		return
	case json.Delim('}'), json.Delim(']'):
		p.open = p.open[:len(p.open)-1]
	}
	if len(p.open) > 0 { // a value has ended
		top := &p.open[len(p.open)-1]
		top.index++
		top.named = false
	}
}

// String is the dotted name of the value that is next; elements of arrays have their number.
func (p *jsonPath) String() string {
	var names []string
	for _, l := range p.open {
		if l.array {
			names = append(names, strconv.Itoa(l.index))
		} else {
			names = append(names, l.name)
		}
	}
	return strings.Join(names, ".")
}
