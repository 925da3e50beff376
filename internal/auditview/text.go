package auditview

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"tagout/internal/audit"
)

// shown are the parts of a record that text shows in words of its own; what a record has beyond them is shown by its
// name.
var shown = map[string]bool{
	"v": true, "id": true, "time": true, "boot_ns": true, "boot_id": true, "instance": true, "daemon": true, "event": true,
	"session": true, "kid": true, "mark": true, "card": true, "card_sha256": true, "actor": true, "outcome": true, "reason": true, "rule": true, "generation": true,
	"process": true, "dst": true, "bytes": true, "conn": true, "count": true, "detail": true, "fields": true,
}

// Extra returns the parts of a record that nothing else shows: fields of a newer schema, by their names.
func (l *Line) Extra() map[string]string {
	var all map[string]json.RawMessage
	if json.Unmarshal(l.Raw, &all) != nil {
		return nil
	}
	var out map[string]string
	for k, raw := range all {
		if shown[k] {
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		var s string
		if json.Unmarshal(raw, &s) != nil {
			s = string(raw)
		}
		out[k] = s
	}
	return out
}

// Destination is where a record was going, in words: "host:port/proto".
func Destination(r *audit.Record) string {
	d := r.Dst
	if d == nil {
		return ""
	}
	s := d.Name
	if s == "" && d.Addr.IsValid() {
		s = d.Addr.String()
	}
	if d.Port != 0 {
		s += ":" + strconv.Itoa(int(d.Port))
	}
	if d.Proto != "" {
		s += "/" + d.Proto
	}
	if d.Real.IsValid() {
		s += " (" + d.Real.String() + ")"
	}
	return s
}

// hidden are fields that say in other words what the text says already, or that are long and of no use to a reader.
var hidden = map[string]bool{"note": true, fieldStop: true}

// What is what a record says beside time, daemon, event, outcome and reason: one line, without control characters.
func What(l *Line) string {
	r := &l.Record
	var parts []string
	if d := Destination(r); d != "" {
		parts = append(parts, "-> "+d)
	}
	if p := r.Process; p != nil {
		by := fmt.Sprintf("by %s[%d]", p.Comm, p.PID)
		if p.Exe != "" && !strings.HasSuffix(p.Exe, "/"+p.Comm) {
			by += " " + p.Exe
		}
		parts = append(parts, by)
	}
	if by := r.Bytes; by != nil {
		parts = append(parts, fmt.Sprintf("up %d down %d", by.Up, by.Down))
	}
	if r.Count > 1 {
		parts = append(parts, fmt.Sprintf("x%d", r.Count))
	}
	if r.Actor != "" {
		parts = append(parts, "("+r.Actor+")")
	}
	if s := r.Fields[fieldStop]; s != "" {
		parts = append(parts, "stop "+s)
	}
	for _, k := range slices.Sorted(maps.Keys(r.Fields)) {
		if !hidden[k] && r.Fields[k] != "" {
			parts = append(parts, k+"="+r.Fields[k])
		}
	}
	extra := l.Extra()
	for _, k := range slices.Sorted(maps.Keys(extra)) {
		parts = append(parts, k+"="+extra[k])
	}
	if r.Detail != "" {
		parts = append(parts, r.Detail)
	}
	return OneLine(strings.Join(parts, " "))
}

// OneLine makes a text that anybody may have written fit for a terminal.
func OneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// Writer shows records to people, one a line, with a line for each new day and each new boot.
type Writer struct {
	Colour bool
	Kids   bool // name the kid of each record

	day, boot string
}

// Colours, as SGR parameters.
var topicColour = map[string]string{Network: "36", Files: "33", Tools: "34", Processes: "34", Identity: "35", Stop: "1;31", Life: "2"}

// Line returns what is shown of a record, with the lines that come before it.
func (w *Writer) Line(l *Line) string {
	var b strings.Builder
	at := l.Time.UTC()
	if day := at.Format(time.DateOnly); day != w.day {
		w.day = day
		b.WriteString(w.paint("1", "-- "+day+" UTC") + "\n")
	}
	if l.BootID != w.boot {
		if w.boot != "" {
			b.WriteString(w.paint("1", "-- the machine was started again") + "\n")
		}
		w.boot = l.BootID
	}
	fmt.Fprintf(&b, "%s %-11s ", w.paint("2", at.Format("15:04:05.000")), OneLine(l.Daemon))
	if w.Kids {
		fmt.Fprintf(&b, "%-14s ", OneLine(orDash(l.Kid)))
	}
	b.WriteString(w.paint(topicColour[Topic(l.Event)], fmt.Sprintf("%-18s", OneLine(l.Event))))
	if l.Outcome != "" {
		b.WriteString(" " + w.outcome(l.Outcome))
	}
	if l.Reason != 0 {
		b.WriteString(" " + l.Reason.String())
	}
	if what := What(l); what != "" {
		b.WriteString(" " + what)
	}
	return b.String()
}

func (w *Writer) outcome(s string) string {
	switch s {
	case audit.OutcomeDeny:
		return w.paint("1;31", s)
	case audit.OutcomeFail:
		return w.paint("1;33", s)
	case audit.OutcomeOK, audit.OutcomeAllow:
		return w.paint("32", s)
	}
	return OneLine(s)
}

func (w *Writer) paint(colour, s string) string {
	if !w.Colour || colour == "" {
		return s
	}
	return "\x1b[" + colour + "m" + s + "\x1b[0m"
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
