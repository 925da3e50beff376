package kids

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/lifecycle"
	"tagout/sandboxd/network"
	"tagout/sandboxd/runtime"
)

// Recover takes over what a predecessor left: a kid that runs and is understood is adopted as it is; of
// everything else, every part that can be found is torn down. Call it once, before anything else. An error
// means that something is left; it stays denied, and Run goes on with it.
func (m *Manager) Recover(ctx context.Context) error {
	names, err := m.traces()
	if err != nil {
		return fmt.Errorf("looking for kids that were left behind: %w", err)
	}
	var errs []error
	for _, name := range names {
		k, why := m.adopt(ctx, name)
		m.mu.Lock()
		m.kids[name] = k
		m.countKids()
		m.mu.Unlock()
		if why == nil && k.state.Is(wire.KidOOM) {
			m.keepDead(k)
			continue
		}
		if why == nil {
			m.beginAgain(k)
			m.cfg.Log.Info("adopted a running kid", "kid", name, "pid", k.pid)
			if err := m.watchMemory(k); err != nil {
				m.cfg.Log.Error("watching an adopted kid's memory", "kid", name, "error", err)
			}
			m.watch(k)
			if err := m.takeOverExecs(k); err != nil {
				m.cfg.Log.Error("taking over a predecessor's commands in an adopted kid", "kid", name, "error", err)
			}
			if err := m.watchFilesOf(k, true); err != nil { // killswitchd sees that nobody watches, and stops the kid
				m.cfg.Log.Error("watching an adopted kid", "kid", name, "error", err)
			}
			continue
		}
		m.cfg.Log.Warn("reclaiming what is left of a kid", "kid", name, "why", why)
		if err := m.reclaim(ctx, k, why); err != nil {
			errs = append(errs, fmt.Errorf("reclaiming kid %s: %w", name, err))
		}
	}
	errs = append(errs, m.removeStrayLinks(), m.sweepKernel(), m.dropUnclaimed(), m.store.Sweep())
	return errors.Join(errs...)
}

// reclaim takes apart what is left of a kid.
func (m *Manager) reclaim(ctx context.Context, k *kid, why error) error {
	k.life.Lock()
	defer k.life.Unlock()
	ctx, cancel := context.WithTimeout(ctx, teardownTimeout)
	defer cancel()
	err := m.teardown(ctx, k)
	rec := audit.Record{Event: audit.EventKidDestroyed, Actor: instance.Sandboxd, Outcome: audit.OutcomeOK, Detail: "sandboxd was restarted, and could not go on with it: " + why.Error()}
	if err != nil {
		rec.Outcome, rec.Detail = audit.OutcomeFail, rec.Detail+": "+err.Error()
	}
	rec.Fields = m.recordListing(k)
	m.log(k, rec)
	return err
}

// sweepKernel makes the kernel forget what belongs to no kid that is known: where a record was lost, nobody can
// say any more which entries were the kid's. It also puts the counter of marks past every mark in use, should the
// counter's own file have been lost.
func (m *Manager) sweepKernel() error {
	m.mu.Lock()
	kept := map[uint32]bool{}
	for _, k := range m.kids {
		mark := k.rec.Session.Mark
		kept[mark] = true
		if m.cfg.Inst.OwnsMark(mark) {
			m.seq.pass(mark - m.cfg.Inst.BoxMark())
		}
	}
	m.mu.Unlock()
	if err := m.cfg.Kernel.Sweep(func(mark uint32) bool { return kept[mark] }); err != nil {
		return fmt.Errorf("making the kernel forget what belongs to no kid: %w", err)
	}
	return nil
}

// traces returns the names of all kids that left anything: a directory, a session document, a container, a
// cgroup or a pinned namespace.
func (m *Manager) traces() ([]string, error) {
	seen := map[string]bool{}
	add := func(name string) {
		if CheckName(name) == nil {
			seen[name] = true
		}
	}
	containers, err := m.cfg.Runtime.List()
	if err != nil {
		return nil, err
	}
	for _, id := range containers {
		add(id)
	}
	for _, dir := range []string{filepath.Dir(m.dir("x")), m.cfg.Inst.SessionDir(), m.cfg.Inst.NetNSDir(), m.cfg.Cgroups.V2(m.cfg.Inst.KidsCgroupRel())} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			switch base := strings.TrimSuffix(e.Name(), ".user"); {
			case dir == m.cfg.Inst.SessionDir():
				add(strings.TrimSuffix(base, ".json"))
			case e.IsDir() || dir == m.cfg.Inst.NetNSDir():
				add(base)
			}
		}
	}
	names := make([]string, 0, len(seen))
	for name := range seen {
		names = append(names, name)
	}
	return names, nil
}

// adopt returns the kid called name, ready to go on where why is nil and ready to be torn down where it
// says why not.
func (m *Manager) adopt(ctx context.Context, name string) (k *kid, why error) {
	k = newKid(name, lifecycle.Leftover())
	doc, docErr := m.store.Get(name)
	rec, err := m.load(name)
	if err != nil {
		k.rec.Session = session.Session{Kid: name, Index: m.indexOf(name)}
		if docErr == nil {
			k.rec.Session = *doc
		}
		return k, err
	}
	k.rec = rec
	switch {
	case docErr != nil:
		return k, docErr
	case doc.ID != rec.Session.ID || doc.Mark != rec.Session.Mark:
		return k, errors.New("its session document is another session's")
	case rec.Plan.Proof:
		return k, errors.New("it was there for one proof")
	case rec.Ending:
		return k, errors.New("its destroy had begun")
	case !rec.Whole:
		return k, errors.New("it was half made")
	}
	if cause, err := m.hadRunOut(k); cause != "" || err != nil {
		k.state = lifecycle.OutOfMemory(cause)
		return k, err
	}
	if _, err := m.imageOf(k); err != nil {
		return k, fmt.Errorf("its image: %w", err)
	}
	populated, err := cgroup.Populated(doc.Cgroup)
	if err != nil || !populated {
		return k, errors.Join(errors.New("nothing runs in it"), err)
	}
	state, err := m.cfg.Runtime.State(ctx, name)
	if err != nil {
		return k, err
	}
	if state.Status != runtime.StatusRunning && state.Status != runtime.StatusPaused {
		return k, fmt.Errorf("its container is %s", state.Status)
	}
	if index, ok, err := network.Index(doc.Link); err != nil || ok != k.networked() || index != rec.IfIndex {
		return k, errors.Join(errors.New("its network is not the one that was made for it"), err)
	}
	paused, err := cgroup.Frozen(doc.Cgroup)
	if err != nil {
		return k, err
	}
	k.pid, k.state = state.PID, lifecycle.Adopted(paused)
	return k, nil
}

// removeStrayLinks removes host ends that belong to no kid.
func (m *Manager) removeStrayLinks() error {
	links, err := network.Links(m.cfg.Inst.LinkPrefix())
	if err != nil {
		return err
	}
	m.mu.Lock()
	owned := map[string]bool{}
	for _, k := range m.kids {
		owned[k.rec.Session.Link] = true
	}
	m.mu.Unlock()
	var errs []error
	for _, link := range links {
		if !owned[link] {
			errs = append(errs, network.Disconnect(link))
		}
	}
	return errors.Join(errs...)
}
