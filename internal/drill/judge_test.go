package drill

import (
	"strings"
	"testing"
	"time"

	"tagout/internal/testroot"
	"tagout/internal/wire"
)

func TestAControlThatPassesMakesTheDrillVoid(t *testing.T) {
	for name, spoil := range map[string]func(*Result){
		"it passed":       func(r *Result) { r.Layers[0].Verdict, r.Layers[0].Stopped = Pass, true },
		"nothing was run": func(r *Result) { r.Void, r.Layers[0].Verdict = "not seen", Void },
		"nothing judged":  func(r *Result) { r.Layers = nil },
	} {
		rep := aReport()
		if rep.Verdict != Pass {
			t.Fatalf("before: %s %s", rep.Verdict, rep.Why)
		}
		spoil(&rep.Results[len(rep.Results)-1])
		rep.close(true)
		if rep.Verdict != Void || rep.Passed || !strings.Contains(rep.Why, "credential left out") {
			t.Errorf("%s: %s %s, want VOID", name, rep.Verdict, rep.Why)
		}
	}
}

func TestTheWholeIsAsGoodAsItsWorst(t *testing.T) {
	for name, tc := range map[string]struct {
		spoil func(*Report)
		ended bool
		want  Verdict
	}{
		"a layer late":  {func(r *Report) { r.Results[1].Layers[0].Verdict = Fail }, true, Fail},
		"one not seen":  {func(r *Report) { r.Results[0].Layers[0].Verdict = Void }, true, Void},
		"late and void": {func(r *Report) { r.Results[0].Layers[0].Verdict, r.Results[1].Layers[1].Verdict = Void, Fail }, true, Fail},
		"called off":    {func(*Report) {}, false, Void},
		"nothing run":   {func(r *Report) { r.Results = nil }, true, Void},
	} {
		rep := aReport()
		tc.spoil(rep)
		rep.close(tc.ended)
		if rep.Verdict != tc.want || rep.Why == "" {
			t.Errorf("%s: %s %q, want %s", name, rep.Verdict, rep.Why, tc.want)
		}
	}
}

// TestWhatWasLeftOutIsNotWhole, also where all that was run passed.
func TestWhatWasLeftOutIsNotWhole(t *testing.T) {
	for _, skipped := range []string{"", "not run here: the clock may not be set"} {
		rep := aReport()
		rep.Whole = true
		rep.add(Result{Kind: KindKnockout, Case: "clock-stepped", Skipped: skipped})
		rep.close(true)
		if rep.Whole != (skipped == "") {
			t.Errorf("skipped %q: whole %t", skipped, rep.Whole)
		}
	}
}

// TestContainedIsJudgedByWhatWasSaid (S06): what cannot die is contained and not dead, by name, and then dies.
func TestContainedIsJudgedByWhatWasSaid(t *testing.T) {
	const released = 5 * time.Second
	said := func(state wire.State, detail string) *wire.StopReport {
		return &wire.StopReport{Layers: map[wire.Layer]wire.LayerReport{wire.LayerSession: {State: state, Detail: detail}}}
	}
	named := "1 processes remain: 7 (writer) in state D"
	for name, tc := range map[string]struct {
		empty     time.Duration // 0: never
		report    *wire.StopReport
		contained bool
		want      Verdict
	}{
		"as it should":           {released + time.Millisecond, said(wire.StateContained, named), true, Pass},
		"session alone":          {released + time.Millisecond, said(wire.StatePartial, named), false, Pass},
		"partial, all ordered":   {released + time.Millisecond, said(wire.StatePartial, named), true, Fail},
		"said to be done":        {released + time.Millisecond, said(wire.StateObserved, ""), true, Fail},
		"nobody named":           {released + time.Millisecond, said(wire.StateContained, "1 processes remain: 7 (writer) in state Z"), true, Fail},
		"late after the thaw":    {released + time.Second, said(wire.StateContained, named), true, Fail},
		"never":                  {0, said(wire.StateContained, named), true, Fail},
		"dead before the thaw":   {released - time.Second, said(wire.StateContained, named), true, Fail},
		"killswitchd was silent": {released + time.Millisecond, nil, true, Fail},
	} {
		seen := verdicts{}
		if tc.empty > 0 {
			seen[wire.LayerSession] = tc.empty
		}
		r := Result{Kind: KindStop, Report: tc.report}
		r.judge([]wire.Layer{wire.LayerSession}, DefaultSLA(), seen)
		r.judgeContained(&r.Layers[0], released, tc.contained)
		if l := r.Layers[0]; l.Verdict != tc.want {
			t.Errorf("%s: %+v, want %s", name, l, tc.want)
		}
	}
}

func TestAKnockoutThatIsNotThisMachinesBreaksNothing(t *testing.T) {
	d := &duel{} // no ClockHelper, and an instance without mounts of the drill's own
	for _, k := range allKnockouts() {
		switch k.name {
		case "clock-stepped", "audit-disk-full", "bpffs-unmounted":
			if _, err := k.strike(t.Context(), d); err == nil || !strings.HasPrefix(err.Error(), "not run here: ") {
				t.Errorf("%s: %v", k.name, err)
			}
		}
	}
}

// TestAClockThatCannotBeSet is not run, and says why; nothing that was not run is ever called PASS.
func TestAClockThatCannotBeSet(t *testing.T) {
	testroot.Require(t)
	d := &duel{Config: Config{ClockHelper: []string{"/bin/false"}, ReadyWithin: time.Minute}}
	_, err := stepClock(t.Context(), d)
	if err == nil || !strings.HasPrefix(err.Error(), "not run here: the wall clock cannot be set: ") || d.clock != nil {
		t.Fatalf("%v, %v", err, d.clock)
	}
	rep := &Report{}
	rep.add(Result{Kind: KindKnockout, Case: "clock-stepped", Skipped: err.Error()})
	rep.close(true)
	if rep.Passed || rep.Verdict != Void || !strings.Contains(rep.Why, "clock-stepped: not run here: ") {
		t.Errorf("%+v", rep)
	}
	var table strings.Builder
	if err := rep.Table(&table); err != nil || !strings.Contains(table.String(), "not run here: ") || strings.Contains(table.String(), string(Pass)) {
		t.Errorf("%v: %s", err, table.String())
	}
}
