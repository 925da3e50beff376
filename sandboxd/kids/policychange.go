package kids

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// tendEvery is how often Run looks for grants that ran out and policies that a daemon has not taken yet. The
// proxy and dnsfilter drop expired rules by themselves; this only brings the documents up to date.
const tendEvery = 500 * time.Millisecond

// EgressChange is another egress policy for a living kid, from a card that was checked.
type EgressChange struct {
	Card     string // the card's name
	CardHash string
	CardText string
	Egress   policy.Spec
	By       string
	Reason   string
	Actor    string
	Signed   Signature
}

// ChangePolicy replaces the card's part of a living kid's egress policy; grants stay. The change counts once
// every enforcement point has taken it. Where one does not answer, the new policy stays noted and is pushed
// until it is taken, and the error says so: what both allow stays open, nothing else.
func (m *Manager) ChangePolicy(ctx context.Context, name string, c EgressChange) (wire.PolicyReply, error) {
	if c.By == "" || c.Reason == "" {
		return wire.PolicyReply{}, refuse(Invalid, reason.Malformed, "changing the policy of kid %s: say who and why with --by and --reason", name)
	}
	var reply wire.PolicyReply
	err := m.withRunning(ctx, name, func(k *kid) error {
		before, was := k.rec.Plan.Egress, m.egress(k)
		k.rec.Plan.Egress = c.Egress
		cut, err := m.applyEgress(ctx, k)
		if KindOf(err) == Invalid {
			k.rec.Plan.Egress = before
			return err
		}
		rec := audit.Record{Event: audit.EventPolicyChanged, Actor: c.Actor, Outcome: audit.OutcomeOK, Generation: k.rec.Session.Generation,
			Detail: c.Reason, Fields: map[string]string{"by": c.By, "card_hash": c.CardHash, "cut": fmt.Sprint(cut)}}
		difference(was, k.rec.Session.Egress, rec.Fields)
		c.Signed.into(rec.Fields, c.Actor)
		m.log(k, rec)
		err = errors.Join(err, m.saveCard(name, c.CardText))
		reply = wire.PolicyReply{Generation: k.rec.Session.Generation, Cut: cut}
		return err
	})
	return reply, err
}

// PolicyRefused records that somebody tried to change the kid's policy with a card that cannot be read. The old
// policy stays in force.
func (m *Manager) PolicyRefused(name, actor, by string, why error) {
	rec := audit.Record{Event: audit.EventPolicyChanged, Kid: name, Actor: actor, Outcome: audit.OutcomeFail, Reason: reason.Malformed,
		Detail: "the old policy stays: " + why.Error(), Fields: map[string]string{"by": by}}
	m.cfg.Log.Error("a new policy cannot be read; the old one stays", "kid", name, "by", by, "error", why)
	m.mu.Lock()
	k := m.kids[name]
	m.mu.Unlock()
	if k == nil {
		m.cfg.Audit.Log(rec)
		return
	}
	m.log(k, rec)
}

// withRunning runs fn while nothing else changes the kid, which must be running or paused, and under no tag.
func (m *Manager) withRunning(ctx context.Context, name string, fn func(k *kid) error) error {
	k, done, err := m.alone(name)
	if err != nil {
		return err
	}
	defer done()
	m.mu.Lock()
	state := k.state
	m.mu.Unlock()
	if !state.Alive() {
		if err := m.clear(ctx, k); KindOf(err) == Tagged {
			return err // who stopped it, and why
		}
		return refuse(Conflict, reason.OK, "kid %s is %s: only a living kid's policy can be changed", name, state.Now())
	}
	if err := m.clear(ctx, k); err != nil {
		return err
	}
	m.touch(k)
	return fn(k)
}

// egress is the policy that is in force: the card's rules and those of the grants. Call it with life held.
func (m *Manager) egress(k *kid) policy.Spec {
	spec := k.rec.Plan.Egress
	spec.Allow = append([]policy.Rule(nil), spec.Allow...)
	for _, g := range k.rec.Grants {
		spec.Allow = append(spec.Allow, g.rule())
	}
	return m.withCanaries(spec, k.rec.Session.Stop)
}

// withCanaries adds the names that nobody has a reason to ask for: the box's, and those of the trip rules that the
// kid was born with, which no other card takes away.
func (m *Manager) withCanaries(spec policy.Spec, born session.Stop) policy.Spec {
	spec.Deny = append(slices.Clip(spec.Deny), session.Canaries(born.Trip)...)
	spec.Deny = append(spec.Deny, session.Canaries(m.cfg.Trip)...)
	return spec
}

// applyEgress makes what egress returns the kid's next generation and pushes it everywhere. An error of kind
// Invalid means that it cannot be enforced and that nothing was changed. Call it with life held.
func (m *Manager) applyEgress(ctx context.Context, k *kid) (cut int, err error) {
	if !k.networked() {
		return 0, refuse(Invalid, reason.Malformed, "kid %s has no network of its own, so nothing can be opened for it: spawn one with `network: outbound-only` in its card", k.name)
	}
	spec := m.egress(k)
	compiled, err := policy.Compile(spec)
	if err != nil {
		return 0, refuse(Invalid, reason.Malformed, "the new policy of kid %s cannot be enforced, the old one stays: %w", k.name, err)
	}
	next := k.rec.Session
	next.Names = append([]string(nil), next.Names...) // the old document's readers keep theirs
	next.AddNames(compiled.ExactHosts())
	next.Egress = spec
	next.Generation++
	m.mu.Lock()
	k.rec.Session = next
	k.rec.Plan.Ports = compiled.Ports()
	k.unpushed = true
	m.mu.Unlock()
	// On disk first: a daemon that restarts in between reads the new one.
	if err := errors.Join(m.save(k), m.store.Put(&k.rec.Session, m.cfg.Inst.GroupID())); err != nil {
		return 0, err
	}
	return m.converge(ctx, k)
}

// converge pushes the kid's document to every enforcement point. Call it with life held.
func (m *Manager) converge(ctx context.Context, k *kid) (cut int, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	s := &k.rec.Session
	for _, p := range m.cfg.Points {
		ack, putErr := p.Put(ctx, s)
		if putErr == nil && ack.Generation != s.Generation {
			putErr = fmt.Errorf("it acknowledged generation %d", ack.Generation)
		}
		if putErr != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", p.Name(), putErr))
		}
		cut += ack.Cut
	}
	if portsErr := m.cfg.Kernel.SetPorts(s.Mark, k.rec.Plan.Ports); portsErr != nil {
		err = errors.Join(err, fmt.Errorf("the kernel's port list: %w", portsErr))
	}
	if err != nil {
		return cut, refuse(Unavailable, reason.PolicyNotLoaded,
			"generation %d of kid %s is noted and pushed again until it is taken everywhere; until then only what both policies allow is open: %w", s.Generation, k.name, err)
	}
	m.mu.Lock()
	k.unpushed = false
	m.mu.Unlock()
	return cut, nil
}

// policed are the states in which a policy still means something: what a stop left open is still the policy's.
var policed = []wire.KidState{wire.KidRunning, wire.KidPaused, wire.KidStopped}

// tend brings policies up to date: grants that ran out are taken out, and what was not taken is pushed again.
func (m *Manager) tend(ctx context.Context) {
	for _, k := range m.inState(policed...) {
		if !k.life.TryLock() {
			continue // somebody is at it
		}
		m.tendKid(ctx, k)
		k.life.Unlock()
	}
}

func (m *Manager) tendKid(ctx context.Context, k *kid) {
	m.mu.Lock()
	skip, unpushed := !k.state.Is(policed...), k.unpushed
	m.mu.Unlock()
	if skip {
		return
	}
	ended := k.dropEndedGrants()
	for _, g := range ended {
		m.log(k, g.record(audit.EventGrantEnded, "", "it ran out"))
	}
	var err error
	switch {
	case len(ended) > 0:
		_, err = m.applyEgress(ctx, k)
	case unpushed:
		_, err = m.converge(ctx, k)
	}
	if err != nil {
		m.cfg.Log.Error("bringing a kid's policy up to date; trying again", "kid", k.name, "error", err)
	}
}
