package audit

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Redacted stands where a secret stood.
const Redacted = "[redacted]"

// minSecret is the shortest value that is redacted exactly: shorter ones would blank out ordinary words.
const minSecret = 6

// keyLines is a private key's base64, line by line, in a text or in JSON. It is no more than that: whoever writes the
// first line of a key into a command must not hide the rest of the command.
const keyLines = `(?:(?:\s|\\r|\\n)+[A-Za-z0-9+/]{40,}={0,2})*(?:(?:\s|\\r|\\n)+[A-Za-z0-9+/]+={0,2}(?:\s|\\r|\\n)*-----END [A-Z ]*-----)?`

// shapes are what secrets look like when nobody told us their values.
var shapes = regexp.MustCompile(strings.Join([]string{
	`tg[ok]_[a-z2-7]{16,}`,
	`(?i:bearer|basic)[ +]+[A-Za-z0-9._~+/=-]{8,}`,
	`AKIA[0-9A-Z]{16}`,
	`gh[pousr]_[A-Za-z0-9]{20,}`,
	`github_pat_[A-Za-z0-9_]{20,}`,
	`xox[abprs]-[A-Za-z0-9-]{10,}`,
	`sk-[A-Za-z0-9_-]{20,}`,
	`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`,
	`-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----` + keyLines,
	`AGE-SECRET-KEY-1[0-9A-Z]+`,
}, "|"))

// userinfo finds the password of a URL; the user name stays.
var userinfo = regexp.MustCompile(`(://[^/\s:@]*):[^/\s@]+@`)

// keyed finds key=value and key: value where the key says that the value is secret.
var keyed = regexp.MustCompile(`(?i)((?:password|passwd|secret|token|api[_-]?key|access[_-]?key)["']?\s*[=:]\s*["']?)[^\s"'&,;]{4,}`)

// shortestShape is the length of the shortest text that shapes matches: "basic", a space and eight characters.
const shortestShape = 14

// shapeMarks are texts of which every match of shapes holds one, but for those of bearer and basic.
var shapeMarks = []string{"tgo_", "tgk_", "AKIA", "gh", "xox", "sk-", "eyJ", "AGE-SECRET-KEY-1", "-----BEGIN"}

// mayHaveShape says false only where shapes matches nothing. Nearly all texts of nearly all records end here: the
// expression itself costs some twenty times as much.
func mayHaveShape(s string) bool {
	if len(s) < shortestShape {
		return false
	}
	for _, mark := range shapeMarks {
		if strings.Contains(s, mark) {
			return true
		}
	}
	return mayPresent(s)
}

// mayPresent says false only where s has neither bearer nor basic with something behind it; beyond ASCII there are letters
// that case folding takes for theirs.
func mayPresent(s string) bool {
	if strings.IndexByte(s, ' ') < 0 && strings.IndexByte(s, '+') < 0 {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 0x80:
			return true
		case c|0x20 != 'b':
		case i+6 <= len(s) && strings.EqualFold(s[i:i+6], "bearer"), i+5 <= len(s) && strings.EqualFold(s[i:i+5], "basic"):
			return true
		}
	}
	return false
}

// mayBeKeyed says false only where keyed matches nothing. Every key word begins or ends with one of four words;
// beyond ASCII there are letters that case folding takes for theirs.
func mayBeKeyed(s string) bool {
	for i := range len(s) {
		word := ""
		switch s[i] | 0x20 {
		case 'p':
			word = "pass"
		case 's':
			word = "secret"
		case 't':
			word = "token"
		case 'k':
			word = "key"
		default:
			if s[i] >= 0x80 {
				return true
			}
			continue
		}
		if len(s)-i >= len(word) && strings.EqualFold(s[i:i+len(word)], word) {
			return true
		}
	}
	return false
}

// redactor replaces known values and secret-looking strings. Safe for concurrent use.
type redactor struct {
	mu     sync.RWMutex
	values []string          // guarded by mu
	exact  *strings.Replacer // of values, unless it is stale; nil while none is known; guarded by mu
	stale  atomic.Bool       // set with mu held

	prints atomic.Pointer[prints] // of values that only credd knows; nil while there are none
}

func newRedactor() *redactor { return &redactor{} }

// add makes the redactor replace value in clear and in the encodings in which values usually travel.
func (r *redactor) add(value string) {
	if len(value) < minSecret {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, have := range r.values {
		if have == value {
			return
		}
	}
	r.values = append(r.values, value)
	r.stale.Store(true)
}

// drop makes the redactor forget a value that is worth nothing any more.
func (r *redactor) drop(value string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, have := range r.values {
		if have == value {
			r.values = append(r.values[:i:i], r.values[i+1:]...)
			r.stale.Store(true)
			return
		}
	}
}

// replacer finds the known values; nil while there are none.
func (r *redactor) replacer() *strings.Replacer {
	if !r.stale.Load() {
		r.mu.RLock()
		defer r.mu.RUnlock()
		return r.exact
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stale.Swap(false) {
		var all []string
		for _, v := range r.values {
			all = append(all, forms(v)...)
		}
		// The longest first: of a value that goes on where another ends nothing must be left.
		slices.SortFunc(all, func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) })
		pairs := make([]string, 0, 2*len(all))
		for _, form := range slices.Compact(all) {
			pairs = append(pairs, form, Redacted)
		}
		r.exact = strings.NewReplacer(pairs...)
	}
	return r.exact
}

// text returns s without secrets.
func (r *redactor) text(s string) string {
	if len(s) < minSecret {
		return s
	}
	if exact := r.replacer(); exact != nil {
		s = exact.Replace(s)
	}
	if p := r.prints.Load(); p != nil {
		s = p.text(s)
	}
	if mayHaveShape(s) {
		s = shapes.ReplaceAllString(s, Redacted)
	}
	if strings.Contains(s, "://") {
		s = userinfo.ReplaceAllString(s, "$1:"+Redacted+"@")
	}
	if strings.ContainsAny(s, "=:") && mayBeKeyed(s) {
		s = keyed.ReplaceAllString(s, "${1}"+Redacted)
	}
	return s
}

// record redacts every field of rec that carries text from outside. Maps and structs behind pointers are
// copied, never changed: they belong to the caller.
func (r *redactor) record(rec *Record) {
	rec.Actor, rec.Detail, rec.Kid, rec.Card = r.text(rec.Actor), r.text(rec.Detail), r.text(rec.Kid), r.text(rec.Card)
	if rec.Process != nil {
		p := *rec.Process
		p.Comm, p.Exe = r.text(p.Comm), r.text(p.Exe)
		rec.Process = &p
	}
	if rec.Dst != nil {
		d := *rec.Dst
		d.Name = r.text(d.Name)
		rec.Dst = &d
	}
	if rec.Fields != nil {
		fields := make(map[string]string, len(rec.Fields))
		for k, v := range rec.Fields {
			fields[k] = r.text(v)
		}
		rec.Fields = fields
	}
}

// Redact returns a text as records are written: without the secrets that the logger knows, and what looks like one.
func (l *Logger) Redact(text string) string { return l.scanned(l.redact.text(text)) }

// Redact returns s without what looks like a secret, and without the secrets themselves in their usual encodings, as
// records are written.
func Redact(s string, secrets ...string) string {
	r := newRedactor()
	for _, secret := range secrets {
		r.add(secret)
	}
	return r.text(s)
}
