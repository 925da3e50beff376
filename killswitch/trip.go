package killswitch

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/session"
	"tagout/internal/trip"
	"tagout/internal/wire"
)

// CauseTrip is the cause of a stop that a trip rule ordered, and tripBy who gave it.
const (
	CauseTrip = "trip"
	tripBy    = "trip rule"
)

// TripSources is what trip rules measure, read from the kernel and from memory alone: nothing here may wait for a
// disk or for another daemon. An error means that the value is not known now.
type TripSources interface {
	Denied(mark uint32) (int64, error)   // attempts that the kernel refused since the session began
	BytesOut(mark uint32) (int64, error) // IP bytes that left the box since then
	CPUTime(s *session.Session) (time.Duration, error)
	Processes(s *session.Session) (int64, error) // and threads
	Watched(s *session.Session) error            // nil while somebody watches which programs it starts and which files it writes
	Rules() ([]trip.Rule, error)                 // the box's
	Stamp() (time.Time, error)                   // changes whenever a session document is written or removed
}

// TripConfig holds what trip rules work with. No field may be nil or empty.
type TripConfig struct {
	Sources TripSources
	Logs    string // the instance's audit directory
	Keep    string // the file in which to remember what was counted; its directory exists, in memory
}

// tripEvery is how often rules are evaluated, and the logs looked at, at least.
const tripEvery = 250 * time.Millisecond

// Trips evaluates the trip rules of every living session and stops the kids that trip one. Make it with
// Switch.Trips and call Run once.
//
// What the kernel counts, it reads there; what other daemons saw, it reads in their audit logs, itself. What cannot
// be read for trip.Grace trips the rules that are about it.
type Trips struct {
	s   *Switch
	cfg TripConfig
	log *slog.Logger

	facts factBook
	wake  chan struct{} // a look at once, because the logs say something new

	// Evaluation only.
	docs   []*session.Session
	broken error // why some documents could not be read
	stamp  time.Time
	kids   map[string]*trip.Kid // session id -> what is remembered of it
	rules  []trip.Rule          // the box's
	kept   []byte               // what the file holds
	keptAt time.Time
}

// Trips returns the trip rules of s, with what a predecessor has counted.
func (s *Switch) Trips(cfg TripConfig) *Trips {
	t := &Trips{s: s, cfg: cfg, log: s.cfg.Log, wake: make(chan struct{}, 1), kids: map[string]*trip.Kid{}}
	t.load()
	return t
}

// Run follows the logs and evaluates the rules until ctx ends.
func (t *Trips) Run(ctx context.Context) {
	// Apart: a disk that hangs must keep neither the kernel's counters from being looked at nor this from ending.
	go t.follow(ctx)
	tick := time.NewTicker(tripEvery)
	defer tick.Stop()
	for {
		t.look(bootclock.Now())
		select {
		case <-tick.C:
		case <-t.wake:
		case <-ctx.Done():
			t.keep()
			return
		}
	}
}

// look evaluates every rule once.
func (t *Trips) look(now time.Duration) {
	t.readRules()
	t.readDocs()
	living := make(map[string]bool, len(t.docs))
	tripped := false
	for _, d := range t.docs {
		living[d.ID] = true
		rules := t.open(d)
		if len(rules) == 0 {
			continue
		}
		tripped = t.lookAt(now, d, rules) || tripped
	}
	tripped = t.lookAtStrays(now, living) || tripped
	for id := range t.kids {
		if !living[id] {
			delete(t.kids, id)
		}
	}
	t.facts.prune(now, t.docs)
	if tripped || time.Since(t.keptAt) > keepEvery {
		t.keep()
	}
}

// readRules reads the box's rules. Where they cannot be read, the last ones that could hold on; where there were
// none, a rule that cannot be evaluated stands in their place.
func (t *Trips) readRules() {
	rules, err := t.cfg.Sources.Rules()
	switch {
	case err == nil:
		t.rules = rules
	case t.rules == nil:
		t.log.Error("reading the box's trip rules: if that goes on, every kid is stopped", "error", err)
		t.rules = []trip.Rule{{On: trip.Unreadable, Paths: []string{err.Error()}, Fires: wire.AllLayers()}}
	}
}

// docsSettle is how old a change must be for its time to tell it from the next one: file times are coarse.
const docsSettle = 100 * time.Millisecond

// readDocs reads the session documents where one of them changed.
func (t *Trips) readDocs() {
	stamp, err := t.cfg.Sources.Stamp()
	if err == nil && t.broken == nil && stamp.Equal(t.stamp) {
		return
	}
	t.stamp = time.Time{}
	if err == nil && time.Since(stamp) > docsSettle {
		t.stamp = stamp
	}
	before := t.broken
	t.docs, t.broken = t.s.cfg.Sessions.Load()
	if t.broken != nil && fmt.Sprint(before) != t.broken.Error() {
		t.log.Error("reading session documents for trip rules: kids whose rules are not known are stopped if that goes on", "error", t.broken)
	}
}

// open returns the rules that can still do something to the session: those that would fire a layer that no tag
// demands.
func (t *Trips) open(d *session.Session) []trip.Rule {
	if len(t.rules)+len(d.Stop.Trip) == 0 || wire.IsProofKid(d.Kid) {
		return nil
	}
	fired := map[wire.Layer]bool{}
	for _, l := range wire.AllLayers() {
		fired[l] = t.s.demanded(l, d.Kid, d.Card)
	}
	rules := append(slices.Clone(d.Stop.Trip), t.rules...)
	return slices.DeleteFunc(rules, func(r trip.Rule) bool {
		return !slices.ContainsFunc(r.Fires, func(l wire.Layer) bool { return !fired[l] })
	})
}

// lookAt evaluates the rules of one session and fires what trips.
func (t *Trips) lookAt(now time.Duration, d *session.Session, rules []trip.Rule) bool {
	k := t.kid(d.ID)
	// A cgroup whose state is not known counts as alive.
	some, err := t.s.cfg.Cgroups.Populated(d.Cgroup)
	alive := some || err != nil
	trips := k.Look(now, d.Boot, alive, rules, func(r trip.Rule) trip.Reading { return t.read(now, d, alive, r) })
	t.fire(d, trips)
	return len(trips) > 0
}

func (t *Trips) kid(id string) *trip.Kid {
	if t.kids[id] == nil {
		t.kids[id] = &trip.Kid{}
	}
	return t.kids[id]
}

// lookAtStrays stops kids that live and whose documents cannot be read, so that nobody knows their rules.
func (t *Trips) lookAtStrays(now time.Duration, living map[string]bool) (tripped bool) {
	if t.broken == nil {
		return false
	}
	names, err := t.s.cfg.Cgroups.Children(t.s.cfg.KidsDir)
	if err != nil {
		t.log.Error("looking for kids whose trip rules are not known", "error", err)
		return false
	}
	for _, name := range names {
		stray := t.s.unknown(name, t.broken)
		if slices.ContainsFunc(t.docs, func(d *session.Session) bool { return d.Kid == name }) || t.s.demanded(wire.LayerSession, name, "") {
			continue
		}
		living["?"+name] = true
		d := &session.Session{ID: "?" + name, Kid: name, Cgroup: stray.dir}
		rule := trip.Rule{On: trip.Unreadable, Paths: []string{"its session document cannot be read: " + t.broken.Error()}, Fires: wire.AllLayers()}
		tripped = t.lookAt(now, d, []trip.Rule{rule}) || tripped
	}
	return tripped
}

// read measures what a rule is about.
func (t *Trips) read(now time.Duration, d *session.Session, alive bool, r trip.Rule) trip.Reading {
	switch r.On {
	case trip.Denied:
		return t.denied(now, d)
	case trip.BytesOut:
		n, err := t.cfg.Sources.BytesOut(d.Mark)
		return reading(n, err)
	case trip.Unreadable:
		return trip.Reading{Unknown: r.Paths[0]}
	case trip.WallTime, trip.CPUTime, trip.Processes:
		if !alive {
			return trip.Reading{} // it is over
		}
		return t.used(now, d, r.On)
	case trip.Exec, trip.WriteOutside:
		if err := t.cfg.Sources.Watched(d); err != nil {
			return trip.Reading{Unknown: err.Error()}
		}
	}
	return t.facts.seen(now, d, r)
}

// denied adds up what the kernel refused and what the other daemons did.
func (t *Trips) denied(now time.Duration, d *session.Session) trip.Reading {
	n, err := t.cfg.Sources.Denied(d.Mark)
	if err != nil {
		return reading(0, err)
	}
	got := t.facts.denied(now, d.Mark)
	got.Value += n
	return got
}

// used measures what a kid that lives has used up.
func (t *Trips) used(now time.Duration, d *session.Session, on string) trip.Reading {
	switch on {
	case trip.CPUTime:
		spent, err := t.cfg.Sources.CPUTime(d)
		return reading(int64(spent), err)
	case trip.Processes:
		n, err := t.cfg.Sources.Processes(d)
		return reading(n, err)
	}
	if d.Boot == 0 {
		return trip.Reading{Unknown: "the session document does not say when the kid was made: spawn it again"}
	}
	return trip.Reading{Value: int64(now - d.Boot)}
}

func reading(n int64, err error) trip.Reading {
	if err != nil {
		return trip.Reading{Unknown: err.Error()}
	}
	return trip.Reading{Value: n}
}

// fire stops the kid, once for all rules that fire the same layers.
func (t *Trips) fire(d *session.Session, trips []trip.Trip) {
	for len(trips) > 0 {
		same := func(o trip.Trip) bool { return slices.Equal(o.Rule.Fires, trips[0].Rule.Fires) }
		var now, later []trip.Trip
		for _, o := range trips {
			if same(o) {
				now = append(now, o)
			} else {
				later = append(later, o)
			}
		}
		t.stop(d, now)
		trips = later
	}
}

// maxTripReason bounds a tag's text; a rule's paths may be long.
const maxTripReason = 1000

func (t *Trips) stop(d *session.Session, trips []trip.Trip) {
	text := ""
	for _, o := range trips {
		if text != "" {
			text += "; "
		}
		text += o.Reason()
	}
	if len(text) > maxTripReason {
		text = text[:maxTripReason] + "…"
	}
	o := Order{Received: time.Now(), StopRequest: wire.StopRequest{
		Scope: wire.Scope{Kid: d.Kid}, Layers: trips[0].Rule.Fires, By: tripBy, Reason: text, Cause: CauseTrip,
	}}
	h, err := t.s.Stop(o)
	for _, o := range trips {
		t.s.cfg.Metrics.Tripped(o.Rule.On)
		t.s.audit.send(t.record(d, o, h, err))
	}
	t.log.Warn("a trip rule stops a kid", "kid", d.Kid, "reason", text, "error", err)
}

func (t *Trips) record(d *session.Session, o trip.Trip, h *Handle, err error) audit.Record {
	rec := audit.Record{
		Event: audit.EventTripped, Outcome: audit.OutcomeDeny, Reason: reasonTripped, Actor: tripBy, Detail: o.Reason(),
		Session: d.ID, Kid: d.Kid, Mark: d.Mark, Card: d.Card, Fields: map[string]string{"rule": o.Rule.String(), "measured": o.Measured},
	}
	if o.Limit != "" {
		rec.Fields["limit"] = o.Limit
	}
	if o.Unknown {
		rec.Fields["unknown"] = "true"
	}
	if h != nil {
		rec.Fields["stop"] = h.run.id
	}
	if err != nil {
		rec.Fields["error"] = err.Error()
	}
	return rec
}
