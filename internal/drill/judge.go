package drill

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"tagout/internal/wire"
)

// Verdict is the judgement on one layer of one run, and on a whole drill.
type Verdict string

// Verdicts.
const (
	Pass Verdict = "PASS"
	Fail Verdict = "FAIL"
	Void Verdict = "VOID" // not everything was seen at work before the order, or a control run did not fail
)

// Result is one run. Durations count from the command.
type Result struct {
	Kind      Kind             `json:"kind"`
	Technique string           `json:"technique"`
	Case      string           `json:"case"`
	Run       int              `json:"run"`
	Kid       string           `json:"kid"`
	Stop      string           `json:"stop,omitempty"`
	Command   time.Duration    `json:"command_ns"` // CLOCK_MONOTONIC
	Acked     time.Duration    `json:"acked_ns"`   // until killswitchd's final report was read
	Layers    []LayerResult    `json:"layers"`     // those that were judged
	Before    Activity         `json:"before"`
	After     Activity         `json:"after"`
	Void      string           `json:"void,omitempty"`
	Skipped   string           `json:"skipped,omitempty"` // why it was not run here
	Degraded  []string         `json:"degraded,omitempty"`
	StopError string           `json:"stop_error,omitempty"`
	Report    *wire.StopReport `json:"report,omitempty"` // what killswitchd said
	Story     []Event          `json:"story,omitempty"`
}

// LayerResult is the judgement on one layer.
type LayerResult struct {
	Layer    wire.Layer    `json:"layer"`
	Observed time.Duration `json:"observed_ns"` // last sign of life seen from outside, after the command
	Stopped  bool          `json:"stopped"`     // false: it still lived when the observers gave up
	SLA      time.Duration `json:"sla_ns"`
	Verdict  Verdict       `json:"verdict"`
	Evidence string        `json:"evidence"`
	Why      string        `json:"why,omitempty"` // of a FAIL that the time does not explain
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

// fail turns the verdict on a layer into FAIL, with a reason that its time does not show.
func (r *Result) fail(l wire.Layer, format string, args ...any) {
	for i := range r.Layers {
		if r.Layers[i].Layer == l && r.Layers[i].Verdict != Void {
			r.Layers[i].Verdict, r.Layers[i].Why = Fail, fmt.Sprintf(format, args...)
		}
	}
}

// judgeDeath adds to the session layer what an empty cgroup does not show, and to a knock-out what its report must
// say. released is when the drill let go of what it held from outside, 0 where it held nothing.
func (d *duel) judgeDeath(r *Result, o *observer, command, released time.Duration) {
	i := slices.IndexFunc(r.Layers, func(l LayerResult) bool { return l.Layer == wire.LayerSession })
	if i >= 0 && d.c.technique.Host == "disk" && slices.Contains(d.c.ordered, wire.LayerSession) {
		r.judgeContained(&r.Layers[i], released-command, slices.Contains(d.c.ordered, wire.LayerNetwork))
	}
	if i >= 0 && r.Layers[i].Stopped {
		if left := o.leftBehind(); left != "" {
			r.fail(wire.LayerSession, "%s", left)
		}
	}
	if k := d.c.knockout; k != nil && k.says != "" && !slices.ContainsFunc(r.Degraded, func(s string) bool { return strings.Contains(s, k.says) }) {
		r.fail(wire.LayerSession, "nobody said %q of what was broken", k.says)
	}
}

// judgeContained judges the session layer where processes cannot die before the drill lets go of them: the stop
// must have said so, naming one with its state, and must complete by itself afterwards. Its time counts from there.
func (r *Result) judgeContained(l *LayerResult, released time.Duration, contained bool) {
	l.Evidence = "populated 0 after the disk answered again"
	want := []wire.State{wire.StateContained}
	if !contained {
		want = append(want, wire.StatePartial) // nothing else was ordered that would contain them
	}
	var said wire.LayerReport
	if r.Report != nil {
		said = r.Report.Layers[wire.LayerSession]
	}
	switch {
	case l.Stopped && l.Observed < released:
		r.fail(l.Layer, "the cgroup was empty %v before the disk answered again: nothing was held", (released - l.Observed).Round(time.Millisecond))
	case !slices.Contains(want, said.State):
		r.fail(l.Layer, "killswitchd called it %q while processes were alive in state D", said.State)
	case !strings.Contains(said.Detail, "in state D"):
		r.fail(l.Layer, "killswitchd did not name a process in state D: %s", said.Detail)
	case l.Stopped:
		l.Observed -= released
		if l.Verdict = Fail; l.Observed <= l.SLA {
			l.Verdict = Pass
		}
	}
}

// tellStory keeps the events, in order, relative to the command.
func (r *Result) tellStory(story []Event, command time.Duration) {
	r.Story = slices.Clone(story)
	slices.SortStableFunc(r.Story, func(a, b Event) int { return cmp.Compare(a.At, b.At) })
	for i := range r.Story {
		r.Story[i].At -= command
	}
}

// others says what the layers that were not ordered did meanwhile.
func (r *Result) others() string {
	if r.Void != "" || r.Skipped != "" || r.Kind != KindStop {
		return r.Void + r.Skipped
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
		if l.Why != "" {
			parts[len(parts)-1] += ": " + l.Why
		}
	}
	line := "  "
	switch {
	case r.Kind == KindKnockout:
		line += "knock-out "
	case r.Kind == KindControl:
		line += "control, "
	case r.Technique != everything:
		line += r.Technique + ", "
	}
	line += r.Case + ": " + strings.Join(parts, ", ")
	if r.StopError != "" {
		line += "; the order itself ended with: " + r.StopError
	}
	if o := r.others(); o != "" {
		line += " (" + o + ")"
	}
	if len(r.Degraded) > 0 {
		line += " [" + strings.Join(r.Degraded, "; ") + "]"
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
