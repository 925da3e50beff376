package lessons

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode"

	"tagout/internal/audit"
	"tagout/internal/wire"
)

// keyBlock is a private key, or the beginning of one, whatever stands in it: nobody needs the rest of such a note.
var keyBlock = regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|$)`)

// fill makes l what is written: without control characters and secrets, and with what the kid was refused.
func (s *Store) fill(l *wire.Lesson, secrets []string) error {
	if len(l.Text) > wire.MaxLesson {
		return fmt.Errorf("%w: it has %d bytes, of at most %d: say it shorter", ErrInvalid, len(l.Text), wire.MaxLesson)
	}
	l.Text = cut(strings.TrimSpace(audit.Redact(keyBlock.ReplaceAllString(clean(l.Text, true), audit.Redacted), secrets...)), wire.MaxLesson)
	if l.Text == "" {
		return fmt.Errorf("%w: there is nothing in it", ErrInvalid)
	}
	if s.logs != "" {
		records, _, err := audit.Recent(s.logs, l.Kid, l.Session, l.Created, maxLogs)
		if err != nil {
			return fmt.Errorf("looking up what the kid was refused: %w", err)
		}
		l.Denied, l.DeniedMore = denied(records)
	}
	for _, f := range fields(l) {
		*f = cut(audit.Redact(clean(*f, false), secrets...), maxField)
	}
	for i := range l.Denied { // names of hosts are no longer
		l.Denied[i].To = cut(l.Denied[i].To, maxPlace)
	}
	l.Created, l.Destroyed = l.Created.UTC().Truncate(time.Second), l.Destroyed.UTC().Truncate(time.Second)
	return nil
}

// fields are l's texts of one line.
func fields(l *wire.Lesson) []*string {
	out := []*string{&l.Kid, &l.Session, &l.Card, &l.Purpose, &l.Owner, &l.By, &l.Cause, &l.Reason}
	for i := range l.Unused {
		out = append(out, &l.Unused[i])
	}
	for i := range l.Wide {
		w := &l.Wide[i]
		out = append(out, &w.Secret, &w.OnlyMethod)
		for _, list := range [][]string{w.Hosts, w.Methods, w.Paths} {
			for j := range list {
				out = append(out, &list[j])
			}
		}
	}
	for i := range l.Denied {
		out = append(out, &l.Denied[i].To, &l.Denied[i].Reason)
	}
	return out
}

// clean replaces what is no text: bytes that are no UTF-8, control characters, and characters that steer how others are
// shown. Lines and tabs stay where lines says so.
func clean(s string, lines bool) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, string(unicode.ReplacementChar)), "\r\n", "\n")
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			if lines {
				return r
			}
			return ' '
		case unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Co, unicode.Cs):
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// cut shortens s to so many bytes, between characters.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// denied sums up where the kid was refused, in the order of the first time.
func denied(records []audit.Record) (_ []wire.DeniedDest, more int) {
	at, places := map[string]int{}, []wire.DeniedDest{}
	for _, r := range records {
		if r.Outcome != audit.OutcomeDeny || r.Dst == nil {
			continue
		}
		to := r.Dst.Name
		if to == "" && r.Dst.Addr.IsValid() {
			to = r.Dst.Addr.String()
		}
		if r.Dst.Port != 0 {
			to = fmt.Sprintf("%s:%d", to, r.Dst.Port)
		}
		key := to + " " + r.Reason.String()
		i, known := at[key]
		switch {
		case !known && len(places) == maxDenied:
			at[key] = -1
			more++
			continue
		case !known:
			i = len(places)
			at[key] = i
			places = append(places, wire.DeniedDest{To: to, Reason: r.Reason.String()})
		case i < 0:
			continue
		}
		places[i].Count += max(r.Count, 1)
	}
	return places, more
}

// fileName is the n-th name for the note: the day, and of the purpose no more than makes a harmless name.
func fileName(l *wire.Lesson, n int) string {
	const most = 48
	var b strings.Builder
	for _, r := range strings.ToLower(l.Purpose) {
		switch {
		case b.Len() >= most:
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9':
			b.WriteRune(r)
		case b.Len() > 0 && !strings.HasSuffix(b.String(), "-"):
			b.WriteByte('-')
		}
	}
	slug := strings.Trim(b.String(), "-")
	if slug == "" {
		slug = "kid"
	}
	if n > 1 {
		slug = fmt.Sprintf("%s-%d", slug, n)
	}
	return l.Destroyed.Format(time.DateOnly) + "-" + slug + ".md"
}

// fence begins and ends the front matter.
const fence = "---\n"

// render is the note's file: front matter, each value of which is JSON on one line, which YAML reads too, and the text.
// No value can therefore end the front matter or begin another.
func render(l *wire.Lesson) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // half the bytes, and easier to read
	b.WriteString(fence)
	for _, field := range []struct {
		name  string
		value any
	}{
		{"kid", l.Kid}, {"session", l.Session}, {"card", l.Card}, {"purpose", l.Purpose}, {"owner", l.Owner}, {"by", l.By},
		{"created", l.Created}, {"destroyed", l.Destroyed}, {"state", l.State}, {"cause", l.Cause}, {"reason", l.Reason},
		{"denied", l.Denied}, {"denied_more", l.DeniedMore},
		{"unused", l.Unused}, {"wide", l.Wide},
	} {
		b.WriteString(field.name + ": ")
		if err := enc.Encode(field.value); err != nil {
			b.WriteString("null\n") // a time outside of all calendars
		}
	}
	b.WriteString(fence + "\n" + l.Text + "\n")
	return b.String()
}

var errNoNote = errors.New("it is no note")

// parse reads what render wrote.
func parse(raw string) (wire.Lesson, error) {
	var l wire.Lesson
	rest, ok := strings.CutPrefix(raw, fence)
	front, text, found := strings.Cut(rest, "\n"+fence)
	if !ok || !found {
		return l, errNoNote
	}
	values := map[string]json.RawMessage{}
	for line := range strings.SplitSeq(front, "\n") {
		name, value, ok := strings.Cut(line, ": ")
		if _, twice := values[name]; !ok || twice || !json.Valid([]byte(value)) {
			return l, errNoNote
		}
		values[name] = json.RawMessage(value)
	}
	whole, err := json.Marshal(values)
	if err == nil {
		err = json.Unmarshal(whole, &l)
	}
	if err != nil || l.Session == "" {
		return wire.Lesson{}, errors.Join(errNoNote, err)
	}
	// Whoever wrote to the file since may have been careless.
	l.Text = strings.TrimSpace(clean(text, true))
	for _, f := range fields(&l) {
		*f = clean(*f, false)
	}
	return l, nil
}
