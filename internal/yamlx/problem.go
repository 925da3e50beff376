// Package yamlx reads small YAML files that people write: every key must be known, every value must have
// the type that is asked for, and everything that is wrong is reported at once, each problem with its line
// and column and with what to write instead. Anchors, aliases, tags, merge keys, several documents and deep
// nesting are refused: a file means what stands in it. Problems never quote more of a file than a key or a
// short value, and values that may be secret are not quoted at all.
package yamlx

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// MaxBytes is the size up to which a file is read at all.
const MaxBytes = 64 << 10

// maxProblems is how many problems are kept; a file that has more is not worth listing in full.
const maxProblems = 100

// Problem is one thing that is wrong with a file.
type Problem struct {
	File string
	Line int    // from 1
	Col  int    // from 1, in characters
	What string // what is wrong
	Fix  string // what to do: "write … instead"
}

func (p Problem) Error() string {
	return fmt.Sprintf("%s:%d:%d: %s: %s", p.File, p.Line, p.Col, p.What, p.Fix)
}

// Problems is everything that is wrong with a file, in the order of the file. It is never empty as an error.
type Problems []Problem

func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.Error()
	}
	return strings.Join(lines, "\n")
}

// Doc collects the problems of one file. It is used by one goroutine.
type Doc struct {
	file     string
	problems Problems
}

func (d *Doc) add(line, col int, fix, what string) {
	p := Problem{File: d.file, Line: max(line, 1), Col: max(col, 1), What: what, Fix: fix}
	if len(d.problems) < maxProblems && !slices.Contains(d.problems, p) {
		d.problems = append(d.problems, p)
	}
}

// Err returns the problems as a Problems, sorted, or nil where there are none.
func (d *Doc) Err() error {
	if len(d.problems) == 0 {
		return nil
	}
	slices.SortStableFunc(d.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Col, b.Col), cmp.Compare(a.What, b.What))
	})
	return d.problems
}

// Quote returns s in quotes for a message: escaped, and cut where it is long.
func Quote(s string) string {
	const most = 60
	if r := []rune(s); len(r) > most {
		s = string(r[:most]) + "…"
	}
	return fmt.Sprintf("%q", s)
}

// Nearest returns the known word that is closest to got, or "" where none is close enough to be meant.
func Nearest(got string, known []string) string {
	best, bestDist := "", 1+max(1, len(got)/3)
	for _, k := range known {
		d := distance(strings.ToLower(got), strings.ToLower(k))
		if d < bestDist {
			best, bestDist = k, d
		}
	}
	return best
}

// distance is Levenshtein's, cut short for words that no key is as long as.
func distance(a, b string) int {
	const most = 64
	if len(a) > most || len(b) > most {
		return len(a) + len(b)
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diagonal, row[j+1] = row[j+1], min(diagonal+cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
