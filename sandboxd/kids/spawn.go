package kids

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
	"tagout/sandboxd/network"
)

// step is one stage of a spawn, under the name that timings and messages use. Whatever it makes, teardown
// finds and removes, also when the step failed half-way.
type step struct {
	name string
	do   func(ctx context.Context, k *kid) error
}

// steps lists the stages in order. The session document needs the cgroup's id, so the cgroup comes first;
// nothing can be in it before the container is created, much later.
func (m *Manager) steps() []step {
	return []step{
		{"cgroup", m.makeCgroup},
		{"document", m.writeDocument},
		{"network", m.makeNetwork},
		{"kernel", m.admit},
		{"policy", m.pushPolicy},
		{"tokens", m.mintTokens},
		{"files", m.makeFiles},
		{"create", m.createContainer},
		{"clear", m.clear},
		{"start", m.startContainer},
	}
}

// Spawn makes a kid, all of it or nothing. When it returns, kid-init runs and every guard of the session has
// acknowledged it. The error is an *Error where the request was refused. When ctx ends first, the spawn is
// taken back.
func (m *Manager) Spawn(ctx context.Context, r Request) (wire.Kid, error) {
	began := time.Now()
	if err := m.checkRequest(r); err != nil {
		return m.refused(r, "", began, err)
	}
	// Asked before anything is made, and again when everything is there and nothing runs yet.
	if err := m.clearScopes(ctx, r.Name, r.Plan.Card); err != nil {
		return m.refused(r, "", began, err)
	}
	cleared := time.Since(began)
	k, err := m.claim(r)
	if err != nil {
		return m.refused(r, "", began, err)
	}
	defer k.life.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m.setCancel(k, cancel)
	timings := map[string]time.Duration{"ask": cleared, "claim": time.Since(began) - cleared}
	if err := m.runSteps(ctx, k, timings); err != nil {
		return m.refused(r, k.name, began, m.rollback(ctx, k, err))
	}
	took := time.Since(began)
	timings["total"] = took
	m.mu.Lock()
	k.rec.Timings = timings
	k.state = wire.KidRunning
	select {
	case <-k.gone: // a stop was faster
		k.state = wire.KidExited
	default:
	}
	view := k.view()
	m.mu.Unlock()
	m.cfg.Metrics.Spawned(audit.OutcomeOK, took)
	m.log(k, audit.Record{Event: audit.EventKidSpawned, Actor: r.Actor, Outcome: audit.OutcomeOK, Generation: k.rec.Session.Generation,
		Process: &audit.Process{PID: k.pid}, Detail: r.Purpose, Fields: map[string]string{"took": took.String(), "image": r.Plan.Image}})
	return view, nil
}

// setCancel lets a destroy end a spawn that is under way.
func (m *Manager) setCancel(k *kid, cancel func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k.cancel = cancel
}

func (m *Manager) runSteps(ctx context.Context, k *kid, timings map[string]time.Duration) error {
	for _, s := range m.steps() {
		if err := ctx.Err(); err != nil {
			return refuse(Conflict, reason.OK, "the spawn was taken back before step %s: %w", s.name, err)
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
		timings[s.name] = time.Since(began)
		m.cfg.Metrics.Stage(s.name, timings[s.name])
	}
	return nil
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
	m.setState(k, wire.KidDestroying)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	if err := m.teardown(ctx, k); err != nil {
		m.cfg.Log.Error("taking a failed spawn back; trying again", "kid", k.name, "error", err)
		return &Error{Kind: KindOf(cause), Reason: ReasonOf(cause), Err: fmt.Errorf("%w (and not all of it could be taken back yet: %w)", cause, err)}
	}
	return cause
}

// clearScopes asks whether a tag hangs on the kid, its card or the box. No answer is a refusal.
func (m *Manager) clearScopes(ctx context.Context, kidName, card string) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	scopes := []wire.Scope{{Card: card}}
	if kidName != "" {
		scopes = append(scopes, wire.Scope{Kid: kidName})
	}
	for _, scope := range scopes {
		err := m.cfg.Stopper.Clear(ctx, scope)
		switch {
		case errors.Is(err, ErrTagged):
			return refuse(Tagged, reason.Tagged, "%w", err)
		case err != nil:
			return refuse(Unavailable, reason.Tagged, "asking killswitchd whether a tag hangs here: without its answer nothing starts: %w", err)
		}
	}
	return nil
}

func (m *Manager) clear(ctx context.Context, k *kid) error {
	return m.clearScopes(ctx, k.name, k.rec.Session.Card)
}

// makeCgroup makes the kid's cgroup in the v2 hierarchy, so that its id is known before anything is in it.
func (m *Manager) makeCgroup(_ context.Context, k *kid) error {
	if err := m.cfg.Cgroups.Create(m.cgroupRel(k.name)); err != nil {
		return err
	}
	id, err := cgroup.ID(k.rec.Session.Cgroup)
	if err != nil {
		return err
	}
	k.rec.Session.CgroupID = id
	return m.giveToKillswitchd(k.rec.Session.Cgroup, "cgroup.kill", "cgroup.freeze")
}

// giveToKillswitchd makes it the owner of the files with which it stops the kid, and lets it reach them:
// sandboxd's umask, and runc's after it, would shut the directory.
func (m *Manager) giveToKillswitchd(dir string, names ...string) error {
	uid := m.cfg.Inst.UID(instance.Killswitchd)
	if err := os.Chmod(dir, 0o755); err != nil {
		return fmt.Errorf("letting killswitchd reach the kid's cgroup: %w", err)
	}
	for _, name := range names {
		if err := os.Chown(filepath.Join(dir, name), uid, -1); err != nil {
			return fmt.Errorf("giving killswitchd the switch of the kid's cgroup: %w", err)
		}
	}
	return nil
}

func (m *Manager) writeDocument(_ context.Context, k *kid) error {
	if err := m.save(k); err != nil {
		return err
	}
	return m.store.Put(&k.rec.Session, m.cfg.Inst.GroupID())
}

func (m *Manager) makeNetwork(ctx context.Context, k *kid) error {
	s := &k.rec.Session
	first, count := m.cfg.Inst.KidUIDRange(s.Index)
	err := network.CreateNamespaces(ctx, network.NamespaceConfig{Pins: m.pins(k.name), UIDFirst: first, UIDCount: count, Holder: m.cfg.Init})
	if err != nil {
		return err
	}
	k.rec.IfIndex, err = network.Connect(network.LinkConfig{NetNS: s.NetNS, Name: s.Link, HostAddr: s.HostAddr, KidAddr: s.Addr})
	if err != nil {
		return err
	}
	return m.save(k)
}

func (m *Manager) admit(_ context.Context, k *kid) error {
	if err := m.cfg.Kernel.Admit(k.entry()); err != nil {
		return fmt.Errorf("making the kid known to the kernel: %w", err)
	}
	return nil
}

// pushPolicy waits until every enforcement point has acknowledged this generation of the policy.
func (m *Manager) pushPolicy(ctx context.Context, k *kid) error {
	return m.eachPoint(ctx, func(ctx context.Context, p PolicyPoint) error {
		ack, err := p.Put(ctx, &k.rec.Session)
		if err == nil && (ack.Kid != k.name || ack.Generation != k.rec.Session.Generation) {
			err = fmt.Errorf("it acknowledged generation %d of kid %q instead of %d", ack.Generation, ack.Kid, k.rec.Session.Generation)
		}
		if err != nil {
			return refuse(Unavailable, reason.PolicyNotLoaded, "loading the policy into %s: without its acknowledgement nothing starts: %w", p.Name(), err)
		}
		return nil
	})
}

// eachPoint asks all enforcement points at the same time.
func (m *Manager) eachPoint(ctx context.Context, ask func(context.Context, PolicyPoint) error) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	errs := make([]error, len(m.cfg.Points))
	var wg sync.WaitGroup
	for i, p := range m.cfg.Points {
		wg.Go(func() { errs[i] = ask(ctx, p) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (m *Manager) mintTokens(ctx context.Context, k *kid) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	s := &k.rec.Session
	ask := wire.MintRequest{Kid: k.name, Session: s.ID, Card: s.Card, Mark: s.Mark, Secrets: []wire.MintSecret{}}
	for _, secret := range s.Secrets {
		ask.Secrets = append(ask.Secrets, wire.MintSecret{Name: secret.Name})
	}
	reply, err := m.cfg.Credentials.Mint(ctx, ask)
	if KindOf(err) != Internal { // credd's own refusal, already in words
		return err
	}
	if err != nil {
		return refuse(Unavailable, reason.CreddDown, "getting the session's tokens from credd: %w", err)
	}
	k.rec.Tokens = map[string]string{}
	for _, secret := range s.Secrets {
		token, ok := reply.Tokens[secret.Name]
		if !ok || token == "" {
			return refuse(Unavailable, reason.CreddDown, "credd gave no token for secret %s", secret.Name)
		}
		k.rec.Tokens[secret.Env] = token
	}
	return m.save(k)
}

func (m *Manager) makeFiles(_ context.Context, k *kid) error {
	if err := os.Mkdir(m.bundleDir(k), 0o700); err != nil {
		return fmt.Errorf("making the kid's files: %w", err)
	}
	if err := files.Mount(m.workspaceDir(k), k.rec.Plan.Workspace, m.owner(k)); err != nil {
		return err
	}
	if err := files.Place(m.workspaceDir(k), k.rec.Plan.Inputs, m.owner(k)); err != nil {
		return refuse(Invalid, reason.Malformed, "%w", err)
	}
	return nil
}

func (m *Manager) createContainer(ctx context.Context, k *kid) error {
	mounts, err := m.cfg.Images[k.rec.Plan.Image].Root(m.rootDir(k), k.name, k.rec.Session.Addr)
	if err != nil {
		return err
	}
	state, err := m.cfg.Runtime.Create(ctx, m.bundleDir(k), m.container(k, mounts))
	if err != nil {
		return err
	}
	k.pid = state.PID
	m.watch(k)
	if k.rec.Session.Freezer == "" {
		return nil
	}
	return m.giveToKillswitchd(k.rec.Session.Freezer, "freezer.state")
}

func (m *Manager) startContainer(ctx context.Context, k *kid) error {
	if err := m.cfg.Runtime.Start(ctx, k.name); err != nil {
		return err
	}
	k.rec.State = wire.KidRunning
	return m.save(k)
}
