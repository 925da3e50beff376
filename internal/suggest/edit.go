package suggest

import (
	"regexp"
	"slices"
	"strings"

	"tagout/internal/card"
)

var (
	egressRE  = regexp.MustCompile(`^egress:\s*(#.*)?\s*$`)
	anyRE     = regexp.MustCompile(`^egress:`)
	allowRE   = regexp.MustCompile(`^( +)allow:\s*(#.*)?\s*$`)
	entryRE   = regexp.MustCompile(`^( *)- `)
	contentRE = regexp.MustCompile(`^ *[^ #\r\n]`)
)

// section returns the lines [from, to) of the top-level key whose line matches re: up to the next line that
// begins at the left, without blank lines and comments before it. ok is false where there is none.
func section(lines []string, re *regexp.Regexp) (from, to int, ok bool) {
	from = slices.IndexFunc(lines, re.MatchString)
	if from < 0 {
		return 0, 0, false
	}
	to = from + 1
	for i := to; i < len(lines); i++ {
		if !contentRE.MatchString(lines[i]) {
			continue
		}
		if lines[i][0] != ' ' {
			break
		}
		to = i + 1
	}
	return from, to, true
}

// appendRules adds entries to the block list `allow:`. ok is false where the card has none to extend.
func appendRules(text string, _ *card.Card, added []Addition) (string, bool) {
	lines := strings.SplitAfter(text, "\n")
	from, to, ok := section(lines, egressRE)
	if !ok {
		return "", false
	}
	at := slices.IndexFunc(lines[from:to], allowRE.MatchString)
	if at < 0 {
		return "", false
	}
	at += from
	indent, last := "", at
	for i := at + 1; i < to; i++ {
		if !contentRE.MatchString(lines[i]) {
			continue
		}
		if indent == "" {
			m := entryRE.FindStringSubmatch(lines[i])
			if m == nil {
				return "", false
			}
			indent = m[1]
		}
		key := len(allowRE.FindStringSubmatch(lines[at])[1])
		depth := len(lines[i]) - len(strings.TrimLeft(lines[i], " "))
		if depth < key || depth == key && !entryRE.MatchString(lines[i]) {
			break
		}
		last = i
	}
	if last == at {
		return "", false
	}
	out := slices.Clone(lines[:last+1])
	if !strings.HasSuffix(out[last], "\n") {
		out[last] += "\n"
	}
	out = append(out, entries(indent, added)...)
	return strings.Join(append(out, lines[last+1:]...), ""), true
}

// entries are the added rules as lines.
func entries(indent string, added []Addition) []string {
	var out []string
	for _, a := range added {
		for i, line := range card.RenderAllow(a.Rule, card.Expiry{}) {
			if i == 0 {
				line += " # " + a.Note
			}
			out = append(out, indent+line+"\n")
		}
	}
	return out
}

// rewriteEgress writes the whole section anew, in block style, in the place of the old one or at the end.
func rewriteEgress(text string, c *card.Card, added []Addition) (string, bool) {
	lines := strings.SplitAfter(text, "\n")
	from, to, ok := section(lines, anyRE)
	if !ok {
		from, to = len(lines), len(lines)
	}
	out := slices.Clone(lines[:from])
	if from > 0 && out[from-1] != "" && !strings.HasSuffix(out[from-1], "\n") {
		out[from-1] += "\n"
	}
	out = append(out, "egress:\n", "  allow:\n")
	for i, r := range c.Egress.Allow {
		out = append(out, "    "+strings.Join(card.RenderAllow(r, c.Expiries[i]), "\n    ")+"\n")
	}
	out = append(out, entries("    ", added)...)
	if len(c.Egress.Deny) > 0 {
		out = append(out, "  deny:\n")
	}
	for _, r := range c.Egress.Deny {
		out = append(out, "    "+strings.Join(card.RenderDeny(r), "\n    ")+"\n")
	}
	return strings.Join(append(out, lines[to:]...), ""), true
}
