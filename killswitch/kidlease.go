package killswitch

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// CauseLease is the cause of a stop that nobody ordered: the lease on which the kids live ran out.
const CauseLease = "lease"

// Killswitchd is who gives the orders that no person gives.
const Killswitchd = "killswitchd"

// kidLease is the lease of all kids. sandboxd renews it while everything that guards them is well. It is kept in
// memory alone: whoever starts anew gives every kid a whole lease, and a kid that is younger than the last renewal
// has a whole one too.
type kidLease struct {
	mu      sync.Mutex
	renewed time.Duration // boot time; that of the start where it never was
	unwell  []string      // what sandboxd said last; nil: nothing, or that all is well
	said    time.Duration // boot time at which it said anything
	lapsed  bool          // it has run out, and that was recorded
}

// Bounds of what is kept of sandboxd's words: they end in tags.
const (
	maxUnwell     = 8
	maxUnwellText = 200
)

// RenewKids takes sandboxd's word: where everything is well the lease starts anew; else what is unwell is kept as the
// reason that the tags will name, and the lease runs on. It returns how long it still runs, and fails where enforcement
// stands still: that is no killswitchd to rely on.
func (s *Switch) RenewKids(req wire.LeaseRequest) (time.Duration, error) {
	now := s.boot()
	if still := now - s.ticked(); still > s.t.KernelLease {
		return 0, fmt.Errorf("enforcement stands still for %v: kill killswitchd, its supervisor starts it again", still.Round(time.Millisecond))
	}
	var unwell []string
	for _, u := range req.Unwell[:min(len(req.Unwell), maxUnwell)] {
		unwell = append(unwell, u[:min(len(u), maxUnwellText)])
	}
	l := &s.kids
	l.mu.Lock()
	before, lapsed := l.unwell, l.lapsed
	l.unwell, l.said = unwell, now
	if len(unwell) == 0 {
		l.renewed, l.lapsed = now, false
	}
	left := max(l.renewed+s.t.KidLease-now, 0)
	l.mu.Unlock()
	switch changed := !slices.Equal(before, unwell); {
	case changed && len(unwell) > 0:
		s.recordLease(audit.EventLeaseWithheld, audit.OutcomeFail, fmt.Sprintf("%s; it runs out in %v", strings.Join(unwell, "; "), left.Round(time.Millisecond)), 0)
	case changed || lapsed && len(unwell) == 0:
		s.recordLease(audit.EventLeaseRenewed, audit.OutcomeOK, "everything that guards the kids is well again", 0)
	}
	return left, nil
}

func (s *Switch) recordLease(event, outcome, detail string, kids int) {
	rec := audit.Record{Event: event, Actor: Killswitchd, Outcome: outcome, Detail: detail, Count: uint64(kids)} // not negative
	if outcome != audit.OutcomeOK {
		rec.Reason = reason.LeaseExpired
	}
	s.audit.send(rec)
}

// watchKids fires when the kids' lease has run out, until ctx ends.
func (s *Switch) watchKids(ctx context.Context) {
	tick := time.NewTicker(s.t.KidLook)
	defer tick.Stop()
	looked := s.boot()
	for {
		now := s.boot()
		if away := now - looked; away > s.t.KernelLease {
			s.wakeUp(now, away)
		}
		looked = now
		s.lookAtKids(now)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// wakeUp starts the kids' lease anew: for so long this process did not run, that nobody could have renewed it. The
// machine slept, or a signal stopped us. The kernel closed the network meanwhile.
func (s *Switch) wakeUp(now, away time.Duration) {
	s.kids.mu.Lock()
	s.kids.renewed = now
	s.kids.mu.Unlock()
	detail := fmt.Sprintf("killswitchd did not run for %v, in which the kids' network closed; their lease starts anew", away.Round(time.Millisecond))
	s.cfg.Log.Warn(detail)
	s.recordLease(audit.EventLeaseRenewed, audit.OutcomeOK, detail, 0)
}

// lookAtKids fires the layers that its card chose at each kid whose lease has run out.
func (s *Switch) lookAtKids(now time.Duration) {
	l := &s.kids
	l.mu.Lock()
	age := now - l.renewed
	over := age > s.t.KidLease
	first := over && !l.lapsed
	l.lapsed = l.lapsed || over
	l.mu.Unlock()
	s.cfg.Metrics.KidLease(age, max(s.t.KidLease-age, 0))
	if !over {
		return
	}
	due := s.lapsed(now)
	if !first && len(due) == 0 {
		return
	}
	why := s.whyLapsed(now)
	s.recordLease(audit.EventLeaseExpired, audit.OutcomeFail, why, len(due))
	s.cfg.Metrics.KidLeaseExpired(len(due))
	var wg sync.WaitGroup
	for kid, layers := range due {
		wg.Go(func() {
			o := Order{Received: time.Now(), StopRequest: wire.StopRequest{
				Scope: wire.Scope{Kid: kid}, Layers: layers, By: Killswitchd, Reason: why, Cause: CauseLease,
			}}
			if _, err := s.Stop(o); err != nil {
				s.cfg.Log.Error("stopping a kid whose lease ran out", "kid", kid, "error", err)
			}
		})
	}
	wg.Wait() // for the orders to be taken; a stop goes on by itself
}

// lapsed returns the kids whose lease has run out and that no tag holds yet, with the layers to fire. Of a kid whose
// document cannot be read only that it lives is known, so all layers fire.
func (s *Switch) lapsed(now time.Duration) map[string][]wire.Layer {
	docs, err := s.cfg.Sessions.Load()
	if err != nil {
		s.cfg.Log.Error("reading session documents to see whose lease ran out", "error", err)
	}
	out := map[string][]wire.Layer{}
	add := func(kid, card string, layers []wire.Layer) {
		if len(layers) == 0 {
			layers = wire.AllLayers()
		}
		if slices.ContainsFunc(layers, func(l wire.Layer) bool { return !s.demanded(l, kid, card) }) {
			out[kid] = layers
		}
	}
	known := map[string]*session.Session{}
	for _, d := range docs {
		known[d.Kid] = d
	}
	for _, t := range s.targets(docs, func(*session.Session) bool { return true }) {
		d := known[t.kid]
		switch {
		case wire.IsProofKid(t.kid):
		case d == nil && !t.unborn:
			add(t.kid, t.card, nil)
		case d != nil && (d.Boot > now || now-d.Boot > s.t.KidLease): // one from the future is no excuse
			add(t.kid, t.card, d.Stop.Lease.Fires)
		}
	}
	return out
}

// whyLapsed says what was not well, for the tags.
func (s *Switch) whyLapsed(now time.Duration) string {
	l := &s.kids
	l.mu.Lock()
	age, silent, unwell := now-l.renewed, now-l.said, l.unwell
	if l.said == 0 {
		silent = age
	}
	l.mu.Unlock()
	text := fmt.Sprintf("the kids' lease of %v ran out: ", s.t.KidLease)
	if len(unwell) > 0 && silent <= s.t.KidLease/2 {
		return text + strings.Join(unwell, "; ")
	}
	text += fmt.Sprintf("sandboxd has said nothing for %v", silent.Round(time.Second))
	var more []string
	for _, what := range s.degraded(s.lookAround()) {
		if strings.Contains(what, "sandboxd") {
			more = append(more, what)
		}
	}
	if len(unwell) > 0 {
		more = append(more, "its last word was: "+strings.Join(unwell, "; "))
	}
	if len(more) > 0 {
		text += " (" + strings.Join(more, "; ") + ")"
	}
	return text
}
