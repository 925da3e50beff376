package suggest

import (
	"fmt"
	"strings"
)

// contextLines is how many unchanged lines stand around a change, as in diff -u.
const contextLines = 3

// unified returns the difference of two texts as one hunk; patch and git apply read it. The texts differ in
// one place at most, which is what an addition makes.
func unified(file, old, new string) string {
	a, b := splitLines(old), splitLines(new)
	head := 0
	for head < len(a) && head < len(b) && a[head] == b[head] {
		head++
	}
	tail := 0
	for tail < len(a)-head && tail < len(b)-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	if head == len(a) && head == len(b) {
		return ""
	}
	from, before := max(head-contextLines, 0), min(tail, contextLines)
	oldEnd, newEnd := len(a)-tail, len(b)-tail
	var out strings.Builder
	fmt.Fprintf(&out, "--- %s\n+++ %s\n@@ -%s +%s @@\n", file, file, span(from, oldEnd+before-from), span(from, newEnd+before-from))
	put := func(mark string, lines []string) {
		for _, l := range lines {
			out.WriteString(mark + l)
			if !strings.HasSuffix(l, "\n") {
				out.WriteString("\n\\ No newline at end of file\n")
			}
		}
	}
	put(" ", a[from:head])
	put("-", a[head:oldEnd])
	put("+", b[head:newEnd])
	put(" ", a[oldEnd:oldEnd+before])
	return out.String()
}

// splitLines returns the lines with their ends; the last one may have none.
func splitLines(s string) []string {
	lines := strings.SplitAfter(s, "\n")
	if lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	return lines
}

// span is a hunk's range: an empty one begins at the line before it.
func span(from, n int) string {
	if n == 0 {
		return fmt.Sprintf("%d,0", from)
	}
	return fmt.Sprintf("%d,%d", from+1, n)
}
