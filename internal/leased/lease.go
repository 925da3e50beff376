package leased

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/provider"
	"tagout/internal/wire"
)

// lease is one lease at a provider.
type lease struct {
	id   string
	who  Session
	want Want

	mu        sync.Mutex
	handle    provider.Handle // guarded by mu
	noted     bool            // there is something to revoke; guarded by mu
	value     provider.Secret // guarded by mu; empty once it is not to be used
	redacted  []string        // what the audit log was told; guarded by mu
	usable    time.Duration   // CLOCK_BOOTTIME; guarded by mu
	over      time.Duration   // CLOCK_BOOTTIME: by the provider's word nobody takes it any more; guarded by mu
	ended     time.Duration   // CLOCK_BOOTTIME: when its revocation began; guarded by mu
	renewable bool            // guarded by mu
	lives     time.Duration   // of its last renewal; guarded by mu
	shown     wire.Leased     // guarded by mu
}

// info describes the lease at the given moment of CLOCK_BOOTTIME.
func (l *lease) info(now time.Duration) wire.Leased {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := l.shown
	if !out.Ended.IsZero() && out.State.Open() {
		out.Took = now - l.ended
	}
	return out
}

func (l *lease) state() wire.LeaseState {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.shown.State
}

func (l *lease) use(now time.Duration) (provider.Secret, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.value.Value == "" || now >= l.usable {
		return provider.Secret{}, fmt.Errorf("the lease of %s is over", l.want.Secret)
	}
	return l.value, nil
}

// set changes what is shown of the lease.
func (l *lease) set(change func(*wire.Leased)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(&l.shown)
}

// lease leases want for who. What may have been made when it fails is revoked in the background, or shown as unknown.
func (k *Keeper) lease(ctx context.Context, who Session, want Want) (*lease, error) {
	is, ok := k.cfg.Issuers[want.Provider]
	if !ok {
		return nil, fmt.Errorf("the box's configuration has no provider called %q", want.Provider)
	}
	l := &lease{id: newID(), who: who, want: want}
	// Until it is known better: as long as any lease of the provider can live.
	l.over = k.cfg.Boottime() + is.MaxLifetime
	l.shown = wire.Leased{ID: l.id, Provider: want.Provider, Role: want.Role, Secret: want.Secret, Kid: who.Kid, Session: who.ID, Card: who.Card,
		Mark: who.Mark, State: wire.LeaseMinting, Minted: k.cfg.Now().UTC(), ValidUntil: k.cfg.Now().Add(is.MaxLifetime).UTC()}
	if err := k.write(l); err != nil { // nothing was asked for yet
		return nil, fmt.Errorf("noting the lease: without that nothing is leased: %w", err)
	}
	k.mu.Lock()
	k.leases[l.id] = l
	k.mu.Unlock()
	err := k.mint(ctx, l, is)
	if err == nil {
		k.record(l, audit.EventLeaseMinted, audit.OutcomeOK, "")
		return l, nil
	}
	l.mu.Lock()
	made := l.handle.Token != "" || l.noted && provider.KindOf(err) != provider.Refused && provider.KindOf(err) != provider.Unreachable
	maybe := provider.KindOf(err) == provider.Unsure || provider.KindOf(err) == provider.Malformed
	l.value = provider.Secret{}
	l.mu.Unlock()
	switch {
	case made || maybe:
		k.revokeSoon(l)
	default:
		k.remove(l)
	}
	return nil, err
}

// mint asks the provider until it says yes or no; what it certainly did not hear is asked again while ctx lasts.
func (k *Keeper) mint(ctx context.Context, l *lease, is Issuer) error {
	asked := min(askedLifetime, is.MaxLifetime)
	if l.who.Lifetime > 0 {
		asked = min(asked, l.who.Lifetime)
	}
	req := provider.Request{ID: l.id, Session: l.who.ID, Kid: l.who.Kid, Card: l.who.Card, Role: l.want.Role, Lifetime: asked,
		Note: func(h provider.Handle) error {
			k.redact(l, h.Token)
			l.mu.Lock()
			l.handle, l.noted = h, true
			l.mu.Unlock()
			return k.write(l)
		}}
	for try := 0; ; try++ {
		begun := k.cfg.Boottime()
		attempt, cancel := context.WithTimeout(ctx, is.Attempt)
		got, err := is.Provider.Mint(attempt, req)
		cancel()
		if err == nil {
			return k.took(l, is, got, begun)
		}
		if provider.KindOf(err) != provider.Unreachable || !pause(ctx, backoff(try, err)) {
			return err
		}
	}
}

// took takes over what the provider gave.
func (k *Keeper) took(l *lease, is Issuer, got provider.Lease, asked time.Duration) error {
	k.redact(l, got.Secret.Value, got.Secret.Session) // before anything of it can be logged
	l.mu.Lock()
	l.handle, l.noted, l.value = got.Handle, true, got.Secret
	l.renewable, l.lives = got.Renewable, got.Lifetime
	l.usable, l.over = asked+got.Lifetime, k.cfg.Boottime()+got.Lifetime
	l.shown.State, l.shown.ValidUntil = wire.LeaseHeld, k.cfg.Now().Add(got.Lifetime).UTC()
	l.mu.Unlock()
	if got.Lifetime > is.MaxLifetime {
		return &provider.Error{Kind: provider.Malformed, Text: fmt.Sprintf(
			"it gave a lease of %v, and maxLifetime is %v: shorten it at the provider, or raise maxLifetime", got.Lifetime, is.MaxLifetime)}
	}
	if got.Lifetime < is.MinLifetime {
		return &provider.Error{Kind: provider.Malformed, Text: fmt.Sprintf(
			"it gave a lease of %v, which is too short to be kept: %v are needed", got.Lifetime, is.MinLifetime)}
	}
	if err := k.write(l); err != nil {
		return &provider.Error{Kind: provider.Malformed, Text: fmt.Sprintf("noting the lease: %v", err)}
	}
	return nil
}

// keep renews a slot's lease until the slot ends, and then has it revoked.
func (k *Keeper) keep(s *slot) {
	defer k.forget(s)
	defer k.discard(s)
	for failed := 0; ; {
		s.mu.Lock()
		l := s.lease
		s.mu.Unlock()
		l.mu.Lock()
		left := l.usable - k.cfg.Boottime()
		wait := left - l.lives/3
		l.mu.Unlock()
		if failed > 0 {
			wait = min(backoff(failed, nil), left)
		}
		if !pause(s.ctx, max(wait, 0)) {
			return
		}
		if left = l.left(k.cfg.Boottime()); left <= 0 {
			k.record(l, audit.EventLeaseLost, audit.OutcomeFail, "it could not be renewed in time: the session goes on without it")
			s.end()
			return
		}
		if err := k.renew(s, l); err != nil {
			failed++
			if s.ctx.Err() == nil {
				l.set(func(w *wire.Leased) { w.Detail = "renewing: " + err.Error() })
				k.cfg.Log.Warn("renewing a lease", "provider", l.want.Provider, "secret", l.want.Secret, "kid", l.who.Kid, "error", err)
			}
			continue
		}
		failed = 0
	}
}

func (l *lease) left(now time.Duration) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.usable - now
}

// renew renews the slot's lease, or puts a new one in its place and has the old one revoked.
func (k *Keeper) renew(s *slot, l *lease) error {
	is := k.cfg.Issuers[l.want.Provider]
	l.mu.Lock()
	renewable, h := l.renewable, l.handle
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(s.ctx, 2*is.Attempt)
	defer cancel()
	if renewable {
		asked := k.cfg.Boottime()
		lives, err := is.Provider.Renew(ctx, h, min(askedLifetime, is.MaxLifetime))
		if err == nil && lives > is.MaxLifetime {
			err = &provider.Error{Kind: provider.Malformed, Text: fmt.Sprintf("it says that the lease lives for %v from now on, and maxLifetime is %v", lives, is.MaxLifetime)}
		}
		if err == nil && asked+lives > l.ends() {
			l.mu.Lock()
			l.usable, l.over, l.lives = asked+lives, k.cfg.Boottime()+lives, lives
			l.shown.ValidUntil, l.shown.Detail = k.cfg.Now().Add(lives).UTC(), ""
			l.mu.Unlock()
			return k.write(l) // a failure is tried again; the old entry names the same lease
		}
		if err != nil && provider.KindOf(err) != provider.Refused {
			return err
		}
		// It has come to the longest that it can live: another one takes its place.
	}
	next, err := k.lease(ctx, s.who, s.want)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.lease = next
	s.mu.Unlock()
	k.revokeSoon(l)
	return nil
}

func (l *lease) ends() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.usable
}

// redact tells the audit log what it must not show; empty ones are none.
func (k *Keeper) redact(l *lease, values ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, v := range values {
		if v != "" && !slices.Contains(l.redacted, v) {
			k.cfg.Audit.AddSecret(v)
			l.redacted = append(l.redacted, v)
		}
	}
}

// pause waits for d; false where ctx ended before.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// Bounds of the time between two tries.
const (
	firstPause = 200 * time.Millisecond
	mostPause  = time.Minute
)

// backoff is how long to wait after the given number of tries, or as long as the provider asks for.
func backoff(try int, err error) time.Duration {
	d := min(firstPause<<min(try, 12), mostPause)
	d = d/2 + rand.N(d/2) // many leases do not come back at the same moment
	var e *provider.Error
	if errors.As(err, &e) {
		d = max(d, e.Wait)
	}
	return d
}

// record writes down what became of a lease.
func (k *Keeper) record(l *lease, event, outcome, detail string) {
	w := l.info(k.cfg.Boottime())
	fields := map[string]string{"lease": w.ID, "provider": w.Provider, "role": w.Role, "secret": w.Secret, "state": string(w.State)}
	if w.State.Open() {
		fields["valid_until"] = w.ValidUntil.Format(time.RFC3339)
	}
	if !w.Ended.IsZero() {
		fields["took"] = w.Took.String()
	}
	k.cfg.Audit.Log(audit.Record{Event: event, Outcome: outcome, Session: w.Session, Kid: w.Kid, Card: w.Card, Mark: w.Mark, Detail: detail, Fields: fields})
}
