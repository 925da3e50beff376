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

// mayHide says whether gitleaks could decode something in text to text. It may say so of text where it cannot.
func mayHide(text string) bool {
	start, digits := -1, 0 // of the run that text[i] goes on with, and the hex digits just before text[i]
	for i := 0; i <= len(text); i++ {
		var c byte
		if i < len(text) {
			c = text[i]
		}
		switch {
		case c == '%' && i+2 < len(text) && isHex(text[i+1]) && isHex(text[i+2]):
			return true
		case c == '+' && i > 0 && text[i-1] == 'U', (c == 'u' || c == 'U') && i > 0 && text[i-1] == '\\':
			return true
		}
		if isHex(c) {
			digits++
		} else {
			if digits >= hexRun && readsAsHex(text[i-digits:i]) {
				return true
			}
			digits = 0
		}
		if inBase64(c) {
			if start < 0 {
				start = i
			}
			continue
		}
		if start >= 0 && i-start >= base64Run && readsAsBase64(text[start:i]) {
			return true
		}
		start = -1
	}
	return false
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
