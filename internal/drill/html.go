package drill

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"slices"
	"strings"
	"time"

	"tagout/internal/wire"
)

//go:embed report.html.tmpl
var pageText string

// pageTemplate escapes whatever it is given: names and messages come from cards, kids and people.
var pageTemplate = template.Must(template.New("report").Funcs(template.FuncMap{
	"millis": millis,
	"offset": func(d time.Duration) string { return fmt.Sprintf("%+.1f ms", float64(d.Microseconds())/1000) },
	"when":   func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") },
	"lower":  func(v any) string { return strings.ToLower(fmt.Sprint(v)) },
	"round":  func(d time.Duration) string { return d.Round(100 * time.Millisecond).String() },
}).Parse(pageText))

// page is what the template shows.
type page struct {
	*Report
	Signer    string
	Charts    []chart
	Summaries []Summary // of techniques
	Controls  []Summary
	Knockouts []knockoutRow
	Shown     *Result // the run whose story is told
	Counts    string
}

type knockoutRow struct {
	Name, What, Times, Grace, Verdict string
	Degraded                          []string
}

// HTML is the report as one page that needs nothing else. signer is the name of the key that signs it.
func (rep *Report) HTML(signer string) ([]byte, error) {
	p := page{Report: rep, Signer: signer, Counts: rep.counts()}
	for _, s := range rep.Summaries() {
		switch s.Kind {
		case KindStop:
			p.Summaries = append(p.Summaries, s)
		case KindControl:
			p.Controls = append(p.Controls, s)
		}
	}
	for _, l := range wire.AllLayers() {
		p.Charts = append(p.Charts, newChart(l, rep.SLA[l], p.Summaries))
	}
	p.Knockouts = rep.knockoutRows()
	p.Shown = rep.exemplary()
	var out bytes.Buffer
	if err := pageTemplate.Execute(&out, p); err != nil {
		return nil, fmt.Errorf("writing the drill's page: %w", err)
	}
	return out.Bytes(), nil
}

func (rep *Report) counts() string {
	n := map[Kind]int{}
	for _, r := range rep.Results {
		if r.Skipped == "" {
			n[r.Kind]++
		}
	}
	return fmt.Sprintf("%d runs of %d techniques, %d control runs, %d knock-outs", n[KindStop], len(rep.Techniques), n[KindControl], n[KindKnockout])
}

func (rep *Report) knockoutRows() []knockoutRow {
	_, what := Knockouts()
	var out []knockoutRow
	for _, r := range rep.Results {
		if r.Kind != KindKnockout {
			continue
		}
		row := knockoutRow{Name: r.Case, What: what[r.Case], Degraded: r.Degraded, Verdict: string(Pass)}
		var times []string
		for _, l := range r.Layers {
			times = append(times, fmt.Sprintf("%s %s", l.Layer, l.shown()))
			if grace := l.SLA - rep.SLA[l.Layer]; grace > 0 {
				row.Grace = grace.String()
			}
			if l.Verdict == Fail || l.Verdict == Void && row.Verdict == string(Pass) {
				row.Verdict = string(l.Verdict)
			}
			if l.Why != "" {
				row.Degraded = append(row.Degraded, string(l.Layer)+": "+l.Why)
			}
		}
		row.Times = strings.Join(times, ", ")
		if r.Skipped != "" {
			row.Verdict, row.Times = "not run", r.Skipped
		}
		out = append(out, row)
	}
	return out
}

// exemplary is the run whose story is told: one that failed, or else the first of everything stopped together.
func (rep *Report) exemplary() *Result {
	var found *Result
	for i := range rep.Results {
		r := &rep.Results[i]
		if len(r.Story) == 0 || r.Kind == KindControl {
			continue
		}
		if slices.ContainsFunc(r.Layers, func(l LayerResult) bool { return l.Verdict == Fail }) {
			return r
		}
		if found == nil || len(found.Layers) < len(wire.AllLayers()) && len(r.Layers) == len(wire.AllLayers()) {
			found = r
		}
	}
	return found
}
