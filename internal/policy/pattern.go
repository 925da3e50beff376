package policy

import "strings"

// Span says for how many labels the stars of a host pattern stand.
type Span uint8

// Spans. No star stands for no label: "*.example.com" and "**.example.com" both leave example.com out.
const (
	ExactHost Span = iota // no star: the name itself
	OneLabel              // "*.": exactly one label in front of the name
	AnyLabels             // "**.": one label or more

	spans = 3
)

func (s Span) String() string { return [spans]string{"", "*.", "**."}[s] }

// Pattern reads a rule's host: the canonical name behind the stars and for how many labels they stand. A star
// anywhere else than in front is an error. span.String() + name is the pattern's one spelling.
func Pattern(raw string) (name string, span Span, err error) {
	rest := raw
	if after, ok := strings.CutPrefix(raw, "**."); ok {
		rest, span = after, AnyLabels
	} else if after, ok := strings.CutPrefix(raw, "*."); ok {
		rest, span = after, OneLabel
	}
	if strings.Contains(rest, "*") {
		return "", ExactHost, nameError(raw, `stars may only stand for whole labels in front: "*.example.com" for one, "**.example.com" for any number`)
	}
	name, err = Name(rest)
	if err != nil {
		return "", ExactHost, err
	}
	return name, span, nil
}

// splitPattern takes a canonical pattern apart.
func splitPattern(pattern string) (name string, span Span) {
	if rest, ok := strings.CutPrefix(pattern, "**."); ok {
		return rest, AnyLabels
	}
	if rest, ok := strings.CutPrefix(pattern, "*."); ok {
		return rest, OneLabel
	}
	return pattern, ExactHost
}

// Covers says whether every name that narrow stands for is one that wide stands for. Both are canonical
// patterns; a name is a pattern that stands for itself.
func Covers(wide, narrow string) bool {
	name, span := splitPattern(wide)
	inner, innerSpan := splitPattern(narrow)
	switch {
	case span == ExactHost:
		return innerSpan == ExactHost && inner == name
	case span == OneLabel && innerSpan == ExactHost:
		_, parent, found := strings.Cut(inner, ".")
		return found && parent == name
	case span == OneLabel:
		return innerSpan == OneLabel && inner == name
	case innerSpan == ExactHost:
		return strings.HasSuffix(inner, "."+name)
	}
	return inner == name || strings.HasSuffix(inner, "."+name)
}
