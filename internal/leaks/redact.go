package leaks

import (
	"strings"
	"sync"
)

// Redactor takes what looks like a key out of texts of which nearly all have none. It is safe for concurrent use.
type Redactor struct {
	with string // stands where a key stood

	once     sync.Once
	detector *Detector // nil where there is none: see Text
	mu       sync.Mutex
	seen     map[string]bool // texts that were searched, and have no key; guarded by mu
}

const (
	maxSeen    = 2048
	maxSeenLen = 1 << 10 // bytes of a text that is remembered
	minRun     = 10      // characters that a key has in a row, at least
)

// NewRedactor returns a Redactor that writes with where a key stood. The rules are loaded when there is something to search.
func NewRedactor(with string) *Redactor { return &Redactor{with: with, seen: map[string]bool{}} }

// Text returns s without what looks like a key. Should the rules not load, nothing of a text that may have one is left.
func (r *Redactor) Text(s string) string {
	if !mayHaveKey(s) {
		return s
	}
	r.mu.Lock()
	clean := r.seen[s]
	r.mu.Unlock()
	if clean {
		return s
	}
	out := r.search(s)
	if out == s && len(s) <= maxSeenLen { // a key is not kept, not even in memory
		r.mu.Lock()
		if len(r.seen) >= maxSeen {
			clear(r.seen)
		}
		r.seen[strings.Clone(s)] = true
		r.mu.Unlock()
	}
	return out
}

func (r *Redactor) search(s string) string {
	r.once.Do(func() { r.detector, _ = New() })
	if r.detector == nil {
		return r.with
	}
	found := r.detector.Find(s)
	if len(found) == 0 {
		return s
	}
	var b strings.Builder
	at := 0
	for _, f := range found { // in order; they may overlap
		if f.End <= at {
			continue
		}
		if f.Start >= at {
			b.WriteString(s[at:f.Start])
			b.WriteString(r.with)
		}
		at = f.End
	}
	b.WriteString(s[at:])
	return b.String()
}

// mayHaveKey says false of most texts that have none: a key has ten characters in a row, a digit or both cases among them,
// that are no path and no host name, or it is a block with a beginning of its own, or a password for curl.
func mayHaveKey(s string) bool {
	if strings.Contains(s, begin) || strings.Contains(s, "curl") {
		return true
	}
	run, digit, upper, lower := 0, false, false, false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case '0' <= c && c <= '9':
			digit = true
		case 'A' <= c && c <= 'Z':
			upper = true
		case 'a' <= c && c <= 'z':
			lower = true
		case c == '_' || c == '-' || c == '+' || c == '=' || c == '~':
		default:
			run, digit, upper, lower = 0, false, false, false
			continue
		}
		if run++; run >= minRun && (digit || upper && lower) {
			return true
		}
	}
	return false
}
