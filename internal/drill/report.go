package drill

import (
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

// Verdict is the judgement on one layer of one run.
type Verdict string

// Verdicts.
const (
	Pass Verdict = "PASS"
	Fail Verdict = "FAIL"
	Void Verdict = "VOID" // not everything was seen at work before the order
)

// Report is a whole drill.
type Report struct {
	Instance  string    `json:"instance"`
	Started   time.Time `json:"started"`
	Runs      int       `json:"runs"`      // of each case
	Processes int       `json:"processes"` // that had to be seen
	Results   []Result  `json:"results"`
	Passed    bool      `json:"passed"`
}

// Result is one run. Durations count from the command.
type Result struct {
	Case      string           `json:"case"`
	Run       int              `json:"run"`
	Kid       string           `json:"kid"`
	Stop      string           `json:"stop,omitempty"`
	Command   time.Duration    `json:"command_ns"` // CLOCK_MONOTONIC
	Acked     time.Duration    `json:"acked_ns"`   // until killswitchd's final report was read
	Layers    []LayerResult    `json:"layers"`     // those that were ordered
	Before    Activity         `json:"before"`
	After     Activity         `json:"after"`
	Void      string           `json:"void,omitempty"`
	StopError string           `json:"stop_error,omitempty"`
	Report    *wire.StopReport `json:"report,omitempty"` // what killswitchd said
}

// LayerResult is the judgement on one layer.
type LayerResult struct {
	Layer    wire.Layer    `json:"layer"`
	Observed time.Duration `json:"observed_ns"` // last sign of life seen from outside, after the command
	Stopped  bool          `json:"stopped"`     // false: it still lived when the observers gave up
	SLA      time.Duration `json:"sla_ns"`
	Verdict  Verdict       `json:"verdict"`
	Evidence string        `json:"evidence"`
}

var evidence = map[wire.Layer]string{
	wire.LayerSession:    "populated 0",
	wire.LayerNetwork:    "last byte at the sink",
	wire.LayerCredential: "last accepted token use",
}

// judge fills the layers in.
func (r *Result) judge(layers []wire.Layer, sla map[wire.Layer]time.Duration, seen verdicts) {
	for _, l := range layers {
		observed, ok := seen[l]
		lr := LayerResult{Layer: l, Observed: observed, Stopped: ok, SLA: sla[l], Verdict: Fail, Evidence: evidence[l]}
		switch {
		case r.Void != "":
			lr.Verdict = Void
		case ok && observed <= lr.SLA:
			lr.Verdict = Pass
		}
		r.Layers = append(r.Layers, lr)
	}
}

// others says what the layers that were not ordered did meanwhile.
func (r *Result) others() string {
	if r.Void != "" {
		return r.Void
	}
	ordered := func(l wire.Layer) bool {
		return slices.ContainsFunc(r.Layers, func(lr LayerResult) bool { return lr.Layer == l })
	}
	var out []string
	if !ordered(wire.LayerSession) {
		out = append(out, fmt.Sprintf("%d processes live on", r.After.Processes))
	}
	if !ordered(wire.LayerNetwork) {
		if r.After.ByteAge >= 0 && r.After.ByteAge <= fresh {
			out = append(out, "bytes still flow")
		} else {
			out = append(out, "no bytes: nobody is left to send them")
		}
	}
	if !ordered(wire.LayerCredential) {
		if r.After.CredentialAge >= 0 && r.After.CredentialAge <= fresh {
			out = append(out, "token still accepted")
		} else {
			out = append(out, "token no longer accepted")
		}
	}
	return strings.Join(out, ", ")
}

// Line is a progress line.
func (r Result) Line() string {
	var parts []string
	for _, l := range r.Layers {
		parts = append(parts, fmt.Sprintf("%s %s %s", l.Layer, l.shown(), l.Verdict))
	}
	line := fmt.Sprintf("  %s: %s", r.Case, strings.Join(parts, ", "))
	if r.StopError != "" {
		line += "; the order itself ended with: " + r.StopError
	}
	if o := r.others(); o != "" {
		line += " (" + o + ")"
	}
	return line
}

func (l LayerResult) shown() string {
	if l.Verdict == Void {
		return "-"
	}
	if !l.Stopped {
		return "never"
	}
	return millis(l.Observed)
}

func millis(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }

// allPassed says whether there was something to judge and all of it passed.
func (rep *Report) allPassed() bool {
	sums := rep.Summaries()
	return len(sums) > 0 && !slices.ContainsFunc(sums, func(s Summary) bool { return s.Verdict != Pass })
}

// Table writes one row a layer and case. Where a case ran more than once, a row shows the p50, p99 and maximum
// of its runs.
func (rep *Report) Table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "STOP\tLAYER\tACKED\tOBSERVED\tSLA\tVERDICT\tSEEN BY")
	for _, s := range rep.Summaries() {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			s.Case, s.Layer, millis(s.Acked), s.shown(), millis(s.SLA), s.Verdict, evidence[s.Layer])
	}
	return t.Flush()
}

// Summary is all runs of one layer in one case. Durations are nearest-rank percentiles over the runs in which
// the layer was seen to stop.
type Summary struct {
	Case    string        `json:"case"`
	Layer   wire.Layer    `json:"layer"`
	Runs    int           `json:"runs"`
	Stopped int           `json:"stopped"`
	Acked   time.Duration `json:"acked_p50_ns"`
	P50     time.Duration `json:"p50_ns"`
	P99     time.Duration `json:"p99_ns"`
	Max     time.Duration `json:"max_ns"`
	SLA     time.Duration `json:"sla_ns"`
	Verdict Verdict       `json:"verdict"` // the worst of the runs: FAIL, then VOID, then PASS
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

// Summaries sums the results up, in the order in which cases and layers first ran.
func (rep *Report) Summaries() []Summary {
	type key struct {
		name  string
		layer wire.Layer
	}
	var order []key
	samples, acks, sums := map[key][]time.Duration{}, map[key][]time.Duration{}, map[key]*Summary{}
	for _, r := range rep.Results {
		for _, l := range r.Layers {
			k := key{r.Case, l.Layer}
			s := sums[k]
			if s == nil {
				s = &Summary{Case: r.Case, Layer: l.Layer, SLA: l.SLA, Verdict: Pass}
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

// Write writes the report, with its summaries, as JSON.
func (rep *Report) Write(path string) error {
	raw, err := json.MarshalIndent(struct {
		*Report
		Summaries []Summary `json:"summaries"`
	}{rep, rep.Summaries()}, "", "  ")
	if err == nil {
		err = os.WriteFile(path, append(raw, '\n'), 0o644) // a report is for everybody
	}
	if err != nil {
		return fmt.Errorf("writing the drill report: %w", err)
	}
	return nil
}
