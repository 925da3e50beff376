package auditkeep

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// Space says below how many free bytes of the logs' disk something is done; 0 means the default. WhenFull is what.
type Space struct {
	Warn, Refuse, Act uint64
	WhenFull          WhenFull
}

// WhenFull is what happens to kids below Act.
type WhenFull int

// Policies.
const (
	LeaveKids WhenFull = iota
	FreezeKids
	StopKids
)

// Level is how full the disk is.
type Level int

// Levels.
const (
	Plenty  Level = iota
	Warning       // the operator is told
	Refuse        // nothing is spawned any more
	Act           // and the policy is carried out
)

func (l Level) String() string { return [...]string{"plenty", "warning", "refuse", "act"}[l] }

// space is how full the disk is at the moment.
type space struct {
	mu    sync.Mutex
	level Level
	free  uint64
	err   error
}

// spaceEvery is how often the disk is looked at.
const spaceEvery = time.Second

// marks are the levels for a disk of that size: shares of it, and no more than a big one needs.
func (s Space) marks(total uint64) (warn, refuse, act uint64) {
	preset := func(given, share, most uint64) uint64 {
		if given > 0 {
			return given
		}
		return min(total/share, most)
	}
	return preset(s.Warn, 10, 4<<30), preset(s.Refuse, 20, 1<<30), preset(s.Act, 50, 256<<20)
}

func (s Space) level(free, total uint64) Level {
	warn, refuse, act := s.marks(total)
	switch {
	case free < act:
		return Act
	case free < refuse:
		return Refuse
	case free < warn:
		return Warning
	}
	return Plenty
}

// Room says why no kid may be made now: the disk of the logs is nearly full, or nobody knows how full it is.
func (k *Keeper) Room() error {
	k.full.mu.Lock()
	defer k.full.mu.Unlock()
	if k.full.err != nil {
		return k.full.err
	}
	if k.full.level >= Refuse {
		return fmt.Errorf("the disk of the audit logs has %d MiB left: make room on %s", k.full.free>>20, k.cfg.Dir)
	}
	return nil
}

// watchSpace looks at the disk until ctx ends.
func (k *Keeper) watchSpace(ctx context.Context, kids Kids) {
	tick := time.NewTicker(spaceEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		if k.look() == Act {
			k.act(ctx, kids)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// look measures, and tells of a change.
func (k *Keeper) look() Level {
	var st unix.Statfs_t
	err := unix.Statfs(k.cfg.Dir, &st)
	free, total := st.Bavail*uint64(st.Bsize), st.Blocks*uint64(st.Bsize)
	if err == nil && st.Files > 0 && st.Ffree == 0 {
		free = 0 // no more files either
	}
	k.full.mu.Lock()
	before := k.full.level
	if err != nil {
		k.full.err = fmt.Errorf("measuring the disk of the audit logs: %w", err)
	} else {
		k.full.level, k.full.free, k.full.err = k.cfg.Space.level(free, total), free, nil
	}
	now := k.full.level
	k.full.mu.Unlock()
	if err != nil {
		return before
	}
	k.cfg.Metrics.AuditFree(free, total)
	if now != before {
		r := audit.Record{Event: audit.EventSpace, Outcome: audit.OutcomeFail, Reason: reason.AuditSpace, Fields: map[string]string{"level": now.String(), "free": fmt.Sprint(free)}}
		switch now {
		case Plenty:
			r.Outcome, r.Reason, r.Detail = audit.OutcomeOK, reason.OK, "the disk of the audit logs has room again"
		case Warning:
			r.Detail = "the disk of the audit logs fills up"
		case Refuse:
			r.Detail = "the disk of the audit logs is nearly full: no kid is made any more"
		case Act:
			r.Detail = "the disk of the audit logs is full: " + [...]string{"kids are left alone", "kids are frozen", "kids are stopped"}[k.cfg.Space.WhenFull]
		}
		k.cfg.Audit.Log(r)
		k.cfg.Log.Warn(r.Detail, "free", free, "level", now.String())
	}
	return now
}

// act carries the policy out on the kids that run.
func (k *Keeper) act(ctx context.Context, kids Kids) {
	if k.cfg.Space.WhenFull == LeaveKids {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var err error
	for _, kid := range kids.Running(ctx) {
		const why = "the disk of the audit logs is full"
		if k.cfg.Space.WhenFull == StopKids {
			err = errors.Join(err, kids.Stop(ctx, kid, why))
		} else {
			err = errors.Join(err, kids.Pause(ctx, kid, "auditkeep", why))
		}
	}
	if err != nil && ctx.Err() == nil {
		k.cfg.Log.Error("holding kids up because the audit disk is full; trying again", "error", err)
	}
}
