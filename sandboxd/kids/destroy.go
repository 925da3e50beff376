package kids

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
	"tagout/sandboxd/network"
)

// Destroy removes the kid, whatever state it is in, with all that was made for it and returns when it is gone. why
// is for the record and must not be empty. A kid that is not there is not an error. When something cannot be removed
// yet, the kid stays denied and `destroying`, its name and address stay taken, and Run goes on trying.
func (m *Manager) Destroy(ctx context.Context, name, actor, why string) error {
	if err := needWhy(name, why); err != nil {
		return err
	}
	m.mu.Lock()
	k := m.kids[name]
	m.mu.Unlock()
	if k == nil {
		return nil
	}
	return m.destroy(ctx, k, actor, why)
}

func needWhy(name, why string) error {
	if strings.TrimSpace(why) == "" {
		return refuse(Invalid, reason.Malformed, "destroying kid %s: say why, for the record", name)
	}
	return nil
}

// destroy is Destroy of one kid, and of no other that has its name by then.
func (m *Manager) destroy(ctx context.Context, k *kid, actor, why string) error {
	name := k.name
	m.mu.Lock()
	if m.kids[name] != k {
		m.mu.Unlock()
		return nil
	}
	k.state.Enter(wire.KidDestroying) // possible from everywhere
	k.cancel()
	m.mu.Unlock()

	k.life.Lock()
	defer k.life.Unlock()
	if !m.holds(k) {
		return nil // the spawn took itself back, or another destroy was first
	}
	m.enter(k, wire.KidDestroying)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	err := m.teardown(ctx, k)
	outcome := audit.OutcomeOK
	rec := audit.Record{Event: audit.EventKidDestroyed, Actor: actor, Detail: why}
	if err != nil {
		outcome = audit.OutcomeFail
		rec.Detail = err.Error()
		err = refuse(Unavailable, reason.Internal, "destroying kid %s: it is denied everything, but not all of it is gone; this is tried again until it is: %w", name, err)
	}
	rec.Outcome, rec.Fields = outcome, m.recordListing(k)
	m.log(k, rec)
	if !wire.IsProofKid(name) {
		m.cfg.Metrics.Destroyed(outcome)
	}
	return err
}

// holds says whether k is still the kid of its name.
func (m *Manager) holds(k *kid) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.kids[k.name] == k
}

// Run destroys kids whose time is over, and finishes what could not be finished at once, teardowns and commands that
// did not start, and what the store keeps of commands, until ctx ends.
func (m *Manager) Run(ctx context.Context) {
	var ends sync.WaitGroup
	defer ends.Wait()
	ends.Go(func() { m.keepSheltered(ctx) })
	ends.Go(func() { m.keepMinted(ctx) })
	look := time.NewTicker(lookForgotten)
	defer look.Stop()
	tick := time.NewTicker(retryTeardown)
	defer tick.Stop()
	tend := time.NewTicker(tendEvery)
	defer tend.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
			m.destroyForgotten(ctx, &ends)
			continue
		case <-tend.C:
			m.tend(ctx)
			continue
		case <-tick.C:
		}
		m.cfg.Runtime.Reap()
		for _, k := range m.unfinished() {
			m.finish(ctx, k)
		}
	}
}

// unfinished returns the kids whose teardown failed.
func (m *Manager) unfinished() []*kid {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*kid
	for _, k := range m.kids {
		if k.unfinished {
			out = append(out, k)
		}
	}
	return out
}

// finish goes on with a teardown that failed. Why the kid had to go was recorded then.
func (m *Manager) finish(ctx context.Context, k *kid) {
	if !k.life.TryLock() {
		return // somebody is at it
	}
	defer k.life.Unlock()
	if !m.holds(k) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, teardownTimeout)
	defer cancel()
	if err := m.teardown(ctx, k); err != nil {
		m.cfg.Log.Error("finishing a teardown; trying again", "kid", k.name, "error", err)
		return
	}
	if k.rec.Whole {
		m.log(k, audit.Record{Event: audit.EventKidDestroyed, Actor: instance.Sandboxd, Outcome: audit.OutcomeOK, Detail: "what could not be removed at once is gone"})
	}
}

// inState returns the kids that are in one of the states now.
func (m *Manager) inState(any ...wire.KidState) []*kid {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*kid
	for _, k := range m.kids {
		if k.state.Is(any...) {
			out = append(out, k)
		}
	}
	return out
}

// teardown takes the kid apart. What fails is tried again by Run.
func (m *Manager) teardown(ctx context.Context, k *kid) error {
	err := m.takeApart(ctx, k)
	m.mu.Lock()
	defer m.mu.Unlock()
	k.unfinished = err != nil
	return err
}

// takeApart removes everything that steps made. Each part is done also where the kid never got that far. Of one row all is
// tried; the next is begun when all of it is gone.
func (m *Manager) takeApart(ctx context.Context, k *kid) error {
	for _, row := range m.undo() {
		var errs []error
		for _, s := range row {
			errs = append(errs, m.takeStep(ctx, k, s))
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	return nil
}

// undoing is one step of a teardown.
type undoing struct {
	name string
	do   func(ctx context.Context, k *kid) error
}

func (m *Manager) takeStep(ctx context.Context, k *kid, s undoing) error {
	if err := m.injected(s.name, false); err != nil {
		return err
	}
	if err := s.do(ctx, k); err != nil {
		return err
	}
	return m.injected(s.name, true)
}

// undo lists the steps of a teardown. First the processes, the kernel's entries, the tokens and the policies: from then on
// the kid is nothing but names. These are removed only when all of that is known to be gone, the session document among
// the last, so that every daemon that starts in between still finds it and every question about it is denied.
func (m *Manager) undo() [][]undoing {
	down := &[]func(context.Context) error{}
	return [][]undoing{
		{{"note end", m.noteEnd}},
		{
			{"end processes", m.killProcesses},
			{"leave kernel", func(_ context.Context, k *kid) error { return m.withdrawEntries(k) }},
			{"forget tokens", func(ctx context.Context, k *kid) error { return m.forgetTokens(ctx, k, down) }},
			{"withdraw policy", func(ctx context.Context, k *kid) error { return m.withdrawPolicies(ctx, k, down) }},
		},
		{
			{"remove link", func(_ context.Context, k *kid) error { return network.Disconnect(k.rec.Session.Link) }},
			{"unpin namespaces", func(_ context.Context, k *kid) error { return network.RemoveNamespaces(m.pins(k.name)) }},
		},
		{{"remove document", func(_ context.Context, k *kid) error { return m.store.Delete(k.name) }}},
		{{"ask again", func(ctx context.Context, _ *kid) error { return askAgain(ctx, *down) }}},
		{{"unmount", func(_ context.Context, k *kid) error {
			return errors.Join(files.Unmount(m.workspaceDir(k)), files.Detach(m.rootDir(k)), files.Detach(m.layersDir(k)))
		}}},
		{{"remove cgroup", func(ctx context.Context, k *kid) error { return m.cfg.Cgroups.Remove(ctx, m.cgroupRel(k.name)) }}},
		{{"unclaim", func(_ context.Context, k *kid) error { return m.unclaim(k) }}},
	}
}

// noteEnd tells a successor that the kid has to go, should this process not get to the end of it. Where it cannot be noted,
// on a full disk say, the kid goes all the same.
func (m *Manager) noteEnd(_ context.Context, k *kid) error {
	if _, err := os.Stat(m.dir(k.name)); errors.Is(err, fs.ErrNotExist) || k.rec.Ending {
		return nil
	}
	k.rec.Ending = true
	if err := m.save(k); err != nil {
		m.cfg.Log.Warn("noting that a kid is destroyed", "kid", k.name, "error", err)
	}
	return nil
}

// askAgain asks the daemons that were down: one may have started and read the document just before it went.
func askAgain(ctx context.Context, down []func(context.Context) error) error {
	for _, again := range down {
		if err := again(ctx); err != nil && !errors.Is(err, ErrDown) {
			return err
		}
	}
	return nil
}

// killProcesses kills the cgroup, waits until nothing runs in it, and removes the container.
func (m *Manager) killProcesses(ctx context.Context, k *kid) error {
	dir, freezer := m.cfg.Cgroups.V2(m.cgroupRel(k.name)), m.cfg.Cgroups.Freezer(m.cgroupRel(k.name))
	if _, err := os.Stat(dir); err == nil {
		if err := cgroup.Kill(dir); err != nil {
			return err
		}
		if err := cgroup.Thaw(dir, freezer); err != nil { // a task frozen by v1 does not die before
			return err
		}
		if err := cgroup.WaitEmpty(ctx, dir); err != nil {
			return fmt.Errorf("waiting for the kid's processes to end: contained, not dead: %w", err)
		}
	}
	if err := m.cfg.Runtime.Delete(ctx, k.name); err != nil {
		return err
	}
	if k.pid != 0 {
		unix.Wait4(k.pid, nil, unix.WNOHANG, nil) // watch may have been first
	}
	k.markGone()
	if m.cfg.Files != nil {
		m.cfg.Files.Remove(k.rec.Session.ID)
	}
	m.listFiles(k)
	return nil
}

func (m *Manager) withdrawEntries(k *kid) error {
	if err := m.cfg.Kernel.Withdraw(k.entry()); err != nil {
		return fmt.Errorf("making the kernel forget the kid: %w", err)
	}
	return nil
}

func (m *Manager) forgetTokens(ctx context.Context, k *kid, down *[]func(context.Context) error) error {
	forget := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		if err := m.cfg.Credentials.Forget(ctx, k.name); err != nil {
			return fmt.Errorf("making credd forget the kid's tokens: %w", err)
		}
		return nil
	}
	err := forget(ctx)
	if errors.Is(err, ErrDown) {
		*down = append(*down, forget)
		return nil
	}
	return err
}

func (m *Manager) withdrawPolicies(ctx context.Context, k *kid, down *[]func(context.Context) error) error {
	if !k.networked() {
		return nil // it never had one
	}
	errs := make([]error, 0, len(m.cfg.Points))
	for _, p := range m.cfg.Points {
		withdraw := func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			if err := p.Delete(ctx, k.name); err != nil {
				return fmt.Errorf("withdrawing the policy from %s: %w", p.Name(), err)
			}
			return nil
		}
		err := withdraw(ctx)
		if errors.Is(err, ErrDown) {
			*down = append(*down, withdraw)
			continue
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// unclaim gives the name, the index and the directory back.
func (m *Manager) unclaim(k *kid) error {
	if err := os.RemoveAll(m.dir(k.name)); err != nil {
		return fmt.Errorf("removing the kid's directory: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgetExecs(k)
	delete(m.kids, k.name)
	close(k.released)
	m.countKids()
	return nil
}
