package killswitch

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
)

// run is one stop under way. Its events are kept, so that whoever follows it sees all of them, however late
// it comes and however slowly it reads: a stop never waits for its readers.
type run struct {
	s      *Switch
	id     string
	scope  wire.Scope
	layers []wire.Layer
	cause  string
	from   time.Time     // first byte of the order, monotonic
	at     time.Duration // the same on CLOCK_BOOTTIME
	single string        // the kid's name where the scope is one kid
	proof  bool          // of a proof: it is no operator's stop, and leaves no record and no tag
	nonce  string        // comes back with credd's answer

	mu     sync.Mutex
	events []wire.StopEvent
	points map[pointKey]*point
	order  []pointKey
	kids   []string
	wake   chan struct{} // closed and replaced with every event
	report *wire.StopReport
	tag    wire.Tag
	note   string // the signed order as it came; "" where nobody signed

	contained bool     // as finish was told
	degraded  []string // likewise
}

type pointKey struct {
	layer      wire.Layer
	kid, point string
}

// point is one enforcement point's last word.
type point struct {
	state           wire.State
	fired, observed time.Duration
	detail          string
}

// emit notes one step. It takes microseconds and waits for nothing.
func (r *run) emit(kid string, layer wire.Layer, name string, state wire.State, detail string) {
	e := wire.StopEvent{Stop: r.id, Kid: kid, Layer: layer, Point: name, State: state, Elapsed: time.Since(r.from), Detail: detail}
	r.mu.Lock()
	r.events = append(r.events, e)
	key := pointKey{layer, kid, name}
	p := r.points[key]
	if p == nil {
		p = &point{}
		r.points[key] = p
		r.order = append(r.order, key)
	}
	p.state, p.detail = state, detail
	switch state {
	case wire.StateFired:
		p.fired = e.Elapsed
	case wire.StateObserved:
		p.observed = e.Elapsed
		if p.fired == 0 {
			p.fired = e.Elapsed
		}
	}
	r.signal()
	r.mu.Unlock()
	r.send(r.record(audit.EventStopProgress, e))
}

// signal wakes the followers. r.mu is held.
func (r *run) signal() {
	close(r.wake)
	r.wake = make(chan struct{})
}

func (r *run) record(event string, e wire.StopEvent) audit.Record {
	rec := audit.Record{
		Event: event, Kid: e.Kid, Outcome: audit.OutcomeOK, Detail: e.Detail, Actor: r.tag.By,
		Fields: map[string]string{"stop": r.id, "scope": scopeText(r.scope), "elapsed_ns": strconv.FormatInt(int64(e.Elapsed), 10)},
	}
	if e.Layer != "" {
		rec.Fields["layer"] = string(e.Layer)
	}
	if e.Point != "" {
		rec.Fields["point"] = e.Point
	}
	if e.State != "" {
		rec.Fields["state"] = string(e.State)
	}
	if e.State != "" && e.State != wire.StateFired && e.State != wire.StateObserved {
		rec.Outcome = audit.OutcomeFail
	}
	return rec
}

// received records who ordered what, and what vouches for it: the signed order itself, or the uid that the kernel saw.
func (r *run) received() audit.Record {
	rec := r.record(audit.EventStopReceived, wire.StopEvent{Elapsed: time.Since(r.from), Detail: r.tag.Reason})
	rec.Fields["cause"] = r.cause
	switch {
	case r.tag.Order != "":
		rec.Fields["order"], rec.Fields["key"], rec.Fields["note"] = r.tag.Order, r.tag.Key, r.note
	case r.tag.Peer != "":
		rec.Fields["unsigned"] = r.tag.Peer
	}
	return rec
}

func (r *run) has(l wire.Layer) bool { return slices.Contains(r.layers, l) }

// addKids notes which kids the stop is about.
func (r *run) addKids(ts []target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range ts {
		if r.proof || !wire.IsProofKid(t.kid) { // a proof's kid is stopped like any other, and is nobody's
			r.kids = append(r.kids, t.kid)
		}
		if t.mark != 0 {
			r.tag.Marks = append(r.tag.Marks, t.mark)
		}
	}
}

func (r *run) currentTag() wire.Tag {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.tag
	t.Marks = slices.Clone(t.Marks)
	return t
}

// done says whether the stop has reported.
func (r *run) done() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.report != nil
}

// finish makes the report out of the points and tells the followers.
func (r *run) finish(contained bool, degraded []string) wire.StopReport {
	r.mu.Lock()
	r.contained, r.degraded = contained, degraded
	rep := r.summarise(contained)
	r.report = &rep
	e := wire.StopEvent{Stop: r.id, State: rep.State, Elapsed: time.Since(r.from), Final: &rep}
	r.events = append(r.events, e)
	r.signal()
	r.mu.Unlock()
	rec := r.record(audit.EventStopCompleted, e)
	if len(degraded) > 0 {
		rec.Fields["degraded"] = strings.Join(degraded, "; ")
	}
	r.send(rec)
	return rep
}

// send records. What a proof has shown is one record of the prover's.
func (r *run) send(rec audit.Record) {
	if !r.proof {
		r.s.audit.send(rec)
	}
}

// follow calls fn with every event from the first on until the final one, which it does not pass on but
// returns. It ends early when ctx ends or fn fails.
func (r *run) follow(ctx context.Context, fn func(wire.StopEvent) error) (wire.StopEvent, error) {
	for next := 0; ; {
		r.mu.Lock()
		events, wake := r.events[next:], r.wake
		r.mu.Unlock()
		for _, e := range events {
			if e.Final != nil {
				return e, nil
			}
			if err := fn(e); err != nil {
				return wire.StopEvent{}, err
			}
		}
		next += len(events)
		if len(events) > 0 {
			continue
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return wire.StopEvent{}, ctx.Err()
		}
	}
}
