package kids

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
	"tagout/sandboxd/filewatch"
	"tagout/sandboxd/network"
)

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

// openToAll lets everybody pass through a cgroup's directory, as all of cgroupfs does by default.
func openToAll(dir string) error {
	if err := os.Chmod(dir, 0o755); err != nil { // its files have modes of their own
		return fmt.Errorf("giving killswitchd the switch of the kid's cgroup: %w", err)
	}
	return nil
}

func (m *Manager) writeDocument(_ context.Context, k *kid) error {
	if err := m.save(k); err != nil {
		return err
	}
	return m.store.Put(&k.rec.Session, m.cfg.Inst.GroupID())
}

func (m *Manager) makeNamespaces(ctx context.Context, k *kid) error {
	first, count := m.cfg.Inst.KidUIDRange(k.rec.Session.Index)
	return network.CreateNamespaces(ctx, network.NamespaceConfig{Pins: m.pins(k.name), UIDFirst: first, UIDCount: count, Holder: m.cfg.Init, UserOnly: k.onHost()})
}

func (m *Manager) makeNetwork(_ context.Context, k *kid) (err error) {
	if !k.networked() {
		return nil
	}
	s := &k.rec.Session
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
	if !k.networked() {
		return nil // there is no road that they would have to guard
	}
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
	within := askTimeout
	if len(k.rec.Session.Secrets) > 0 {
		within = mintTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if k.rec.Plan.Proof {
		m.mintProof(ctx, k)
		return nil
	}
	s := &k.rec.Session
	ask := wire.MintRequest{Kid: k.name, Session: s.ID, Card: s.Card, Mark: s.Mark, Secrets: []wire.MintSecret{}, TTL: k.rec.Plan.TokenLifetime}
	for _, secret := range s.Secrets {
		ask.Secrets = append(ask.Secrets, wire.MintSecret{Name: secret.Name})
	}
	ask.Mint = mintsOf(s)
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
	if err := k.takeMinted(reply); err != nil {
		return err
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
	if err := files.Place(m.workspaceDir(k), k.rec.Plan.Inputs, m.owner(k), m.searchIn(k, "").input); err != nil {
		if ReasonOf(err) == reason.LooksLikeKey {
			return err
		}
		return refuse(Invalid, reason.Malformed, "%w", err)
	}
	return nil
}

// makeRoot makes the kid's root filesystem, as its image has it.
func (m *Manager) makeRoot(_ context.Context, k *kid) error {
	img, err := m.imageOf(k)
	if err != nil {
		return err
	}
	addr := k.rec.Session.Addr
	if !k.networked() {
		addr = netip.Addr{}
	}
	k.mounts, err = img.Root(m.rootDir(k), k.name, addr)
	return err
}

func (m *Manager) createContainer(ctx context.Context, k *kid) error {
	state, err := m.cfg.Runtime.Create(ctx, m.bundleDir(k), m.container(k, k.mounts))
	if err != nil {
		return err
	}
	k.pid = state.PID
	if err := m.watchMemory(k); err != nil {
		return err
	}
	m.watch(k)
	if k.rec.Session.Freezer == "" {
		return nil
	}
	// runc made the parents too, with this process's umask. killswitchd also counts the processes.
	for _, rel := range []string{m.cfg.Inst.CgroupRel(), m.cfg.Inst.KidsCgroupRel(), m.cgroupRel(k.name)} {
		for _, controller := range []string{"freezer", "pids"} {
			dir := m.cfg.Cgroups.V1(controller, rel)
			if dir == "" {
				continue
			}
			if err := openToAll(dir); err != nil {
				return err
			}
		}
	}
	return m.giveToKillswitchd(k.rec.Session.Freezer, "freezer.state")
}

// watchFiles begins to record what is done to the kid's files, and to watch its programs and files where a trip rule is on
// them. Its mounts are there, and
// nothing of its own runs yet.
func (m *Manager) watchFiles(_ context.Context, k *kid) error { return m.watchFilesOf(k, false) }

func (m *Manager) watchFilesOf(k *kid, late bool) error {
	m.recordFiles(k, late)
	if m.cfg.Files == nil {
		return nil
	}
	s := &k.rec.Session
	wants := filewatch.WantsOf(append(slices.Clone(s.Stop.Trip), m.cfg.Trip...))
	return m.cfg.Files.Add(s, k.pid, wants, late)
}

func (m *Manager) startContainer(ctx context.Context, k *kid) error {
	if err := m.cfg.Runtime.Start(ctx, k.name); err != nil {
		return err
	}
	k.rec.Whole = true
	return m.save(k)
}
