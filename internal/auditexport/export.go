// Package auditexport writes audit records in the forms that other systems read: as they are (JSON lines), as OCSF
// events, as CSV for spreadsheets, and as CEF. Each record is one line, whatever a kid has written into it.
package auditexport

import (
	"bufio"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"tagout/internal/auditview"
)

// Formats.
const (
	JSONL = "jsonl"
	OCSF  = "ocsf"
	CSV   = "csv"
	CEF   = "cef"
)

// Formats lists them.
func Formats() []string { return []string{JSONL, OCSF, CSV, CEF} }

// Writer writes records. Close writes what is held back, and not to whatever is behind it.
type Writer interface {
	Write(*auditview.Line) error
	Close() error
}

// New returns a writer of the format; version is Tagout's.
func New(format string, w io.Writer, version string) (Writer, error) {
	out := bufio.NewWriterSize(w, 64<<10)
	switch format {
	case JSONL:
		return lines{out, func(l *auditview.Line) ([]byte, error) { return l.Raw, nil }}, nil
	case OCSF:
		return lines{out, func(l *auditview.Line) ([]byte, error) { return json.Marshal(Event(l, version)) }}, nil
	case CEF:
		return lines{out, func(l *auditview.Line) ([]byte, error) { return []byte(cefLine(l, version)), nil }}, nil
	case CSV:
		c := &table{out: out, csv: csv.NewWriter(out)}
		return c, c.csv.Write(columns)
	}
	return nil, fmt.Errorf("%q is no format: use %s", format, strings.Join(Formats(), ", "))
}

// lines writes a line a record.
type lines struct {
	*bufio.Writer
	form func(*auditview.Line) ([]byte, error)
}

func (w lines) Write(l *auditview.Line) error {
	raw, err := w.form(l)
	if err != nil {
		return fmt.Errorf("writing record %s: %w", l.ID, err)
	}
	w.Writer.Write(raw) // the error comes back below
	return w.WriteByte('\n')
}

func (w lines) Close() error { return w.Flush() }

// table writes CSV (RFC 4180).
type table struct {
	out *bufio.Writer
	csv *csv.Writer
}

var columns = []string{
	"time", "id", "instance", "daemon", "event", "outcome", "reason", "kid", "session", "card", "actor", "destination", "address", "port", "protocol",
	"process", "pid", "bytes_up", "bytes_down", "count", "detail", "fields",
}

func (t *table) Write(l *auditview.Line) error {
	r := &l.Record
	row := []string{r.Time.UTC().Format(time.RFC3339Nano), r.ID, r.Instance, r.Daemon, r.Event, r.Outcome, reasonOf(l), r.Kid, r.Session, r.Card, r.Actor}
	if d := r.Dst; d != nil {
		row = append(row, d.Name, address(l), number(uint64(d.Port)), d.Proto)
	} else {
		row = append(row, "", "", "", "")
	}
	if p := r.Process; p != nil {
		row = append(row, p.Comm, number(uint64(max(0, p.PID))))
	} else {
		row = append(row, "", "")
	}
	if b := r.Bytes; b != nil {
		row = append(row, strconv.FormatInt(b.Up, 10), strconv.FormatInt(b.Down, 10))
	} else {
		row = append(row, "", "")
	}
	row = append(row, number(r.Count), r.Detail, more(l))
	for i := range row {
		row[i] = inert(row[i])
	}
	return t.csv.Write(row)
}

func (t *table) Close() error {
	t.csv.Flush()
	if err := t.csv.Error(); err != nil {
		return err
	}
	return t.out.Flush()
}

// inert returns a cell that no spreadsheet takes for a formula, as OWASP's page on CSV injection has it: what begins like
// one gets an apostrophe. Control characters, which some take for the end of a cell, become spaces.
func inert(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
	if begin := strings.TrimLeft(s, " \u00a0\ufeff"); begin != "" && strings.ContainsRune("=+-@|%\uff1d\uff0b\uff0d\uff20", []rune(begin)[0]) {
		return "'" + s
	}
	return s
}

// more is the record's fields, and what of it this build does not know, as one text.
func more(l *auditview.Line) string {
	all := map[string]string{}
	maps.Copy(all, l.Extra())
	maps.Copy(all, l.Fields)
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(all)) {
		parts = append(parts, k+"="+strconv.Quote(all[k]))
	}
	return strings.Join(parts, " ")
}

func reasonOf(l *auditview.Line) string {
	if l.Reason == 0 {
		return ""
	}
	return l.Reason.String()
}

// address is where the destination really is, or else as the kid saw it.
func address(l *auditview.Line) string {
	switch d := l.Dst; {
	case d == nil:
	case d.Real.IsValid():
		return d.Real.String()
	case d.Addr.IsValid():
		return d.Addr.String()
	}
	return ""
}

func number(n uint64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatUint(n, 10)
}
