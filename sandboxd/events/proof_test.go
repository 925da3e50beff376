package events

import (
	"testing"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

type counted struct{ n uint64 }

func (c *counted) Denied(_ reason.Code, n uint64) { c.n += n }
func (*counted) DenialsLost(uint64)               {}

// TestAProofIsNobodysAttempt: what the kernel drops of a proof's kid is recorded, and neither alerted (as records of
// denials are) nor counted as an attempt; a real kid's is both.
func TestAProofIsNobodysAttempt(t *testing.T) {
	for kid, want := range map[string]struct {
		outcome string
		n       uint64
	}{"proof-1": {audit.OutcomeOK, 0}, "calm-otter": {audit.OutcomeDeny, 3}} {
		var out records
		var m counted
		r := New(Config{Audit: &out, Metrics: &m, Sessions: sessionsFunc(func(uint32) (string, string, string, bool) { return kid, "01S", "c", true })})
		d := Denial{Mark: 7, Hook: "egress", Reason: reason.Stopped, Proto: 17}
		r.count(d.Mark, d.Reason, 1)
		out.Log(r.record(d))
		r.logFloods([]Flood{{Denial: d, Count: 2}})
		if m.n != want.n {
			t.Errorf("%s: %d attempts are counted, want %d", kid, m.n, want.n)
		}
		for _, rec := range out.all {
			if rec.Outcome != want.outcome || rec.Kid != kid {
				t.Errorf("record %+v, want outcome %s", rec, want.outcome)
			}
		}
		if len(out.all) != 2 || out.all[1].Count != 2 {
			t.Errorf("%s: records %+v", kid, out.all)
		}
	}
}
