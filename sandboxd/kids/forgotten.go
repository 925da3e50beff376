package kids

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// lookForgotten is how often Run asks whose time is over. That costs nothing but a look into memory; whether something
// runs in a kid is looked up far less often.
const lookForgotten = 100 * time.Millisecond

// Between these bounds a kid is looked into ten times within its idle limit.
const (
	mostLooks   = 100 * time.Millisecond
	fewestLooks = 30 * time.Second
)

// adoptGrace is how long an adopted kid lives at least: whoever held it has to come back, and what used it was
// perhaps only cut off by the same restart.
const adoptGrace = 30 * time.Second

// life is when a kid ends by itself. Guarded by Manager.mu; all times are CLOCK_BOOTTIME.
type life struct {
	used    time.Duration // when something ran in it, or was done to it, last
	look    time.Duration // when to see again whether something runs
	end     time.Duration // of its lifetime; 0: none
	lease   time.Duration // a held kid that nobody holds lives so long; 0: it is not held
	holders int
	gone    bool // whoever held it went away
	over    bool // Run destroys it, or has tried to
}

// begin starts the clocks of a kid that is up.
func (m *Manager) begin(k *kid) {
	now := bootclock.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	k.time.used = now
	if k.rec.Plan.Lifetime > 0 {
		k.time.end = k.rec.Session.Boot + k.rec.Plan.Lifetime
	}
	if k.rec.Held {
		k.time.lease = now + holdGrace
	}
}

// beginAgain starts the clocks of a kid that a predecessor made. Its lifetime goes on counting, and so does its idle
// time from when it was last seen in use.
func (m *Manager) beginAgain(k *kid) {
	m.begin(k)
	m.mu.Lock()
	defer m.mu.Unlock()
	now := bootclock.Now()
	if idle := k.rec.Plan.Idle; idle > 0 {
		k.time.used = max(k.rec.Used, now-idle+min(idle, adoptGrace))
	}
	if k.rec.Held {
		k.time.lease = now + adoptGrace
	}
}

// touch notes that the kid was used.
func (m *Manager) touch(k *kid) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k.time.used = bootclock.Now()
}

// destroyForgotten destroys every kid whose time is over. It does not wait for that: ends has what is under way.
func (m *Manager) destroyForgotten(ctx context.Context, ends *sync.WaitGroup) {
	m.lookAround()
	for name, why := range m.forgotten() {
		ends.Go(func() {
			if err := m.Destroy(ctx, name, instance.Sandboxd, why); err != nil {
				m.cfg.Log.Error("destroying a kid whose time is over; trying again", "kid", name, "error", err)
			}
		})
	}
}

// forgotten returns the kids whose time is over, and why, each only once: what of it cannot be destroyed at once is
// tried again as with every other destroy.
func (m *Manager) forgotten() map[string]string {
	now := bootclock.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string]string{}
	for _, k := range m.kids {
		if k.time.over || k.state.Is(wire.KidSpawning, wire.KidDestroying) {
			continue
		}
		if why := k.over(now); why != "" {
			k.time.over = true
			out[k.name] = why
		}
	}
	return out
}

// over says why the kid's time is over, "" where it is not. A kid that was stopped is somebody's case, and not idle.
func (k *kid) over(now time.Duration) string {
	t, p := &k.time, &k.rec.Plan
	switch {
	case t.gone || t.lease != 0 && t.holders == 0 && now >= t.lease:
		return goneHolder
	case t.end != 0 && now >= t.end:
		return fmt.Sprintf("lifetime: it has been there for %v, all that limits.lifetime of its card gives", p.Lifetime)
	case p.Idle > 0 && now-t.used >= p.Idle && !k.state.Stopped():
		return fmt.Sprintf("idle: nothing has run in it for %v, the limits.idle of its card", p.Idle)
	}
	return ""
}

// lookAround sees in which kids something runs. A paused kid is not looked into: it runs nothing.
func (m *Manager) lookAround() {
	now := bootclock.Now()
	m.mu.Lock()
	var due []*kid
	for _, k := range m.kids {
		if k.state.Is(wire.KidRunning) && k.rec.Plan.Idle > 0 && now >= k.time.look {
			k.time.look = now + min(fewestLooks, max(mostLooks, k.rec.Plan.Idle/10))
			due = append(due, k)
		}
	}
	m.mu.Unlock()
	for _, k := range due {
		busy, err := m.busy(k)
		if err != nil {
			m.cfg.Log.Warn("looking whether anything runs in a kid", "kid", k.name, "error", err)
		}
		if busy {
			m.touch(k)
		}
		m.saveUse(k)
	}
}

// busy says whether anything but kid-init is in the kid, and its child that waits for a command.
func (m *Manager) busy(k *kid) (bool, error) {
	pids, err := cgroup.Procs(m.cfg.Cgroups.V2(m.cgroupRel(k.name)))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // it has just gone
	}
	parked := m.cfg.Runtime.Parked(k.name)
	return slices.ContainsFunc(pids, func(pid int) bool { return pid != k.pid && pid != parked }), err
}

// saveUse notes when the kid was used last, for a successor.
func (m *Manager) saveUse(k *kid) {
	if !k.life.TryLock() {
		return // the next look will do
	}
	defer k.life.Unlock()
	m.mu.Lock()
	used, alive := k.time.used, k.state.Alive()
	m.mu.Unlock()
	if !alive || used == k.rec.Used {
		return
	}
	k.rec.Used = used
	if err := m.save(k); err != nil {
		m.cfg.Log.Warn("noting when a kid was used last", "kid", k.name, "error", err)
	}
}
