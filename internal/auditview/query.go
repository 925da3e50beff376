// Package auditview finds records in an instance's audit logs, puts them into the order in which things happened and
// shows them. What it shows is read from the logs; an index may say where to look and is never the source of a line.
package auditview

import (
	"bytes"
	"encoding/json"
	"strings"
	"time"

	"tagout/internal/audit"
)

// Line is one record as it stands in a log.
type Line struct {
	audit.Record
	Raw []byte // the line, without its end; the holder's own
	Log string // path of the log
	Off int64  // byte in it at which the line begins
	Seq uint64 // the record's sequence number in its daemon's log; only where Numbered
	// Numbered says that Seq is known: whoever reads a log from its start knows it.
	Numbered bool
}

// Query says which records are wanted. Empty fields ask for nothing; all others must hold.
type Query struct {
	Who     string // a kid's name, a session or a stop: any of the three
	Kid     string
	Session string
	Stop    string   // records about this stop
	Events  []string // any of them; "conn.*" is all whose name begins so
	Card    string
	Reason  string
	Outcome string
	Daemon  string
	Host    string // of the destination: its name or address
	Path    string // of a file or program; "/etc/*" is all that begins so
	Actor   string
	Since   time.Time // wall clock
	Until   time.Time
	Text    string // somewhere in the record, in any case of ASCII letters
}

// fieldStop is the field of records about a stop that names it.
const fieldStop = "stop"

// pathFields are the fields that name a file or a program.
var pathFields = []string{"path", "from", "file", "exe"}

// Decode reads a line; false where it is no record.
func Decode(raw []byte) (Line, bool) {
	l := Line{Raw: bytes.Clone(raw)}
	if json.Unmarshal(l.Raw, &l.Record) != nil || l.Event == "" {
		return Line{}, false
	}
	return l, true
}

// Match says whether the record is wanted.
func (q *Query) Match(l *Line) bool {
	r := &l.Record
	return (q.Who == "" || r.Kid == q.Who || r.Session == q.Who || r.Fields[fieldStop] == q.Who) &&
		(q.Kid == "" || r.Kid == q.Kid) && (q.Session == "" || r.Session == q.Session) && (q.Stop == "" || r.Fields[fieldStop] == q.Stop) &&
		(q.Card == "" || r.Card == q.Card) && (q.Reason == "" || r.Reason != 0 && r.Reason.String() == q.Reason) &&
		(q.Outcome == "" || r.Outcome == q.Outcome) && (q.Daemon == "" || r.Daemon == q.Daemon) && (q.Actor == "" || r.Actor == q.Actor) &&
		(q.Since.IsZero() || !r.Time.Before(q.Since)) && (q.Until.IsZero() || r.Time.Before(q.Until)) &&
		q.matchEvent(r.Event) && (q.Host == "" || hostIs(r, q.Host)) && (q.Path == "" || pathIs(r, q.Path)) &&
		(q.Text == "" || holdsText(l, q.Text))
}

func (q *Query) matchEvent(event string) bool {
	if len(q.Events) == 0 {
		return true
	}
	for _, want := range q.Events {
		if like(want, event) {
			return true
		}
	}
	return false
}

// like compares with a pattern that may end in a star.
func like(pattern, s string) bool {
	if begin, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(s, begin)
	}
	return pattern == s
}

// Hosts returns the names and addresses that a record's destination has.
func Hosts(r *audit.Record) []string {
	if r.Dst == nil {
		return nil
	}
	var out []string
	if r.Dst.Name != "" {
		out = append(out, strings.ToLower(r.Dst.Name))
	}
	if r.Dst.Addr.IsValid() {
		out = append(out, r.Dst.Addr.String())
	}
	if r.Dst.Real.IsValid() {
		out = append(out, r.Dst.Real.String())
	}
	return out
}

func hostIs(r *audit.Record, host string) bool {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	for _, h := range Hosts(r) {
		if h == host || strings.HasPrefix(host, "*.") && strings.HasSuffix(h, host[1:]) {
			return true
		}
	}
	return false
}

// Paths returns the files and programs that a record names.
func Paths(r *audit.Record) []string {
	var out []string
	for _, f := range pathFields {
		if p := r.Fields[f]; p != "" {
			out = append(out, p)
		}
	}
	if r.Process != nil && r.Process.Exe != "" {
		out = append(out, r.Process.Exe)
	}
	return out
}

func pathIs(r *audit.Record, path string) bool {
	for _, p := range Paths(r) {
		if like(path, p) {
			return true
		}
	}
	return false
}

// holdsText looks into the values of the record, not into how JSON writes them.
func holdsText(l *Line, text string) bool {
	if containsFold(l.Raw, text) {
		return true
	}
	if !bytes.ContainsRune(l.Raw, '\\') {
		return false // what stands there is what is meant
	}
	var v any
	return json.Unmarshal(l.Raw, &v) == nil && valueHolds(v, text)
}

func valueHolds(v any, text string) bool {
	switch v := v.(type) {
	case string:
		return containsFold([]byte(v), text)
	case map[string]any:
		for _, e := range v {
			if valueHolds(e, text) {
				return true
			}
		}
	case []any:
		for _, e := range v {
			if valueHolds(e, text) {
				return true
			}
		}
	}
	return false
}

// containsFold is bytes.Contains without regard to the case of ASCII letters.
func containsFold(b []byte, text string) bool {
	if text == "" {
		return true
	}
	low, up := lower(text[0]), upper(text[0])
	for len(b) >= len(text) {
		i := bytes.IndexByte(b, low)
		if low != up {
			if j := bytes.IndexByte(b[:max(0, i)], up); i < 0 {
				i = bytes.IndexByte(b, up)
			} else if j >= 0 {
				i = j
			}
		}
		if i < 0 || len(b)-i < len(text) {
			return false
		}
		if equalFold(b[i:i+len(text)], text) {
			return true
		}
		b = b[i+1:]
	}
	return false
}

func equalFold(b []byte, text string) bool {
	for i := range b {
		if lower(b[i]) != lower(text[i]) {
			return false
		}
	}
	return true
}

func lower(c byte) byte {
	if c >= 'A' && c <= 'Z' {
		return c | 0x20
	}
	return c
}

func upper(c byte) byte {
	if c >= 'a' && c <= 'z' {
		return c &^ 0x20
	}
	return c
}

// needles returns texts of which every line that is wanted holds at least one, for a look before a line is decoded; none
// where nothing is sure. JSON writes plain names as they are, and only those are used.
func (q *Query) needles() [][]byte {
	for _, v := range []string{q.Who, q.Stop, q.Session, q.Kid, q.Card, q.Actor, q.Reason} {
		if v != "" && plain(v) {
			return [][]byte{[]byte(`"` + v + `"`)}
		}
	}
	var out [][]byte
	for _, e := range q.Events {
		name := strings.TrimSuffix(e, "*")
		if !plain(name) || name == "" {
			return nil
		}
		out = append(out, []byte(`"`+name))
	}
	if len(out) == 0 && q.Outcome != "" && plain(q.Outcome) {
		out = append(out, []byte(`"`+q.Outcome+`"`))
	}
	return out
}

// plain says whether JSON can write s in one way only, as far as our logs go: the logger escapes nothing in it.
func plain(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("-_.:/ ", c) >= 0) {
			return false
		}
	}
	return true
}
