package audit

import (
	"encoding/base32"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// forms are the ways in which a value travels: in clear, and in the encodings that headers, addresses, documents, shells
// and dumps have. In base64 and base32 it is found wherever it begins in what was encoded: of the three (five) ways in
// which it can lie there, what no neighbour changes is taken.
func forms(v string) []string {
	raw := []byte(v)
	out := []string{v, url.QueryEscape(v), url.PathEscape(v), lowerEscapes(url.QueryEscape(v)), lowerEscapes(url.PathEscape(v)), url.QueryEscape(url.QueryEscape(v)),
		each(raw, "%", ""), strings.ToUpper(each(raw, "%", "")), each(raw, `\x`, ""),
		hex.EncodeToString(raw), strings.ToUpper(hex.EncodeToString(raw)), each(raw, "", " "), each(raw, "", ":"), strings.ToUpper(each(raw, "", ":")),
		inJSON(v), inQuotes(v), inQuotes(inQuotes(v)), inQuotes(inJSON(v)),
	}
	for shift := range 3 {
		out = append(out, core(base64.RawStdEncoding.EncodeToString, raw, shift, 6), core(base64.RawURLEncoding.EncodeToString, raw, shift, 6))
	}
	for shift := range 5 {
		out = append(out, core(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString, raw, shift, 5))
	}
	slices.Sort(out)
	out = slices.Compact(out)
	return slices.DeleteFunc(out, func(f string) bool { return len(f) < minSecret })
}

// core is what of a value's encoding is the same whatever stands before and behind it, when shift bytes stand before it and
// each character carries so many bits.
func core(encode func([]byte) string, v []byte, shift, bits int) string {
	text := encode(append(make([]byte, shift), v...))
	from, to := (shift*8+bits-1)/bits, (shift+len(v))*8/bits
	return text[min(from, to):to]
}

// each is every byte in hex, with something before each and between them.
func each(raw []byte, before, between string) string {
	parts := make([]string, len(raw))
	for i, c := range raw {
		parts[i] = before + hex.EncodeToString([]byte{c})
	}
	return strings.Join(parts, between)
}

// lowerEscapes is a percent-encoded text with lower-case digits.
func lowerEscapes(s string) string {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:], strings.ToLower(string(b[i+1:i+3])))
		}
	}
	return string(b)
}

func inJSON(v string) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return v // no string fails
	}
	return string(raw[1 : len(raw)-1])
}

func inQuotes(v string) string {
	q := strconv.Quote(v)
	return q[1 : len(q)-1]
}
