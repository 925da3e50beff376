package leased

import (
	"context"
	"fmt"
	"time"

	"tagout/internal/audit"
	"tagout/internal/provider"
	"tagout/internal/wire"
)

// A provider that says a lease is over sooner than it is must not have it dropped untried: a revocation is tried for
// leastTrying, and for grace longer than the lease lives.
const (
	leastTrying = 2 * time.Minute
	grace       = 10 * time.Second
	tidyTries   = 20
	dropAfter   = time.Minute // how long what is revoked is still redacted: others' records come later
)

// revokeSoon begins the revocation of a lease; from now on nobody uses it. It returns at once.
func (k *Keeper) revokeSoon(l *lease) {
	l.mu.Lock()
	l.value = provider.Secret{}
	begun := l.shown.Ended.IsZero()
	if begun {
		l.ended = k.cfg.Boottime()
		l.shown.Ended, l.shown.State, l.shown.Detail = k.cfg.Now().UTC(), wire.LeaseRevoking, ""
	}
	l.mu.Unlock()
	if begun {
		k.spawnAlways(func() { k.revoke(l) })
	}
}

// spawnAlways is spawn that also counts while Close waits: it is called by what Close waits for, or before it.
func (k *Keeper) spawnAlways(fn func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ctx.Err() == nil {
		k.work.Go(fn)
	}
}

// revoke tries until the provider has revoked the lease, or its time is over.
func (k *Keeper) revoke(l *lease) {
	begun := k.cfg.Boottime()
	for try := 0; ; try++ {
		err := k.tryRevoke(l)
		if k.ctx.Err() != nil && err != nil {
			return // the journal has it for the next credd
		}
		if err == nil {
			l.set(func(w *wire.Leased) {
				w.State, w.Took, w.Tries, w.Detail = wire.LeaseRevoked, k.cfg.Boottime()-l.ended, try+1, ""
			})
			k.record(l, audit.EventLeaseRevoked, audit.OutcomeOK, "")
			k.settle(l)
			return
		}
		l.set(func(w *wire.Leased) {
			w.Tries, w.Detail = try+1, err.Error()
			w.State = wire.LeaseValid
			if !l.noted {
				w.State = wire.LeaseUnknown
			}
		})
		if try == 0 {
			k.record(l, audit.EventRevokeFailed, audit.OutcomeFail, err.Error()+": it is tried again until its time is over")
			k.cfg.Log.Error("revoking a lease", "provider", l.want.Provider, "secret", l.want.Secret, "kid", l.who.Kid, "error", err)
		}
		now := k.cfg.Boottime()
		if l.isOver(now) && now-begun >= leastTrying {
			l.set(func(w *wire.Leased) { w.State, w.Took = wire.LeaseOver, k.cfg.Boottime()-l.ended })
			k.record(l, audit.EventRevokeFailed, audit.OutcomeFail, fmt.Sprintf("its time is over by the provider's word; it was never seen revoked: %v", err))
			k.remove(l)
			return
		}
		if !pause(k.ctx, backoff(try, err)) {
			return
		}
	}
}

func (l *lease) isOver(now time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return now >= l.over+grace
}

// tryRevoke asks once, in its turn.
func (k *Keeper) tryRevoke(l *lease) error {
	is, ok := k.cfg.Issuers[l.want.Provider]
	if !ok {
		return fmt.Errorf("the box's configuration has no provider called %q any more", l.want.Provider)
	}
	l.mu.Lock()
	h, noted := l.handle, l.noted
	l.mu.Unlock()
	if !noted {
		return fmt.Errorf("the answer that would have named it was lost, so nobody can revoke it")
	}
	turn := k.turns[l.want.Provider]
	select {
	case turn <- struct{}{}:
		defer func() { <-turn }()
	case <-k.ctx.Done():
		return k.ctx.Err()
	}
	ctx, cancel := context.WithTimeout(k.ctx, is.Attempt)
	defer cancel()
	return is.Provider.Revoke(ctx, h)
}

// settle takes a revoked lease out of the journal: at once, or once what its revocation left at the provider is gone.
func (k *Keeper) settle(l *lease) {
	tidy, ok := k.cfg.Issuers[l.want.Provider].Provider.(provider.Tidier)
	if !ok {
		k.remove(l)
		return
	}
	k.write(l) // on an error it is revoked once more after a restart, which changes nothing
	k.close(l)
	k.spawnAlways(func() { k.tidy(l, tidy) })
}

// tidy waits until the lease's time is over and has the provider clean up.
func (k *Keeper) tidy(l *lease, t provider.Tidier) {
	l.mu.Lock()
	wait, h := l.over+grace-k.cfg.Boottime(), l.handle
	l.mu.Unlock()
	if !pause(k.idle, max(wait, 0)) {
		return
	}
	for try := range tidyTries {
		ctx, cancel := context.WithTimeout(k.idle, k.cfg.Issuers[l.want.Provider].Attempt)
		err := t.Tidy(ctx, h)
		cancel()
		if err == nil {
			break
		}
		k.cfg.Log.Warn("tidying up after a revocation", "provider", l.want.Provider, "lease", l.id, "error", err)
		if !pause(k.idle, backoff(try+4, err)) {
			return
		}
	}
	k.unlink(l)
}

// remove takes a lease out of the journal and out of those that may be valid.
func (k *Keeper) remove(l *lease) {
	k.unlink(l)
	k.close(l)
}

// close lists a lease among those that are over; one that was never asked for is not listed.
func (k *Keeper) close(l *lease) {
	w := l.info(k.cfg.Boottime())
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, ok := k.leases[l.id]; !ok {
		return
	}
	delete(k.leases, l.id)
	time.AfterFunc(k.dropAfter, func() { k.unredact(l) })
	if w.State == wire.LeaseMinting {
		return
	}
	k.done = append(k.done, w)
	if len(k.done) > keepClosed {
		k.done = k.done[len(k.done)-keepClosed:]
	}
}

// unredact lets the audit log forget what is worth nothing any more: a box that leases for years must not remember all.
func (k *Keeper) unredact(l *lease) {
	d, ok := k.cfg.Audit.(dropper)
	if !ok {
		return
	}
	l.mu.Lock()
	values := l.redacted
	l.redacted = nil
	l.mu.Unlock()
	for _, v := range values {
		d.DropSecret(v)
	}
}
