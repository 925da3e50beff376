package drill

import (
	"fmt"
	"slices"
	"strings"
)

// Row is one technique, knock-out or control run of a table for people. Cells are the slowest runs of session
// alone, network alone, credential alone and all together, in milliseconds.
type Row struct {
	Kind    Kind
	Name    string
	Cells   [4]string
	Verdict string
}

// Rows sums the report up by technique; knock-outs and control runs have a row each.
func (rep *Report) Rows() []Row {
	var out []Row
	at := map[string]int{}
	for _, r := range rep.Results {
		name := r.Technique
		if r.Kind != KindStop {
			name = string(r.Kind) + ": " + r.Case
		}
		if _, ok := at[name]; !ok {
			at[name] = len(out)
			out = append(out, Row{Kind: r.Kind, Name: name, Verdict: string(Pass)})
			if r.Skipped != "" {
				out[len(out)-1].Verdict = r.Skipped
			}
		}
	}
	names := Cases()
	together := map[string][]string{}
	for _, s := range rep.Summaries() {
		name, cell := s.Technique, slices.IndexFunc(names, func(c Case) bool { return c.Name == s.Case })
		if s.Kind != KindStop {
			name, cell = string(s.Kind)+": "+s.Case, len(names)-1
		}
		row := &out[at[name]]
		if cell >= 0 && cell < len(names)-1 {
			row.Cells[cell] = s.worst()
		} else {
			together[name] = append(together[name], s.worst())
			row.Cells[len(names)-1] = strings.Join(together[name], " / ")
		}
		if s.Verdict == Fail || s.Verdict == Void && row.Verdict == string(Pass) {
			row.Verdict = s.judgement()
		}
	}
	return out
}

// worst is the slowest run in milliseconds.
func (s Summary) worst() string {
	switch {
	case s.Verdict == Void:
		return "-"
	case s.Stopped < s.Runs:
		return "never"
	}
	return fmt.Sprintf("%.1f", float64(s.Max.Microseconds())/1000)
}
