package kids

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/reason"
)

// killAllWait is how long the processes may take to die before that is recorded as a failure.
const killAllWait = 5 * time.Second

// KillAll stops every kid without killswitchd, for good: its processes through the cgroup above all kids, its packets
// in the kernel and its tokens in credd. It returns how many kids were not stopped before. What it did is recorded;
// the kids stay until they are destroyed. It may be called again, and kills whatever is alive then.
func (m *Manager) KillAll(ctx context.Context, why string) (int, error) {
	dir := m.cfg.Cgroups.V2(m.cfg.Inst.KidsCgroupRel())
	some, killErr := cgroup.Populated(dir)
	if some || killErr != nil {
		killErr = cgroup.Kill(dir)
	}
	hit := m.unstopped()
	errs := make([]error, len(hit))
	var wg sync.WaitGroup
	for i, k := range hit {
		wg.Go(func() { errs[i] = m.killOne(ctx, k) })
	}
	wg.Wait()
	wait, cancel := context.WithTimeout(ctx, killAllWait)
	defer cancel()
	deadErr := cgroup.WaitEmpty(wait, dir)
	if deadErr != nil {
		deadErr = fmt.Errorf("waiting for the kids' processes to end: %w", deadErr)
	}
	for i, k := range hit {
		rec := audit.Record{Event: audit.EventKidKilled, Outcome: audit.OutcomeOK, Reason: reason.Stopped, Detail: why}
		if err := errors.Join(killErr, errs[i], deadErr); err != nil {
			rec.Outcome, rec.Detail = audit.OutcomeFail, fmt.Sprintf("%s; and not all of it was done: %v", why, err)
		}
		m.log(k, rec)
	}
	return len(hit), errors.Join(append(errs, killErr, deadErr)...)
}

// unstopped marks every kid as stopped and returns those that were not: a release, a restart or a second call finds
// them so.
func (m *Manager) unstopped() []*kid {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*kid
	for _, k := range m.kids {
		if k.state.Stop() {
			out = append(out, k)
		}
	}
	return out
}

// killOne does what the cgroup above all kids does not: it lets frozen processes die, and ends what is no process.
func (m *Manager) killOne(ctx context.Context, k *kid) error {
	s := &k.rec.Session
	thawErr := cgroup.Thaw(m.cfg.Cgroups.V2(m.cgroupRel(k.name)), m.cfg.Cgroups.Freezer(m.cgroupRel(k.name)))
	cutErr := m.cfg.Kernel.Stop(s.Mark)
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	tokenErr := m.cfg.Credentials.Forget(ctx, k.name)
	if errors.Is(tokenErr, ErrDown) {
		tokenErr = nil // no credd, no token
	}
	return errors.Join(thawErr, cutErr, tokenErr)
}
