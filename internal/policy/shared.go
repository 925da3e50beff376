package policy

import (
	_ "embed"
	"iter"
	"strings"
	"sync"
)

// sharedText is those entries of the public suffix list that lie below a name with one owner, such as
// s3.amazonaws.com below amazonaws.com; a star in front stands for any one label. Entries that lie below
// another entry alone are not needed: no pattern on that one loads. The list is at hand because the library
// cannot be asked for its entries, and would be one import more in what stops kids:
// `go test ./internal/policy -run Shared -update` writes it.
//
//go:embed shared.txt
var sharedText string

// sharedList is made when it is first asked for: most policies have no pattern.
var sharedList = sync.OnceValue(func() map[string]bool {
	set := map[string]bool{}
	for entry := range strings.FieldsSeq(sharedText) {
		set[entry] = true
	}
	return set
})

// bases returns the patterns with stars that can stand for a canonical name, the most exact first: "*.", then
// "**." with the longest name behind it.
func bases(name string) iter.Seq2[Span, string] {
	return func(yield func(Span, string) bool) {
		_, parent, _ := strings.Cut(name, ".")
		if parent == "" || !yield(OneLabel, parent) {
			return
		}
		for ; parent != ""; _, parent, _ = strings.Cut(parent, ".") {
			if !yield(AnyLabels, parent) {
				return
			}
		}
	}
}

// publicBelow returns the public suffix between base and a canonical name below it, "" where there is none.
// Whoever owns base does not own such a name: anybody can have one under the suffix. So a pattern on base never
// stands for it, however the pattern came into the policy.
func publicBelow(name, base string) string {
	set := sharedList()
	for at := name; len(at) > len(base); {
		_, parent, _ := strings.Cut(at, ".")
		if set[at] || set["*."+parent] {
			return at
		}
		at = parent
	}
	return ""
}

// SharedUnder returns a public suffix that a canonical pattern, whose own name is none, reaches: the shortest
// of several, "" where there is none. A star in front of it stands for any one label.
func SharedUnder(pattern string) string {
	name, span := splitPattern(pattern)
	if span == ExactHost {
		return ""
	}
	found := ""
	for entry := range sharedList() {
		under, ok := strings.CutSuffix(entry, "."+name)
		if !ok || span == OneLabel && strings.Contains(under, ".") {
			continue
		}
		if found == "" || len(entry) < len(found) || len(entry) == len(found) && entry < found {
			found = entry
		}
	}
	return found
}

// stands says whether an allow rule's canonical pattern stands for a canonical name.
func stands(pattern, name string) bool {
	base, span := splitPattern(pattern)
	return Covers(pattern, name) && (span == ExactHost || publicBelow(name, base) == "")
}

// outOfReach returns the public suffix that keeps every allow rule's pattern from standing for a canonical
// name, and the pattern: "" where none would.
func (p *Policy) outOfReach(name string) (suffix, pattern string) {
	for span, base := range bases(name) {
		if p.allow[span][base] == nil {
			continue
		}
		if suffix = publicBelow(name, base); suffix != "" {
			return suffix, span.String() + base
		}
	}
	return "", ""
}
