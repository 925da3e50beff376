package audit

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxText is how much of a text a record keeps, in bytes. Of a longer one it keeps the beginning, and the length and the
// sha256 of the whole as it was before it was cut and after it was redacted.
const maxText = 8 << 10

// SetScan has every text of every record go through scan before the first byte of it is written: it returns the text
// without what looks like a secret. It is called by the goroutine that writes, and by those that call Redact, so it may
// take its time, and must be safe for concurrent use. Records that were logged before may be written without it.
func (l *Logger) SetScan(scan func(string) string) { l.scan.Store(&scan) }

// SetCards has every record of a session that lacks it get the sha256 of the session's card: cardOf returns it, "" where
// the session is not known. It is called by the goroutine that writes.
func (l *Logger) SetCards(cardOf func(session, kid string) string) { l.cardOf.Store(&cardOf) }

func (l *Logger) scanned(s string) string {
	scan := l.scan.Load()
	if scan == nil || s == "" {
		return s
	}
	return (*scan)(s)
}

// finish does what is left to do with a record before it is written. The maps and structs behind its pointers are the
// logger's own by now.
func (l *Logger) finish(r *Record) {
	if of := l.cardOf.Load(); of != nil && r.CardSHA256 == "" && (r.Session != "" || r.Kid != "") {
		r.CardSHA256 = (*of)(r.Session, r.Kid)
	}
	r.Detail, r.Actor = bounded(l.scanned(r.Detail)), bounded(l.scanned(r.Actor))
	if p := r.Process; p != nil {
		p.Comm, p.Exe = bounded(l.scanned(p.Comm)), bounded(l.scanned(p.Exe))
	}
	if d := r.Dst; d != nil {
		d.Name = bounded(l.scanned(d.Name))
	}
	for key, value := range r.Fields {
		value = l.scanned(value)
		r.Fields[key] = value
		if len(value) <= maxText {
			continue
		}
		r.Fields[key] = bounded(value)
		if _, said := r.Fields[key+"_sha256"]; !said {
			sum := sha256.Sum256([]byte(value))
			r.Fields[key+"_sha256"] = hex.EncodeToString(sum[:])
			r.Fields[key+"_bytes"] = strconv.Itoa(len(value))
		}
	}
}

// bounded is the beginning of a text that is too long. The word in which it is cut goes: it may be the beginning of a
// secret, of which only the whole is recognised.
func bounded(s string) string {
	if len(s) <= maxText {
		return s
	}
	return WithoutLastWord(s[:maxText])
}

// cutMark stands where a text was cut.
const cutMark = "…"

// longWord is how long a text is of which half is kept where it is one word, in bytes.
const longWord = 256

// WithoutLastWord is a text that was cut, without the word in which it was cut, and with a mark in its place.
func WithoutLastWord(s string) string {
	i := strings.LastIndexAny(s, " \t\r\n\"',;&")
	if half := len(s) / 2; i < half && len(s) > longWord {
		i = half // one word that never ends
	}
	i = max(i, 0)
	for i > 0 && !utf8.RuneStart(s[min(i, len(s)-1)]) {
		i--
	}
	return s[:i] + cutMark
}
