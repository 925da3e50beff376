package kids

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// killWait is how long after the v1 kernel said that memory ran out it is waited for what it kills: it says so before.
const killWait = 100 * time.Millisecond

// oomName is the file in a kid's directory that says that it ran out of memory, and how.
const oomName = "oom"

// watchMemory begins to watch whether the kid runs out of memory. A kid ends whole then: on v2 the kernel sees to that
// (memory.oom.group), on v1, where it kills one process, ranOut does. Call it before watch.
func (m *Manager) watchMemory(k *kid) error {
	if m.unwatched {
		return nil
	}
	o, err := m.openMemory(k)
	if err != nil {
		return err
	}
	k.memory = o
	go func() {
		for o.Wait() == nil { // until the kid is gone
			m.ranOut(k, o.Certain())
		}
	}()
	return nil
}

func (m *Manager) openMemory(k *kid) (*cgroup.OOM, error) {
	rel := m.cgroupRel(k.name)
	return cgroup.WatchOOM(m.cfg.Cgroups.V2(rel), m.cfg.Cgroups.V1("memory", rel))
}

// ranOut says whether the kid ran out of memory, and ends all of it where that is news. certain: the kernel just said so.
// A kid that was stopped or is being destroyed keeps its state.
func (m *Manager) ranOut(k *kid, certain bool) bool {
	if k.memory == nil {
		return m.is(k, wire.KidOOM)
	}
	n, err := k.memory.Kills()
	for began := time.Now(); certain && n == 0 && err == nil && time.Since(began) < killWait; {
		time.Sleep(time.Millisecond)
		n, err = k.memory.Kills()
	}
	if err != nil {
		m.cfg.Log.Error("asking whether a kid ran out of memory", "kid", k.name, "error", err)
	}
	if n == 0 && !certain {
		return m.is(k, wire.KidOOM)
	}
	cause := outOfMemory(k, n)
	m.mu.Lock()
	was := k.state.Now()
	err = k.state.EnterFor(wire.KidOOM, cause)
	m.mu.Unlock()
	switch {
	case err != nil:
		return false
	case was != wire.KidOOM:
		m.endWhole(k, cause)
	}
	return true
}

// outOfMemory is the cause of such an end, n being how many processes the kernel killed.
func outOfMemory(k *kid, n uint64) string {
	limit := "no limits.memory"
	if most := k.rec.Plan.Limits.Memory; most > 0 {
		limit = fmt.Sprintf("limits.memory of %d bytes", most)
	}
	return fmt.Sprintf("out of memory: with %s the kernel counted oom_kill %d in its cgroup, and all of it was killed", limit, n)
}

// endWhole kills all that is left of a kid that ran out of memory, and puts that on record.
func (m *Manager) endWhole(k *kid, cause string) {
	rel := m.cgroupRel(k.name)
	dir := m.cfg.Cgroups.V2(rel)
	err := cgroup.Kill(dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	err = errors.Join(err, cgroup.Thaw(dir, m.cfg.Cgroups.Freezer(rel)))
	rec := audit.Record{Event: audit.EventKidOOM, Outcome: audit.OutcomeOK, Reason: reason.OutOfMemory, Detail: cause}
	if err != nil {
		rec.Outcome, rec.Detail = audit.OutcomeFail, cause+": "+err.Error()
	}
	m.log(k, rec)
	m.cfg.Metrics.OutOfMemory()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !k.state.Is(wire.KidOOM) {
		return // it is being destroyed: its directory may have just gone
	}
	if err := m.noteOOM(k.name, cause); err != nil {
		m.cfg.Log.Error("noting that a kid ran out of memory", "kid", k.name, "error", err)
	}
}

// noteOOM keeps the cause for a successor.
func (m *Manager) noteOOM(kid, cause string) error {
	path := filepath.Join(m.dir(kid), oomName)
	if err := os.WriteFile(path+".new", []byte(cause), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// hadRunOut says how the kid ran out of memory under a predecessor, "" where it did not: that was noted, or only the
// kernel has counted it yet.
func (m *Manager) hadRunOut(k *kid) (cause string, err error) {
	raw, err := os.ReadFile(filepath.Join(m.dir(k.name), oomName))
	if err == nil {
		return string(raw), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("reading whether it ran out of memory: %w", err)
	}
	rel := m.cgroupRel(k.name)
	n, err := cgroup.OOMKills(m.cfg.Cgroups.V2(rel), m.cfg.Cgroups.V1("memory", rel))
	if n == 0 || err != nil {
		return "", err
	}
	return outOfMemory(k, n), nil
}

// keepDead goes on with a kid that ran out of memory under a predecessor: it is there to be asked about, and to be
// destroyed.
func (m *Manager) keepDead(k *kid) {
	m.beginAgain(k)
	m.mu.Lock()
	cause := k.state.Cause()
	m.mu.Unlock()
	if _, err := os.Stat(filepath.Join(m.dir(k.name), oomName)); err != nil {
		m.endWhole(k, cause) // nobody has seen to that yet
	} else if err := cgroup.Kill(m.cfg.Cgroups.V2(m.cgroupRel(k.name))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.cfg.Log.Error("killing what is left of a kid that ran out of memory", "kid", k.name, "error", err)
	}
	if err := m.takeOverExecs(k); err != nil {
		m.cfg.Log.Error("taking over a predecessor's commands in a kid", "kid", k.name, "error", err)
	}
	k.markGone()
	m.cfg.Log.Info("a kid that ran out of memory is still there", "kid", k.name)
}

// cause says how the kid came into its state.
func (m *Manager) cause(k *kid) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return k.state.Cause()
}
