package kids

import (
	"context"
	"errors"
	"fmt"
	"time"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// freezeLimit is how long the kernel may take to freeze a kid. A task in uninterruptible sleep is frozen only when it
// wakes up.
const freezeLimit = 5 * time.Second

// Pause freezes everything in the kid and returns when the kernel says that it is. It uses the v2 freezer also where
// the v1 freezer is there: what that one holds takes no signal, and a paused kid has to die at once. A kid that is
// paused already is fine.
func (m *Manager) Pause(ctx context.Context, name, actor, why string) error {
	return m.withKid(ctx, name, func(ctx context.Context, k *kid) error {
		if m.is(k, wire.KidPaused) {
			return nil
		}
		if !m.is(k, wire.KidRunning) {
			return m.cannot(k, "paused", "only a running kid can be")
		}
		if err := m.freeze(ctx, k); err != nil {
			return err
		}
		err := m.enter(k, wire.KidPaused)
		m.log(k, audit.Record{Event: audit.EventKidPaused, Actor: actor, Outcome: audit.OutcomeOK, Detail: why})
		return m.overtaken(k, err)
	})
}

func (m *Manager) freeze(ctx context.Context, k *kid) error {
	dir := m.cfg.Cgroups.V2(m.cgroupRel(k.name))
	ctx, cancel := context.WithTimeout(ctx, freezeLimit)
	defer cancel()
	err := cgroup.Freeze(dir, "")
	if err == nil {
		err = cgroup.WaitFrozen(ctx, dir)
	}
	if err == nil {
		return nil
	}
	err = errors.Join(err, cgroup.Thaw(dir, ""))
	return refuse(Unavailable, reason.Internal, "pausing kid %s: the kernel did not freeze all of it, and it goes on: %w", k.name, err)
}

// Resume lets a paused kid go on, unless a tag hangs on it. A kid that is running already is fine.
func (m *Manager) Resume(ctx context.Context, name, actor, why string) error {
	return m.withKid(ctx, name, func(ctx context.Context, k *kid) error {
		if m.is(k, wire.KidRunning) {
			return nil
		}
		if err := m.clear(ctx, k); err != nil {
			return err // who stopped it, and why
		}
		if m.isStopped(ctx, k) || !m.is(k, wire.KidPaused) {
			return m.cannot(k, "resumed", "only a paused kid can be")
		}
		if err := cgroup.Thaw(m.cfg.Cgroups.V2(m.cgroupRel(k.name)), ""); err != nil {
			return fmt.Errorf("resuming kid %s: %w", k.name, err)
		}
		err := m.enter(k, wire.KidRunning)
		m.log(k, audit.Record{Event: audit.EventKidResumed, Actor: actor, Outcome: audit.OutcomeOK, Detail: why})
		return m.overtaken(k, err)
	})
}

// alone finds the kid and keeps others from changing it until done is called.
func (m *Manager) alone(name string) (k *kid, done func(), err error) {
	m.mu.Lock()
	k = m.kids[name]
	m.mu.Unlock()
	if k == nil {
		return nil, nil, notFound(name)
	}
	k.life.Lock()
	if !m.holds(k) {
		k.life.Unlock()
		return nil, nil, notFound(name)
	}
	return k, k.life.Unlock, nil
}

// withKid runs fn while nothing else changes the kid. A destroy does not wait for fn: it ends fn's context.
func (m *Manager) withKid(ctx context.Context, name string, fn func(ctx context.Context, k *kid) error) error {
	k, done, err := m.alone(name)
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m.setCancel(k, cancel)
	m.touch(k)
	return fn(ctx, k)
}

func (m *Manager) is(k *kid, state wire.KidState) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return k.state.Is(state)
}

// cannot refuses what the kid's state does not allow.
func (m *Manager) cannot(k *kid, done, because string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return refuse(Conflict, reason.OK, "kid %s is %s and cannot be %s: %s", k.name, k.state.Now(), done, because)
}

// overtaken is for a state that the kid could not take on because a stop, a destroy or its own end came first.
func (m *Manager) overtaken(k *kid, err error) error {
	if err == nil {
		return nil
	}
	return refuse(Conflict, reason.OK, "kid %s: something else was faster: %w", k.name, err)
}
