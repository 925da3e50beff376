package auditindex

import (
	"bytes"
	"encoding/json"
	"strings"
	"time"

	"tagout/internal/auditview"
)

// term is what a posting is about: a field and a value, hashed. Two values that meet in one term cost a look at a line
// that is not wanted, no more: every line that is found is read and compared.
type term int64

// Fields that are indexed.
const (
	fieldKid byte = iota + 1
	fieldSession
	fieldStop
	fieldEvent
	fieldNoun // the part of an event's name before the dot
	fieldCard
	fieldReason
	fieldOutcome
	fieldActor
	fieldHost
	fieldPath
)

// buckets bounds how many terms the values make that kids and callers choose: as many rows as they like would make the
// index as slow as they like.
var buckets = map[byte]uint64{fieldKid: 1 << 16, fieldActor: 1 << 10, fieldHost: 1 << 12, fieldPath: 1 << 12}

// of is FNV-1a, which every build and machine computes alike.
func of(field byte, value string) term {
	h := uint64(14695981039346656037)
	for i := range len(value) {
		h = (h ^ uint64(value[i])) * 1099511628211
	}
	if n := buckets[field]; n != 0 {
		h %= n
	}
	return term(uint64(field)<<56 | h&(1<<56-1))
}

// facts is what the index notes of a line. It is kept and used again.
type facts struct {
	terms []term
	at    time.Time
}

func (f *facts) note(field byte, value string) {
	if value != "" {
		f.terms = append(f.terms, of(field, value))
	}
}

func (f *facts) event(name string) {
	f.note(fieldEvent, name)
	noun, _, _ := strings.Cut(name, ".")
	f.note(fieldNoun, noun)
}

// read notes what a line is about; false where it is no record. A line that the quick way does not understand in full is
// decoded.
func (f *facts) read(line []byte) bool {
	f.terms, f.at = f.terms[:0], time.Time{}
	if q := (quick{facts: f, b: line}); q.object(topLevel) && q.end() && !f.at.IsZero() {
		return true
	}
	f.terms = f.terms[:0]
	l, ok := auditview.Decode(line)
	if !ok {
		return false
	}
	f.at = l.Time
	f.note(fieldKid, l.Kid)
	f.note(fieldSession, l.Session)
	f.note(fieldStop, l.Fields["stop"])
	f.event(l.Event)
	f.note(fieldCard, l.Card)
	if l.Reason != 0 {
		f.note(fieldReason, l.Reason.String())
	}
	f.note(fieldOutcome, l.Outcome)
	f.note(fieldActor, l.Actor)
	for _, h := range auditview.Hosts(&l.Record) {
		f.note(fieldHost, h)
	}
	for _, p := range auditview.Paths(&l.Record) {
		f.note(fieldPath, p)
	}
	return true
}

// quick walks over a line as our logger writes it, which is some ten times as fast as decoding it. It gives up on
// whatever the logger does not write.
type quick struct {
	*facts
	b []byte
	i int
}

// Objects in a record whose members matter.
type object int

const (
	topLevel object = iota
	destination
	process
	fields
	other
)

func (q *quick) next(c byte) bool {
	if q.i < len(q.b) && q.b[q.i] == c {
		q.i++
		return true
	}
	return false
}

func (q *quick) end() bool { return q.i == len(q.b) }

// object walks over an object, its members in facts.
func (q *quick) object(kind object) bool {
	if !q.next('{') {
		return false
	}
	if q.next('}') {
		return true
	}
	for {
		key, ok := q.text()
		if !ok || !q.next(':') || !q.member(kind, key) {
			return false
		}
		if q.next('}') {
			return true
		}
		if !q.next(',') {
			return false
		}
	}
}

// text walks over a string without escapes and beyond-ASCII bytes.
func (q *quick) text() ([]byte, bool) {
	if !q.next('"') {
		return nil, false
	}
	rest := q.b[q.i:]
	n := bytes.IndexByte(rest, '"')
	if n < 0 {
		return nil, false
	}
	s := rest[:n]
	for _, c := range s {
		if c < 0x20 || c >= 0x80 || c == '\\' {
			return nil, false
		}
	}
	q.i += n + 1
	return s, true
}

// value walks over a value that does not matter.
func (q *quick) value() bool {
	if q.i >= len(q.b) {
		return false
	}
	switch q.b[q.i] {
	case '"':
		return q.skipText()
	case '{':
		return q.object(other)
	case '[':
		q.i++
		if q.next(']') {
			return true
		}
		for q.value() {
			if q.next(']') {
				return true
			}
			if !q.next(',') {
				return false
			}
		}
		return false
	}
	return q.scalar()
}

// scalar walks over a number, true, false or null.
func (q *quick) scalar() bool {
	began := q.i
	for q.i < len(q.b) {
		c := q.b[q.i]
		if !(c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c == '-' || c == '+' || c == '.' || c == 'E') {
			break
		}
		q.i++
	}
	return json.Valid(q.b[began:q.i])
}

// skipText walks over a string of any kind.
func (q *quick) skipText() bool {
	for q.i++; q.i < len(q.b); q.i++ {
		switch q.b[q.i] {
		case '\\':
			q.i++
		case '"':
			q.i++
			return true
		}
	}
	return false
}

// folded says whether JSON's reader may take a key for one of ours although it is written in another way.
func folded(key []byte) bool {
	for _, c := range key {
		if c >= 'A' && c <= 'Z' {
			return true
		}
	}
	return false
}

// topKeys are the members of a record that are noted, with their fields; nought for those that are handled apart.
var topKeys = map[string]byte{
	"kid": fieldKid, "session": fieldSession, "card": fieldCard, "reason": fieldReason, "outcome": fieldOutcome, "actor": fieldActor,
}

func (q *quick) member(kind object, key []byte) bool {
	switch kind {
	case topLevel:
		if folded(key) {
			return false
		}
		return q.top(key)
	case destination:
		switch string(key) {
		case "name", "addr", "real":
			return q.host(string(key) == "name")
		}
		return !folded(key) && q.value()
	case process:
		if string(key) == "exe" {
			return q.noted(fieldPath)
		}
		return !folded(key) && q.value()
	case fields: // a map: its keys are what they are
		switch string(key) {
		case "stop":
			return q.noted(fieldStop)
		case "path", "from", "file", "exe":
			return q.noted(fieldPath)
		}
		return q.i < len(q.b) && q.b[q.i] == '"' && q.skipText()
	}
	return q.value()
}

func (q *quick) noted(field byte) bool {
	s, ok := q.text()
	if ok {
		q.note(field, string(s))
	}
	return ok
}

func (q *quick) host(name bool) bool {
	s, ok := q.text()
	if !ok {
		return false
	}
	if name {
		q.note(fieldHost, strings.ToLower(string(s)))
		return true
	}
	if bytes.IndexByte(s, ':') >= 0 {
		return false // IPv6 can be written in many ways
	}
	q.note(fieldHost, string(s))
	return true
}

func (q *quick) top(key []byte) bool {
	switch string(key) {
	case "time":
		s, ok := q.text()
		if !ok {
			return false
		}
		at, err := time.Parse(time.RFC3339Nano, string(s))
		q.at = at
		return err == nil
	case "event":
		s, ok := q.text()
		if !ok || len(s) == 0 {
			return false
		}
		q.event(string(s))
		return true
	case "dst":
		return q.object(destination)
	case "process":
		return q.object(process)
	case "fields":
		return q.object(fields)
	}
	if field := topKeys[string(key)]; field != 0 {
		return q.noted(field)
	}
	return q.value()
}
