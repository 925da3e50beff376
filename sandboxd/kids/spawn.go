package kids

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// step is one step of a spawn, under the name that timings and messages use, and part of a stage. Whatever it makes,
// teardown finds and removes, also when the step failed half-way.
type step struct {
	name  string
	stage string // one of wire.SpawnStages
	do    func(ctx context.Context, k *kid) error
}

// lane is steps that follow each other.
type lane []step

// course lists the steps: one part after the other, and the lanes of a part beside each other. The session document needs
// the cgroup's id, so the cgroup comes first; nothing can be in it before the container is created.
//
// The kid is linked and the guards learn of it while its container is made: both take their time waiting, for the kernel and for other
// daemons, and neither asks for the other. Nothing of the kid's own runs before both are done: its init waits for start, and
// what the guards have not heard of they deny.
func (m *Manager) course() [][]lane {
	return [][]lane{
		{{
			{"cgroup", wire.StageAllocation, m.makeCgroup},
			{"document", wire.StageAllocation, m.writeDocument},
			{"namespaces", wire.StageNetwork, m.makeNamespaces},
		}},
		{
			{
				{"network", wire.StageNetwork, m.makeNetwork},
				{"kernel", wire.StageNetwork, m.admit},
				{"policy", wire.StageNetwork, m.pushPolicy},
				{"tokens", wire.StageAllocation, m.mintTokens},
			},
			{
				{"files", wire.StageFilesystem, m.makeFiles},
				{"root", wire.StageFilesystem, m.makeRoot},
				{"create", wire.StageRuntime, m.createContainer},
			},
		},
		{{
			{"minted", wire.StageFilesystem, m.placeMinted},
			{"watch", wire.StageRuntime, m.watchFiles},
			{"clear", wire.StageRuntime, m.clear},
			{"start", wire.StageRuntime, m.startContainer},
		}},
	}
}

// Spawn makes a kid, all of it or nothing. When it returns, kid-init runs and every guard of the session has
// acknowledged it. The error is an *Error where the request was refused. When ctx ends first, the spawn is
// taken back.
func (m *Manager) Spawn(ctx context.Context, r Request) (wire.Kid, error) {
	began := time.Now()
	if kid, ok := m.madeBefore(r.Origin); ok {
		return kid, nil
	}
	if err := errors.Join(m.checkRequest(r), m.canRecord(), m.hasRoom()); err != nil {
		return m.refused(r, "", began, err)
	}
	// Asked before anything is made, and again when everything is there and nothing runs yet.
	if err := m.clearScopes(ctx, r.Name, r.Plan.Card); err != nil {
		return m.refused(r, "", began, err)
	}
	sig, err := r.vouch()
	if err == nil {
		err = r.approve()
	}
	if err != nil {
		return m.refused(r, "", began, err)
	}
	var tags []wire.Tag
	if r.Name == "" {
		tags = m.tags(ctx) // where nobody answers, the last question below refuses the kid
	}
	cleared := time.Since(began)
	k, err := m.claim(r, tags)
	if err != nil {
		return m.refused(r, "", began, err)
	}
	defer k.life.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m.setCancel(k, cancel)
	t := newTimings(m.cfg.Metrics)
	var before laneTime
	t.step(&before, step{name: "ask", stage: wire.StageAllocation}, cleared)
	t.step(&before, step{name: "claim", stage: wire.StageAllocation}, time.Since(began)-cleared)
	t.waited(before)
	if err := m.runSteps(ctx, k, t); err != nil {
		return m.refused(r, k.name, began, m.rollback(ctx, k, m.whyCut(ctx, k, err)))
	}
	stages, steps := t.done(began)
	m.begin(k)
	m.mu.Lock()
	k.rec.Stages, k.rec.Steps, k.fresh = stages, steps, true
	k.state.Enter(wire.KidRunning) // refused where a stop, a destroy or the kid's own end was faster
	view := k.view()
	view.SameCard = k.twins
	m.mu.Unlock()
	m.spawned(k, r, sig)
	return view, nil
}

func (r Request) vouch() (Signature, error) {
	if r.Vouch == nil {
		return Signature{}, nil
	}
	return r.Vouch()
}

// madeBefore returns the kid that a request with this origin made, in this process or a predecessor: whoever lost the
// answer asks again.
func (m *Manager) madeBefore(origin string) (wire.Kid, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.kids {
		if origin != "" && k.rec.Origin == origin && !k.state.Is(wire.KidSpawning, wire.KidDestroying) {
			return k.view(), true
		}
	}
	return wire.Kid{}, false
}

// canRecord refuses what could not be recorded.
func (m *Manager) canRecord() error {
	if err := m.cfg.Audit.Err(); err != nil {
		return refuse(Capacity, reason.Capacity, "the audit log takes no records, and nothing runs that is not recorded: make room for it: %w", err)
	}
	return nil
}

// hasRoom refuses another kid while there is hardly any room for records.
func (m *Manager) hasRoom() error {
	if m.cfg.Room == nil {
		return nil
	}
	if err := m.cfg.Room(); err != nil {
		return refuse(Capacity, reason.AuditSpace, "%w", err)
	}
	return nil
}

// setCancel lets a destroy end a spawn that is under way.
func (m *Manager) setCancel(k *kid, cancel func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k.cancel = cancel
}

// runSteps goes the course, as far as it gets.
func (m *Manager) runSteps(ctx context.Context, k *kid, t *timings) error {
	for _, part := range m.course() {
		if err := m.runPart(ctx, k, part, t); err != nil {
			return err
		}
	}
	return ctx.Err() // nobody is left to be told that there is a kid
}

// runPart returns when all lanes have ended. The first that fails calls the others off, and its error is the answer.
func (m *Manager) runPart(ctx context.Context, k *kid, part []lane, t *timings) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	took := make([]laneTime, len(part))
	for i, l := range part {
		wg.Go(func() {
			if err := m.runLane(ctx, k, l, func(s step, d time.Duration) { t.step(&took[i], s, d) }); err != nil {
				cancel(err) // only the first call counts
			}
		})
	}
	wg.Wait()
	t.waited(took...)
	return context.Cause(ctx)
}

func (m *Manager) runLane(ctx context.Context, k *kid, l lane, note func(step, time.Duration)) error {
	for _, s := range l {
		if err := ctx.Err(); err != nil {
			return err
		}
		began := time.Now()
		if err := m.injected(s.name, false); err != nil {
			return err
		}
		if err := s.do(ctx, k); err != nil {
			return err
		}
		if err := m.injected(s.name, true); err != nil {
			return err
		}
		note(s, time.Since(began))
	}
	return nil
}

// whyCut says why a spawn ended early, where that was meant: what broke is then only how it showed.
func (m *Manager) whyCut(ctx context.Context, k *kid, err error) error {
	switch {
	case ctx.Err() != nil:
		return refuse(Conflict, reason.OK, "kid %s was taken back before it was up: it was destroyed, or whoever asked for it went away", k.name)
	case KindOf(err) != Tagged && m.isStopped(ctx, k):
		return refuse(Tagged, reason.Stopped, "kid %s was stopped before it was up: `tagout tags` shows by whom: %w", k.name, err)
	}
	return err
}

// injected is where tests make a step fail: before it ran, or after it took effect.
func (m *Manager) injected(name string, done bool) error {
	if m.fault == nil {
		return nil
	}
	return m.fault(name, done)
}

// refused records and returns why there is no kid.
func (m *Manager) refused(r Request, name string, began time.Time, err error) (wire.Kid, error) {
	if name == "" {
		name = r.Name
	}
	err = ranOut(err)
	if r.Plan.Proof {
		return m.refusedProof(name, err)
	}
	outcome := audit.OutcomeFail
	if KindOf(err) == Tagged || KindOf(err) == Unavailable {
		outcome = audit.OutcomeDeny
	}
	m.cfg.Metrics.Spawned(outcome, time.Since(began))
	m.cfg.Audit.Log(audit.Record{Event: audit.EventKidRefused, Kid: name, Card: r.Plan.Card, Actor: r.Actor, Outcome: outcome,
		Reason: ReasonOf(err), Detail: err.Error()})
	return wire.Kid{}, err
}

// rollback takes everything back and returns why. What cannot be taken back now stays claimed, denied, and
// is tried again by Run.
func (m *Manager) rollback(ctx context.Context, k *kid, cause error) error {
	m.enter(k, wire.KidDestroying)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	if err := m.teardown(ctx, k); err != nil {
		m.cfg.Log.Error("taking a failed spawn back; trying again", "kid", k.name, "error", err)
		return &Error{Kind: KindOf(cause), Reason: ReasonOf(cause), Err: fmt.Errorf("%w (and not all of it could be taken back yet: %w)", cause, err)}
	}
	return cause
}
