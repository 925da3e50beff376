package auditexport

import (
	"strconv"
	"strings"
	"unicode/utf8"

	"tagout/internal/audit"
	"tagout/internal/auditview"
)

// cefLine writes a record in ArcSight's Common Event Format, version 0 (CEF Implementation Standard, version 25).
func cefLine(l *auditview.Line, version string) string {
	r := &l.Record
	head := []string{"CEF:0", "Tagout", "Tagout", cefHead(version), cefHead(r.Event), cefHead(title(l)), strconv.Itoa(cefSeverity(r)), ""}
	var ext []string
	add := func(key, value string) {
		if value != "" {
			ext = append(ext, key+"="+cefValue(value))
		}
	}
	add("rt", strconv.FormatInt(r.Time.UnixMilli(), 10))
	add("externalId", r.ID)
	add("deviceProcessName", r.Daemon)
	add("dvchost", r.Instance)
	add("cat", auditview.Topic(r.Event))
	add("outcome", r.Outcome)
	add("reason", reasonOf(l))
	add("suser", r.Actor)
	add("cnt", number(r.Count))
	if d := r.Dst; d != nil {
		add("dhost", d.Name)
		if a := address(l); strings.Contains(a, ":") {
			add("c6a3", a)
			add("c6a3Label", "Destination IPv6 Address")
		} else {
			add("dst", a)
		}
		add("dpt", number(uint64(d.Port)))
		add("app", d.Proto)
	}
	if p := r.Process; p != nil {
		add("spid", number(uint64(max(0, p.PID))))
		add("sproc", p.Comm)
	}
	if b := r.Bytes; b != nil {
		add("out", strconv.FormatInt(b.Up, 10))
		add("in", strconv.FormatInt(b.Down, 10))
	}
	if paths := auditview.Paths(r); len(paths) > 0 {
		add("filePath", paths[0])
	}
	for i, c := range [][2]string{{"kid", r.Kid}, {"session", r.Session}, {"card", r.Card}, {"stop", r.Fields["stop"]}, {"fields", more(l)}} {
		if c[1] != "" {
			add("cs"+strconv.Itoa(i+1), c[1])
			add("cs"+strconv.Itoa(i+1)+"Label", c[0])
		}
	}
	add("msg", r.Detail)
	return strings.Join(head, "|") + strings.Join(ext, " ")
}

// title is the event in words.
func title(l *auditview.Line) string {
	return strings.TrimSpace(strings.NewReplacer(".", " ", "-", " ").Replace(l.Event) + " " + l.Outcome)
}

func cefSeverity(r *audit.Record) int {
	switch r.Outcome {
	case audit.OutcomeDeny:
		return 7
	case audit.OutcomeFail:
		return 5
	}
	if auditview.Topic(r.Event) == auditview.Stop {
		return 8
	}
	return 2
}

// cefText is a text without line ends and control characters, which the format has no place for.
func cefText(s string, newline string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case r == '\n' || r == '\r' || r == 0x85 || r == 0x2028 || r == 0x2029:
			b.WriteString(newline)
		case r < ' ' || r >= 0x7f && r < 0xa0:
			b.WriteRune(utf8.RuneError)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

// cefHead escapes a field of the head: a backslash and a pipe.
func cefHead(s string) string {
	return cefText(strings.NewReplacer(`\`, `\\`, `|`, `\|`).Replace(s), " ")
}

// cefValue escapes a value of the extension: a backslash, an equals sign and line ends.
func cefValue(s string) string {
	return cefText(strings.NewReplacer(`\`, `\\`, `=`, `\=`).Replace(s), `\n`)
}
