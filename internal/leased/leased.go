// Package leased keeps the secrets that credd leases from providers: it leases them for a session, renews them while it
// lives, and has them revoked when it ends, each with a timer of its own.
//
// What it promises:
//   - a lease belongs to one session; no other one ever gets its value;
//   - nothing is leased that is not in the journal first, on disk and sealed; so what a credd that was killed has left is
//     revoked by the next one;
//   - End returns at once: no stop waits for a provider, and no provider for another;
//   - a lease is called revoked where the provider has said so, and by another name otherwise.
//
// What it does not promise: a provider's answer that was lost may have made something that nobody can name. It is shown
// as unknown until the longest time that such a lease can live is over.
package leased

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"

	"tagout/internal/audit"
	"tagout/internal/provider"
	"tagout/internal/wire"
)

// askedLifetime is how long a lease is to live where it can be asked for. Shorter ones are renewed; what nobody could
// revoke is over sooner.
const askedLifetime = time.Hour

// atOnce bounds the revocations of one provider that are under way; the others wait their turn.
const atOnce = 32

// keepClosed is how many leases that are over are still listed.
const keepClosed = 512

// Issuer is a provider with its bounds.
type Issuer struct {
	Provider    provider.Provider
	Attempt     time.Duration // of one try, all its requests together
	MaxLifetime time.Duration // a lease that says it lives longer is given back
	MinLifetime time.Duration // so is one that says it lives shorter: it would have to be replaced all the time
}

// Recorder is the audit log. No method blocks. Where it has DropSecret too, it forgets what is revoked.
type Recorder interface {
	Log(audit.Record)
	AddSecret(value string)
}

type dropper interface{ DropSecret(value string) }

// Config is what a Keeper needs. Nothing may be nil.
type Config struct {
	Dir      string // the journal's; made where it is missing
	Seal     func(path string, plain []byte) error
	Unseal   func(path string) ([]byte, error) // the caller wipes what it returns
	Issuers  map[string]Issuer                 // by name; may be empty
	Audit    Recorder
	Log      *slog.Logger
	Boottime func() time.Duration // CLOCK_BOOTTIME: every deadline's
	Now      func() time.Time     // wall clock, for people and for what outlives a reboot
}

// Session is whom leases are for.
type Session struct {
	ID, Kid, Card string
	Mark          uint32
	Lifetime      time.Duration // 0: as long as the session
}

// Want names one lease: the vault entry, and the provider and role that it stands for.
type Want struct{ Secret, Provider, Role string }

// Keeper holds the leases. Safe for concurrent use.
type Keeper struct {
	cfg    Config
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	idle   context.Context // ends when Close begins: for what only waits for its time
	rest   context.CancelFunc
	work   sync.WaitGroup
	turns  map[string]chan struct{} // by issuer

	mu     sync.Mutex
	closed bool
	slots  map[string][]*slot // by session; guarded by mu
	leases map[string]*lease  // that may be valid, by id; guarded by mu
	done   []wire.Leased      // the last keepClosed that are over; guarded by mu
	bad    []string           // journal entries that cannot be read; guarded by mu

	dropAfter time.Duration // the constant, but in tests
}

// New returns a Keeper that has nothing yet. Load and Close it.
func New(cfg Config) *Keeper {
	k := &Keeper{cfg: cfg, slots: map[string][]*slot{}, leases: map[string]*lease{}, dropAfter: dropAfter, turns: map[string]chan struct{}{}}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	k.idle, k.rest = context.WithCancel(k.ctx)
	for name := range cfg.Issuers {
		k.turns[name] = make(chan struct{}, atOnce)
	}
	return k
}

// Close ends every lease, gives their revocation as long as within, and stops working. What is not revoked by then is in
// the journal.
func (k *Keeper) Close(within time.Duration) {
	k.mu.Lock()
	k.closed = true
	for _, slots := range k.slots {
		for _, s := range slots {
			s.end()
		}
	}
	k.mu.Unlock()
	k.rest()
	done := make(chan struct{})
	go func() { k.work.Wait(); close(done) }()
	enough := time.NewTimer(within)
	defer enough.Stop()
	select {
	case <-done:
	case <-enough.C:
	}
	k.cancel()
	<-done
}

// spawn runs fn unless the Keeper is closed.
func (k *Keeper) spawn(fn func()) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return false
	}
	k.work.Go(fn)
	return true
}

// slot is one secret of one session: the lease that is used now.
type slot struct {
	who    Session
	want   Want
	ctx    context.Context // ends with the session's use of the secret
	cancel context.CancelFunc

	mu    sync.Mutex
	lease *lease // guarded by mu; nil once it is over
}

func (s *slot) end() { s.cancel() }

// use returns the value, where it may be used now.
func (s *slot) use(now time.Duration) (provider.Secret, error) {
	s.mu.Lock()
	l := s.lease
	s.mu.Unlock()
	if l == nil || s.ctx.Err() != nil {
		return provider.Secret{}, fmt.Errorf("the lease of %s is over", s.want.Secret)
	}
	return l.use(now)
}

// Set is what was leased for one session.
type Set struct {
	k     *Keeper
	slots []*slot
}

// Secret returns the value that was leased for a vault entry; is is false where none was. A nil Set has none.
func (s *Set) Secret(name string) (v provider.Secret, is bool, err error) {
	if s == nil {
		return v, false, nil
	}
	i := slices.IndexFunc(s.slots, func(x *slot) bool { return x.want.Secret == name })
	if i < 0 {
		return v, false, nil
	}
	v, err = s.slots[i].use(s.k.cfg.Boottime())
	return v, true, err
}

// Mint leases all of wants for the session, or nothing: the error says what was not to be had. ctx bounds it.
func (k *Keeper) Mint(ctx context.Context, who Session, wants []Want) (*Set, error) {
	set := &Set{k: k}
	for _, w := range wants {
		s := &slot{who: who, want: w}
		s.ctx, s.cancel = context.WithCancel(k.ctx)
		set.slots = append(set.slots, s)
	}
	errs := make([]error, len(wants))
	var wg sync.WaitGroup
	for i, s := range set.slots {
		wg.Go(func() { errs[i] = k.fill(ctx, s) })
	}
	wg.Wait()
	if err := firstError(errs); err != nil {
		for _, s := range set.slots {
			s.end()
			k.discard(s)
		}
		return nil, err
	}
	k.mu.Lock()
	k.slots[who.ID] = append(k.slots[who.ID], set.slots...)
	k.mu.Unlock()
	for _, s := range set.slots {
		if !k.spawn(func() { k.keep(s) }) {
			s.end()
		}
	}
	return set, nil
}

func firstError(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// fill leases what a slot wants.
func (k *Keeper) fill(ctx context.Context, s *slot) error {
	l, err := k.lease(ctx, s.who, s.want)
	if err != nil {
		return fmt.Errorf("leasing %s from %s: %w", s.want.Secret, s.want.Provider, err)
	}
	s.mu.Lock()
	s.lease = l
	s.mu.Unlock()
	return nil
}

// discard revokes what a slot holds, where nobody keeps it.
func (k *Keeper) discard(s *slot) {
	s.mu.Lock()
	l := s.lease
	s.lease = nil
	s.mu.Unlock()
	if l != nil {
		k.revokeSoon(l)
	}
}

// Drop ends leases that no session came to use.
func (s *Set) Drop() {
	if s == nil {
		return
	}
	for _, x := range s.slots {
		x.end()
	}
}

// End ends the leases of a session; with a secret, that one alone. It returns at once.
func (k *Keeper) End(session, secret string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, s := range k.slots[session] {
		if secret == "" || s.want.Secret == secret {
			s.end()
		}
	}
}

// forget takes a slot off the session.
func (k *Keeper) forget(s *slot) {
	k.mu.Lock()
	defer k.mu.Unlock()
	left := slices.DeleteFunc(k.slots[s.who.ID], func(x *slot) bool { return x == s })
	if len(left) == 0 {
		delete(k.slots, s.who.ID)
		return
	}
	k.slots[s.who.ID] = left
}

// List returns the leases that may be valid, and the last of those that are over, oldest first.
func (k *Keeper) List() []wire.Leased {
	k.mu.Lock()
	out := slices.Clone(k.done)
	open := make([]*lease, 0, len(k.leases))
	for _, l := range k.leases {
		open = append(open, l)
	}
	for _, file := range k.bad {
		out = append(out, wire.Leased{ID: file, State: wire.LeaseUnknown, Detail: "its entry in the journal cannot be read: see credd's log"})
	}
	k.mu.Unlock()
	for _, l := range open {
		out = append(out, l.info(k.cfg.Boottime()))
	}
	slices.SortStableFunc(out, func(a, b wire.Leased) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// Open counts the leases that a provider may take, by state.
func (k *Keeper) Open() map[wire.LeaseState]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := map[wire.LeaseState]int{}
	for _, l := range k.leases {
		out[l.state()]++
	}
	if len(k.bad) > 0 {
		out[wire.LeaseUnknown] += len(k.bad)
	}
	return out
}

// newID names a lease; names are ordered by time.
func newID() string { return ulid.Make().String() }
