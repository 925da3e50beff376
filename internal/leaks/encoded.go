package leaks

import (
	"encoding/base64"
	"encoding/hex"
)

// What gitleaks decodes is looked for before it is asked to: its own search for it is sixty times as slow as the rest.
const (
	base64Run = 16 // characters that may be base64 in a row, at least
	hexRun    = 32 // and hex digits
)

// around is how far around what may be encoded a text is looked at decoded, in bytes: names that stand before it count.
const around = 512

// hidden returns the parts of text, in order and apart, in which gitleaks could decode something to text.
func hidden(text string) []span {
	var out []span
	for i := 0; i < len(text); {
		start, end := nextHidden(text, i)
		if start < 0 {
			break
		}
		from, to := max(start-around, 0), min(end+around, len(text))
		if n := len(out); n > 0 && from <= out[n-1].end {
			out[n-1].end = to
		} else {
			out = append(out, span{from, to})
		}
		i = end
	}
	return out
}

// nextHidden returns where the next thing stands that could be decoded, -1 where nothing does. It may find what cannot.
func nextHidden(text string, from int) (start, end int) {
	run, digits := -1, 0 // start of the run that text[i] goes on with, and the hex digits just before text[i]
	for i := from; i <= len(text); i++ {
		var c byte
		if i < len(text) {
			c = text[i]
		}
		switch {
		case c == '%' && i+2 < len(text) && isHex(text[i+1]) && isHex(text[i+2]):
			return i, i + 3
		case c == '+' && i > 0 && text[i-1] == 'U', (c == 'u' || c == 'U') && i > 0 && text[i-1] == '\\':
			return i - 1, i + 1
		}
		if isHex(c) {
			digits++
		} else {
			if digits >= hexRun && readsAsHex(text[i-digits:i]) {
				return i - digits, i
			}
			digits = 0
		}
		if inBase64(c) {
			if run < 0 {
				run = i
			}
			continue
		}
		if run >= 0 && i-run >= base64Run && readsAsBase64(text[run:i]) {
			return run, i
		}
		run = -1
	}
	return -1, -1
}

func isHex(c byte) bool { return '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'f' }

func inBase64(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'z' || c == '_' || c == '/' || c == '+' || c == '-'
}

// readsAsHex and readsAsBase64 say whether the run begins like encoded text.
func readsAsHex(run string) bool {
	var out [hexRun / 2]byte
	n, err := hex.Decode(out[:], []byte(run[:hexRun]))
	return err == nil && readable(out[:n])
}

func readsAsBase64(run string) bool {
	var out [base64Run]byte
	for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		if n, err := enc.Decode(out[:], []byte(run[:base64Run])); err == nil && readable(out[:n]) {
			return true
		}
	}
	return false
}

func readable(b []byte) bool {
	for _, c := range b {
		if c < 0x09 || c > 0x7e {
			return false
		}
	}
	return true
}
