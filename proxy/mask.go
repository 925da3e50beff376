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
// the beginning of a secret, and nothing for longer than the stream lasts. What it blanks does not depend on the pieces
// in which the stream comes: every byte of every occurrence of a secret, and no other.
type mask struct {
	values [][]byte
	held   veil   // may be the beginning of a secret
	ready  []byte // masked, not handed out yet
	err    error  // of the stream, once held is handed out
}

// veil is text in which secrets were looked for.
type veil struct {
	text   []byte // as it came
	hidden []bool // byte by byte: part of a secret
	seen   int    // of text that was looked through
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
		if strings.Contains(s, string(v)) {
			var whole veil
			whole.add([]byte(s), m.values)
			return string(whole.take(len(s)))
		}
	}
	return s
}

// names says whether a text that lost its case holds a secret.
func (m *mask) names(s string) bool {
	return m != nil && slices.ContainsFunc(m.values, func(v []byte) bool {
		return len(v) <= len(s) && strings.Contains(strings.ToLower(s), strings.ToLower(string(v)))
	})
}

// header blanks secrets in the values of header or trailer fields, and drops fields that are named after one.
func (m *mask) header(h http.Header) {
	if m == nil {
		return
	}
	for name, values := range h {
		if m.names(name) {
			delete(h, name)
		}
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
		m.held.add(p[:n], m.values)
		clear(p[:n]) // buffers are used again by others
		m.err = err
		m.ready = m.held.take(len(m.held.text) - m.held.undecided(m.values, err != nil))
	}
	n := copy(p, m.ready)
	m.ready = m.ready[n:]
	return n, nil
}

// add looks for the values in what follows.
func (v *veil) add(next []byte, values [][]byte) {
	v.text = append(v.text, next...)
	v.hidden = append(v.hidden, make([]bool, len(next))...)
	for _, value := range values {
		for from := max(0, v.seen-len(value)+1); ; from++ {
			i := bytes.Index(v.text[from:], value)
			if i < 0 {
				break
			}
			from += i
			for j := range value {
				v.hidden[from+j] = true
			}
		}
	}
	v.seen = len(v.text)
}

// undecided returns how many of the last bytes may be the beginning of a value; none where nothing follows.
func (v *veil) undecided(values [][]byte, over bool) int {
	keep := 0
	if !over {
		for _, value := range values {
			keep = max(keep, overlap(v.text, value))
		}
	}
	return keep
}

// take returns the first n bytes without the values, and forgets them.
func (v *veil) take(n int) []byte {
	out := make([]byte, n)
	for i := range out {
		if out[i] = v.text[i]; v.hidden[i] {
			out[i] = '*'
		}
	}
	clear(v.text[:n])
	v.text, v.hidden, v.seen = append(v.text[:0:0], v.text[n:]...), append(v.hidden[:0:0], v.hidden[n:]...), v.seen-n
	return out
}

// overlap returns the length of the longest end of b that v begins with.
func overlap(b, v []byte) int {
	if len(b) == 0 {
		return 0
	}
	last := b[len(b)-1]
	for n := min(len(b), len(v)-1); n > 0; n-- {
		if v[n-1] == last && bytes.HasSuffix(b, v[:n]) {
			return n
		}
	}
	return 0
}
