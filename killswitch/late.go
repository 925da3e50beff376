package killswitch

import (
	"context"
	"fmt"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
)

// lateWatch bounds how long a stop's remainders are watched for the record; enforcement goes on after that.
const lateWatch = 24 * time.Hour

// watchLate completes a stop whose kid was reported as contained and has died after all. Enforcement keeps
// killing it meanwhile, as long as the tag hangs; a restart ends the watch, not the enforcement (see tellLate).
func (s *Switch) watchLate(r *run, kid, dir string, ts []target) {
	ctx, cancel := context.WithTimeout(s.life, lateWatch)
	defer cancel()
	for {
		err := s.cfg.Cgroups.WaitEmpty(ctx, dir)
		if err == nil {
			break
		}
		select { // looking failed, or Run's time is over
		case <-ctx.Done():
			return
		case <-time.After(rekill):
		}
		s.thaw(dir, ts)
	}
	took := time.Since(r.from)
	detail := fmt.Sprintf("the last process is gone, %v after the order", took.Round(time.Millisecond))
	r.emit(kid, wire.LayerSession, pointCgroup, wire.StateObserved, detail)
	s.cfg.Metrics.LayerObserved(string(wire.LayerSession), took)
	rep, ok := r.again()
	if !ok {
		return // it has not reported yet, and its report will tell
	}
	s.completeLate(r, wire.StopEvent{
		Kid: kid, Layer: wire.LayerSession, Point: pointCgroup, State: rep.State, Elapsed: took, Detail: detail,
	})
}

// keptLate completes a stop whose tag the disk has taken after the report said that it had not.
func (s *Switch) keptLate(r *run) {
	r.mu.Lock()
	p := r.points[pointKey{point: pointTag}]
	open := r.report != nil && p != nil && p.state == wire.StatePartial
	r.mu.Unlock()
	if !open {
		return
	}
	const detail = "the tag is on disk now"
	r.emit("", "", pointTag, wire.StateObserved, detail)
	if rep, ok := r.again(); ok {
		s.completeLate(r, wire.StopEvent{Point: pointTag, State: rep.State, Elapsed: time.Since(r.from), Detail: detail})
	}
}

// completeLate tells of what e adds to a stop that has reported.
func (s *Switch) completeLate(r *run, e wire.StopEvent) {
	s.settle(r, e.State)
	s.cfg.Log.Warn("stop completed late", "stop", r.id, "kid", e.Kid, "point", e.Point, "state", e.State, "took", e.Elapsed)
	s.audit.send(r.record(audit.EventStopCompleted, e))
}

// again sums a stop up anew that has reported before; ok is false where it has not.
func (r *run) again() (rep wire.StopReport, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.report == nil {
		return wire.StopReport{}, false
	}
	rep = r.summarise(r.contained)
	r.report = &rep
	return rep, true
}

// settle notes the state of a stop on every tag that hangs for it, also those of people who joined it.
func (s *Switch) settle(r *run, state wire.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.hanging {
		if h.run == r {
			h.tag.State = state
		}
	}
}

// tellLate records that a stop which a predecessor began is complete now: what was found alive under its tag is
// gone. Stops of this process are watched by watchLate.
func (s *Switch) tellLate(t wire.Tag, tg target) {
	s.mu.Lock()
	h := s.hanging[t.Stop]
	mine := h == nil || h.run != nil || h.tag.State == wire.StateObserved
	if !mine {
		h.tag.State = wire.StateObserved
	}
	s.mu.Unlock()
	if mine {
		return
	}
	s.audit.send(audit.Record{
		Event: audit.EventStopCompleted, Outcome: audit.OutcomeOK, Kid: tg.kid, Card: tg.card, Session: tg.id, Mark: tg.mark, Actor: t.By,
		Detail: "the last process is gone; the stop was ordered before killswitchd was restarted",
		Fields: map[string]string{
			"stop": t.Stop, "scope": scopeText(t.Scope), "layer": string(wire.LayerSession), "point": pointCgroup, "state": string(wire.StateObserved),
		},
	})
	s.cfg.Log.Warn("stop completed late", "stop", t.Stop, "kid", tg.kid)
}
