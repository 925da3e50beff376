package proxy

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// minMasked is the shortest secret that is masked in answers: shorter ones would blank ordinary text.
const minMasked = 6

// mask blanks secrets in a stream, byte for byte, so that lengths stay. It holds back only bytes that may be
// the beginning of a secret, and nothing for longer than the stream lasts.
type mask struct {
	values [][]byte
	held   []byte // may be the beginning of a secret
	ready  []byte // masked, not handed out yet
	err    error  // of the stream, once held is handed out
}

// newMask returns a mask for the secrets, nil where there is nothing to mask.
func newMask(secrets []secret) *mask {
	values := maskedForms(secrets)
	if len(values) == 0 {
		return nil
	}
	return &mask{values: values}
}

// maskedForms returns the secrets as they may come back, the longest first: in clear and as services that show
// what they were sent write it down. What a service makes of a value beyond that is out of reach.
func maskedForms(secrets []secret) [][]byte {
	var out [][]byte
	for _, s := range secrets {
		if len(s.value) < minMasked {
			continue
		}
		for _, form := range forms(s.value) {
			if len(form) >= minMasked && !slices.ContainsFunc(out, func(have []byte) bool { return string(have) == form }) {
				out = append(out, []byte(form))
			}
		}
	}
	slices.SortStableFunc(out, func(a, b []byte) int { return len(b) - len(a) })
	return out
}

func forms(v string) []string {
	quoted := strconv.Quote(v)
	out := []string{v, url.QueryEscape(v), url.PathEscape(v), quoted[1 : len(quoted)-1], strings.ReplaceAll(v, "/", `\/`)}
	if raw, err := json.Marshal(v); err == nil { // a string always marshals
		text := string(raw[1 : len(raw)-1])
		out = append(out, text, strings.ReplaceAll(text, "/", `\/`))
	}
	digits := hex.EncodeToString([]byte(v))
	out = append(out, digits, strings.ToUpper(digits))
	for before := range 3 {
		for _, alphabet := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			out = append(out, inBase64(v, before, alphabet))
		}
	}
	return out
}

// inBase64 returns the part of base64 text that v alone decides where so many bytes, modulo 3, come before it:
// "user:" before a password, for instance.
func inBase64(v string, before int, alphabet *base64.Encoding) string {
	text := alphabet.EncodeToString(append(make([]byte, before), v...))
	first := (before*8 + 5) / 6 // the first character that holds no bit of what comes before
	end := (before + len(v)) * 8 / 6
	return text[first:end]
}

// text is s without the secrets. A nil mask changes nothing.
func (m *mask) text(s string) string {
	if m == nil {
		return s
	}
	for _, v := range m.values {
		s = strings.ReplaceAll(s, string(v), strings.Repeat("*", len(v)))
	}
	return s
}

// header blanks secrets in the values of header or trailer fields.
func (m *mask) header(h http.Header) {
	for _, values := range h {
		for i := range values {
			values[i] = m.text(values[i])
		}
	}
}

// read reads from r into p. A nil mask reads straight through.
func (m *mask) read(r io.Reader, p []byte) (int, error) {
	if m == nil {
		return r.Read(p)
	}
	for len(m.ready) == 0 {
		if m.err != nil {
			return 0, m.err
		}
		n, err := r.Read(p)
		m.held = append(m.held, p[:n]...)
		m.err = err
		m.blank()
	}
	n := copy(p, m.ready)
	m.ready = m.ready[n:]
	return n, nil
}

// blank masks what is whole and moves everything that cannot be part of a secret any more to ready.
func (m *mask) blank() {
	for _, v := range m.values {
		for from := 0; ; {
			i := bytes.Index(m.held[from:], v)
			if i < 0 {
				break
			}
			for j := range v {
				m.held[from+i+j] = '*'
			}
			from += i + len(v)
		}
	}
	keep := 0
	if m.err == nil {
		for _, v := range m.values {
			keep = max(keep, overlap(m.held, v))
		}
	}
	cut := len(m.held) - keep
	m.ready = append(m.ready[:0:0], m.held[:cut]...)
	m.held = append(m.held[:0:0], m.held[cut:]...)
}

// overlap returns the length of the longest end of b that v begins with.
func overlap(b, v []byte) int {
	for n := min(len(b), len(v)-1); n > 0; n-- {
		if bytes.HasSuffix(b, v[:n]) {
			return n
		}
	}
	return 0
}
