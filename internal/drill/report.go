package drill

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"tagout/internal/wire"
)

// Report is a whole drill.
type Report struct {
	Format      int                          `json:"format"` // 1
	Instance    string                       `json:"instance"`
	By          string                       `json:"by"` // who ran it
	Started     time.Time                    `json:"started"`
	Took        time.Duration                `json:"took_ns"`
	Runs        int                          `json:"runs"`      // of each case
	Processes   int                          `json:"processes"` // that had to be seen
	SLA         map[wire.Layer]time.Duration `json:"sla_ns"`
	Environment Environment                  `json:"environment"`
	Card        Digest                       `json:"card"`
	Box         Digest                       `json:"box"` // its configuration
	Techniques  []Technique                  `json:"techniques"`
	Whole       bool                         `json:"whole"` // every technique, knock-out and control run
	Results     []Result                     `json:"results"`
	Verdict     Verdict                      `json:"verdict"`
	Why         string                       `json:"why,omitempty"` // the verdict is not PASS
	Passed      bool                         `json:"passed"`
}

// Digest names a file by what is in it.
type Digest struct {
	Name   string `json:"name"`
	SHA256 string `json:"sha256"` // hex
}

func digest(name string, content []byte) Digest {
	sum := sha256.Sum256(content)
	return Digest{name, hex.EncodeToString(sum[:])}
}

func (c Config) newReport() *Report {
	rep := &Report{
		Format: 1, Instance: c.Inst.Name(), By: c.By, Started: time.Now().UTC(), Runs: c.Runs, Processes: c.Processes, SLA: c.SLA,
		Environment: environment(c.Version), Card: digest(c.card.Name, c.Card), Techniques: c.Techniques,
	}
	if raw, err := os.ReadFile(c.Inst.BoxConfig()); err == nil { // a box without one is named by nothing
		rep.Box = digest("box.yaml", raw)
	}
	names, _ := Knockouts()
	rep.Whole = c.AllTechniques && c.Controls && len(c.Cases) == len(Cases()) && len(c.Knockouts) == len(names)
	return rep
}

// keepStories is how many runs of a case keep their story and killswitchd's own report where all went well: one
// shows how it goes, and the rest would make a long report longer.
const keepStories = 1

func (rep *Report) add(r Result) {
	if r.Kind == KindStop && r.Run > keepStories && !slices.ContainsFunc(r.Layers, func(l LayerResult) bool { return l.Verdict != Pass }) {
		r.Story, r.Report = nil, nil
	}
	rep.Results = append(rep.Results, r)
}

// close judges the whole; ended says whether the drill got to its end.
func (rep *Report) close(ended bool) {
	rep.Took = time.Since(rep.Started) // monotonic: a knock-out may have stepped the wall clock
	rep.Verdict, rep.Why = rep.judge(ended)
	rep.Passed = rep.Verdict == Pass
	rep.Whole = rep.Whole && len(rep.skipped()) == 0
}

func (rep *Report) judge(ended bool) (Verdict, string) {
	if !ended {
		return Void, "it was not run to its end"
	}
	if why := rep.controlTrouble(); why != "" {
		return Void, why
	}
	void, judged := "", 0
	for _, s := range rep.Summaries() {
		if s.Kind == KindControl {
			continue
		}
		judged++
		name := s.Technique + ", " + s.Case + ", " + string(s.Layer) + " layer"
		switch s.Verdict {
		case Fail:
			return Fail, name
		case Void:
			void = name + ": it was not seen at work"
		}
	}
	if judged == 0 {
		return Void, strings.Join(append([]string{"nothing was judged"}, rep.skipped()...), "; ")
	}
	if void != "" {
		return Void, void
	}
	return Pass, ""
}

// skipped says what was not run, and why.
func (rep *Report) skipped() (out []string) {
	for _, r := range rep.Results {
		if r.Skipped != "" {
			out = append(out, r.Case+": "+r.Skipped)
		}
	}
	return out
}

// Table writes what people read at the end. A drill of one technique has one row a layer and case; where a case
// ran more than once, a row shows the p50, p99 and maximum of its runs. A larger one has a row a technique.
func (rep *Report) Table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(rep.Techniques) == 1 {
		rep.longRows(t)
	} else {
		rep.shortRows(t)
	}
	return t.Flush()
}

func (rep *Report) longRows(t io.Writer) {
	fmt.Fprintln(t, "STOP\tLAYER\tACKED\tOBSERVED\tSLA\tVERDICT\tSEEN BY")
	for _, s := range rep.Summaries() {
		name := s.Case
		if s.Kind != KindStop {
			name = string(s.Kind) + ": " + name
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", name, s.Layer, millis(s.Acked), s.shown(), millis(s.SLA), s.judgement(), evidence[s.Layer])
	}
	for _, s := range rep.skipped() {
		fmt.Fprintln(t, s)
	}
}

// shortRows has the slowest run of each case, the layers in their order.
func (rep *Report) shortRows(t io.Writer) {
	fmt.Fprintln(t, "MILLISECONDS, MAX\tSESSION ALONE\tNETWORK ALONE\tCREDENTIAL ALONE\tALL TOGETHER\tVERDICT")
	for _, row := range rep.Rows() {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", row.Name, row.Cells[0], row.Cells[1], row.Cells[2], row.Cells[3], row.Verdict)
	}
}

// Summary is all runs of one layer in one case. Durations are nearest-rank percentiles over the runs in which
// the layer was seen to stop.
type Summary struct {
	Kind      Kind          `json:"kind"`
	Technique string        `json:"technique"`
	Case      string        `json:"case"`
	Layer     wire.Layer    `json:"layer"`
	Runs      int           `json:"runs"`
	Stopped   int           `json:"stopped"`
	Acked     time.Duration `json:"acked_p50_ns"`
	P50       time.Duration `json:"p50_ns"`
	P99       time.Duration `json:"p99_ns"`
	Max       time.Duration `json:"max_ns"`
	SLA       time.Duration `json:"sla_ns"`
	Verdict   Verdict       `json:"verdict"` // the worst of the runs: FAIL, then VOID, then PASS
}

func (s Summary) shown() string {
	switch {
	case s.Stopped == 0 && s.Verdict == Void:
		return "-"
	case s.Stopped == 0:
		return "never"
	case s.Runs == 1:
		return millis(s.P50)
	}
	return fmt.Sprintf("p50 %s, p99 %s, max %s of %d", millis(s.P50), millis(s.P99), millis(s.Max), s.Stopped)
}

// judgement is the verdict as a reader takes it: a control run is right when it fails.
func (s Summary) judgement() string {
	if s.Kind == KindControl && s.Verdict == Fail {
		return "FAIL, as it must"
	}
	return string(s.Verdict)
}

// Summaries sums the results up, in the order in which cases and layers first ran.
func (rep *Report) Summaries() []Summary {
	type key struct {
		kind            Kind
		technique, name string
		layer           wire.Layer
	}
	var order []key
	samples, acks, sums := map[key][]time.Duration{}, map[key][]time.Duration{}, map[key]*Summary{}
	for _, r := range rep.Results {
		for _, l := range r.Layers {
			k := key{r.Kind, r.Technique, r.Case, l.Layer}
			s := sums[k]
			if s == nil {
				s = &Summary{Kind: r.Kind, Technique: r.Technique, Case: r.Case, Layer: l.Layer, SLA: l.SLA, Verdict: Pass}
				sums[k] = s
				order = append(order, k)
			}
			s.Runs++
			acks[k] = append(acks[k], r.Acked)
			if l.Stopped {
				s.Stopped++
				samples[k] = append(samples[k], l.Observed)
			}
			if l.Verdict == Fail || l.Verdict == Void && s.Verdict == Pass {
				s.Verdict = l.Verdict
			}
		}
	}
	var out []Summary
	for _, k := range order {
		s := sums[k]
		s.Acked = rank(acks[k], 50)
		s.P50, s.P99, s.Max = rank(samples[k], 50), rank(samples[k], 99), rank(samples[k], 100)
		out = append(out, *s)
	}
	return out
}

// rank is the nearest-rank percentile, 0 of nothing.
func rank(d []time.Duration, percent int) time.Duration {
	if len(d) == 0 {
		return 0
	}
	d = slices.Sorted(slices.Values(d))
	return d[max(0, (len(d)*percent+99)/100-1)]
}

// JSON is the report with its summaries, as it is kept.
func (rep *Report) JSON() ([]byte, error) {
	raw, err := json.MarshalIndent(struct {
		*Report
		Summaries []Summary `json:"summaries"`
	}{rep, rep.Summaries()}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("writing the drill report: %w", err)
	}
	return append(raw, '\n'), nil
}

// Write writes the report as JSON.
func (rep *Report) Write(path string) error {
	raw, err := rep.JSON()
	if err == nil {
		err = os.WriteFile(path, raw, 0o644) // a report is for everybody
	}
	if err != nil {
		return fmt.Errorf("writing the drill report: %w", err)
	}
	return nil
}
