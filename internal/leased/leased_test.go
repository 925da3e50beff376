package leased

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/provider"
	"tagout/internal/wire"
)

// mill is an issuer in memory.
type mill struct {
	mu     sync.Mutex
	valid  map[string]bool
	lives  time.Duration
	renews bool
	minted atomic.Int64
	mint   atomic.Pointer[func(context.Context) error] // before each mint; nil: nothing
	revoke atomic.Pointer[func(context.Context) error] // before each revocation
	after  atomic.Pointer[func() error]                // after each mint
}

func newMill(lives time.Duration) *mill { return &mill{valid: map[string]bool{}, lives: lives} }

func (m *mill) hook(p *atomic.Pointer[func(context.Context) error], fn func(context.Context) error) {
	if fn == nil {
		p.Store(nil)
		return
	}
	p.Store(&fn)
}

func (m *mill) live() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, ok := range m.valid {
		if ok {
			n++
		}
	}
	return n
}

func (m *mill) accepts(v string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.valid[v]
}

func (m *mill) Mint(ctx context.Context, r provider.Request) (provider.Lease, error) {
	if f := m.mint.Load(); f != nil {
		if err := (*f)(ctx); err != nil {
			return provider.Lease{}, err
		}
	}
	v := "value-of-" + r.ID
	m.mu.Lock()
	m.valid[v] = true
	m.mu.Unlock()
	m.minted.Add(1)
	if f := m.after.Load(); f != nil {
		if err := (*f)(); err != nil {
			return provider.Lease{}, err
		}
	}
	h := provider.Handle{Role: r.Role, Token: v}
	if err := r.Note(h); err != nil {
		return provider.Lease{}, err
	}
	return provider.Lease{Handle: h, Secret: provider.Secret{Value: v}, Lifetime: m.lives, Renewable: m.renews}, nil
}

func (m *mill) Renew(context.Context, provider.Handle, time.Duration) (time.Duration, error) {
	if !m.renews {
		return 0, &provider.Error{Kind: provider.Refused, Text: "no"}
	}
	return m.lives, nil
}

func (m *mill) Revoke(ctx context.Context, h provider.Handle) error {
	if f := m.revoke.Load(); f != nil {
		if err := (*f)(ctx); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.valid[h.Token] = false
	return nil
}

type recorder struct {
	mu      sync.Mutex
	recs    []audit.Record
	secrets map[string]bool
}

func (r *recorder) AddSecret(v string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.secrets[v] = true
}

func (r *recorder) DropSecret(v string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.secrets, v)
}

func (r *recorder) redacts(v string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.secrets[v]
}
func (r *recorder) Log(rec audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recs = append(r.recs, rec)
}

func (r *recorder) count(event string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, rec := range r.recs {
		if rec.Event == event {
			n++
		}
	}
	return n
}

// bed is a Keeper with one or two mills.
type bed struct {
	t    *testing.T
	dir  string
	rec  *recorder
	full atomic.Bool // the journal's disk
	k    *Keeper
}

func newBed(t *testing.T, mills map[string]*mill) *bed {
	b := &bed{t: t, dir: filepath.Join(t.TempDir(), "leases"), rec: &recorder{secrets: map[string]bool{}}}
	b.open(mills)
	return b
}

func (b *bed) open(mills map[string]*mill) {
	b.t.Helper()
	issuers := map[string]Issuer{}
	for name, m := range mills {
		issuers[name] = Issuer{Provider: m, Attempt: 300 * time.Millisecond, MaxLifetime: time.Hour}
	}
	b.k = New(Config{Dir: b.dir, Issuers: issuers, Audit: b.rec, Log: slog.New(slog.DiscardHandler), Boottime: bootclock.Now, Now: time.Now,
		Seal: func(path string, plain []byte) error {
			if b.full.Load() {
				return errors.New("no space left on device")
			}
			return os.WriteFile(path, plain, 0o600)
		}, Unseal: os.ReadFile})
	if err := b.k.Load(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { b.k.Close(0) })
}

// crash drops the Keeper as kill -9 does: nothing of what is under way is finished.
func (b *bed) crash() { b.k.Close(0) }

func (b *bed) wait(what string, cond func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			b.t.Fatalf("waited 10 s for %s: %+v", what, b.k.List())
		}
		time.Sleep(time.Millisecond)
	}
}

func who(n string) Session {
	return Session{ID: "01J" + n, Kid: "kid-" + n, Card: "practice", Mark: 0x54300001}
}

func (b *bed) mint(n string, wants ...Want) *Set {
	b.t.Helper()
	set, err := b.k.Mint(b.t.Context(), who(n), wants)
	if err != nil {
		b.t.Fatal(err)
	}
	return set
}

func value(t *testing.T, s *Set, name string) string {
	t.Helper()
	v, is, err := s.Secret(name)
	if err != nil || !is {
		t.Fatalf("%s: %v %v", name, is, err)
	}
	return v.Value
}

func (b *bed) state(session string) wire.LeaseState {
	for _, l := range b.k.List() {
		if l.Session == session {
			return l.State
		}
	}
	return ""
}

func (b *bed) files() int {
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		b.t.Fatal(err)
	}
	return len(entries)
}

var db = Want{Secret: "db", Provider: "a", Role: "r"}

// TestTwoSessionsHaveTwoLeases: none gets the other's value, and the end of one takes nothing of the other.
func TestTwoSessionsHaveTwoLeases(t *testing.T) {
	t.Parallel()
	m := newMill(time.Hour)
	b := newBed(t, map[string]*mill{"a": m})
	var sets [8]*Set
	var wg sync.WaitGroup
	for i := range sets {
		wg.Go(func() { sets[i], _ = b.k.Mint(t.Context(), who(string(rune('0'+i))), []Want{db}) })
	}
	wg.Wait()
	seen := map[string]bool{}
	for _, s := range sets {
		v := value(t, s, "db")
		if seen[v] || !m.accepts(v) {
			t.Fatalf("%s is shared, or is no lease", v)
		}
		seen[v] = true
	}
	gone := value(t, sets[0], "db")
	b.k.End("01J0", "")
	if _, _, err := sets[0].Secret("db"); err == nil {
		t.Error("the value is given out after the end")
	}
	b.wait("the revocation", func() bool { return b.state("01J0") == wire.LeaseRevoked })
	if m.accepts(gone) || m.live() != len(sets)-1 || b.files() != len(sets)-1 {
		t.Errorf("%d leases live, %d in the journal", m.live(), b.files())
	}
	if b.rec.count(audit.EventLeaseRevoked) != 1 || b.rec.count(audit.EventLeaseMinted) != len(sets) {
		t.Error("records are missing")
	}
}

// TestAllOrNothing: one provider that gives nothing has the other's lease given back.
func TestAllOrNothing(t *testing.T) {
	t.Parallel()
	a, c := newMill(time.Hour), newMill(time.Hour)
	c.hook(&c.mint, func(context.Context) error {
		return &provider.Error{Kind: provider.Refused, Text: "role is gone"}
	})
	b := newBed(t, map[string]*mill{"a": a, "c": c})
	_, err := b.k.Mint(t.Context(), who("1"), []Want{db, {Secret: "x", Provider: "c", Role: "r"}})
	if err == nil || !strings.Contains(err.Error(), "leasing x from c: role is gone") {
		t.Fatal(err)
	}
	b.wait("the other to be given back", func() bool { return a.live() == 0 && b.files() == 0 })
	if _, err := b.k.Mint(t.Context(), who("1"), []Want{{Secret: "x", Provider: "nobody"}}); err == nil {
		t.Error("a provider that is not there")
	}
}

// TestRenewing: a lease that can be renewed keeps its value, one that cannot is replaced, and the old one revoked; both
// go on past their lifetime.
func TestRenewing(t *testing.T) {
	t.Parallel()
	for _, renews := range []bool{true, false} {
		m := newMill(600 * time.Millisecond)
		m.renews = renews
		b := newBed(t, map[string]*mill{"a": m})
		set := b.mint("1", db)
		first := value(t, set, "db")
		begun := time.Now()
		b.wait("two lifetimes to pass", func() bool {
			if v := value(t, set, "db"); !m.accepts(v) {
				t.Fatalf("renews %v: %s is given out and not valid", renews, v)
			}
			return time.Since(begun) > 1300*time.Millisecond
		})
		if same := value(t, set, "db") == first; same != renews {
			t.Errorf("renews %v: the same value: %v", renews, same)
		}
		b.wait("old ones to be revoked", func() bool { return m.live() == 1 })
		b.k.End("01J1", "")
		b.wait("the end", func() bool { return m.live() == 0 && b.files() == 0 })
	}
}

// TestALeaseThatCannotBeRenewedEnds: the provider is down when it is time. The value is not given out past its lifetime.
func TestALeaseThatCannotBeRenewedEnds(t *testing.T) {
	t.Parallel()
	m := newMill(500 * time.Millisecond)
	b := newBed(t, map[string]*mill{"a": m})
	set := b.mint("1", db)
	m.hook(&m.mint, func(context.Context) error {
		return &provider.Error{Kind: provider.Unreachable, Text: "down"}
	})
	b.wait("the end of the lease", func() bool { _, _, err := set.Secret("db"); return err != nil })
	b.wait("its record", func() bool { return b.rec.count(audit.EventLeaseLost) == 1 })
}

// TestAProviderThatHangsAtTheStop: End returns at once, another provider's lease is revoked meanwhile, and the lease is
// shown as valid until the provider answers; then it is revoked.
func TestAProviderThatHangsAtTheStop(t *testing.T) {
	t.Parallel()
	hung, well := newMill(time.Hour), newMill(time.Hour)
	b := newBed(t, map[string]*mill{"a": hung, "c": well})
	b.mint("1", db, Want{Secret: "x", Provider: "c", Role: "r"})
	hung.hook(&hung.revoke, func(ctx context.Context) error {
		<-ctx.Done()
		return &provider.Error{Kind: provider.Unsure, Text: "no answer in time"}
	})
	begun := time.Now()
	b.k.End("01J1", "")
	if took := time.Since(begun); took > 100*time.Millisecond {
		t.Errorf("End took %v", took)
	}
	b.wait("the other provider", func() bool { return well.live() == 0 })
	b.wait("the truth about the first", func() bool {
		for _, l := range b.k.List() {
			if l.Provider == "a" {
				return l.State == wire.LeaseValid && l.Tries > 0 && l.Took > 0 && strings.Contains(l.Detail, "no answer") && l.ValidUntil.After(time.Now())
			}
		}
		return false
	})
	if b.rec.count(audit.EventRevokeFailed) != 1 || b.files() != 1 {
		t.Errorf("%d records, %d in the journal", b.rec.count(audit.EventRevokeFailed), b.files())
	}
	hung.hook(&hung.revoke, nil)
	b.wait("the revocation", func() bool { return hung.live() == 0 && b.files() == 0 })
}

// TestWhatAnEarlierCreddLeft: a Keeper that dies with leases, with one that could not be revoked, and in the middle of a
// mint leaves them in the journal; the next one revokes them, and shows what nobody can.
func TestWhatAnEarlierCreddLeft(t *testing.T) {
	t.Parallel()
	m := newMill(time.Hour)
	b := newBed(t, map[string]*mill{"a": m})
	b.mint("1", db)
	m.hook(&m.revoke, func(ctx context.Context) error {
		<-ctx.Done() // the death comes before any answer
		return ctx.Err()
	})
	b.mint("2", db)
	b.k.End("01J2", "")
	lost := func() error { return &provider.Error{Kind: provider.Unsure, Text: "lost"} }
	m.after.Store(&lost)
	if _, err := b.k.Mint(t.Context(), who("3"), []Want{db}); err == nil {
		t.Fatal("an answer that was lost is no lease")
	}
	m.after.Store(nil)
	b.crash()
	if m.live() != 3 || b.files() != 3 {
		t.Fatalf("%d live, %d in the journal: the test shows nothing", m.live(), b.files())
	}
	if err := os.WriteFile(filepath.Join(b.dir, "BAD.age"), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(b.dir, ".new-1"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.hook(&m.revoke, nil)
	b.open(map[string]*mill{"a": m})
	b.wait("the revocations", func() bool {
		return m.live() == 1 && b.state("01J1") == wire.LeaseRevoked && b.state("01J2") == wire.LeaseRevoked
	})
	b.wait("what nobody can revoke", func() bool { return b.state("01J3") == wire.LeaseUnknown && b.state("") == wire.LeaseUnknown })
	if b.files() != 2 { // the lost one and the torn one
		t.Errorf("%d in the journal", b.files())
	}
}

// TestTheJournalsDiskIsFull: nothing is asked for that cannot be noted, and what was made when the disk filled is given
// back.
func TestTheJournalsDiskIsFull(t *testing.T) {
	t.Parallel()
	m := newMill(time.Hour)
	b := newBed(t, map[string]*mill{"a": m})
	b.full.Store(true)
	if _, err := b.k.Mint(t.Context(), who("1"), []Want{db}); err == nil || !strings.Contains(err.Error(), "no space") {
		t.Fatal(err)
	}
	if m.minted.Load() != 0 {
		t.Fatal("something was leased without a note")
	}
	b.full.Store(false)
	m.hook(&m.mint, func(context.Context) error { b.full.Store(true); return nil })
	if _, err := b.k.Mint(t.Context(), who("2"), []Want{db}); err == nil {
		t.Fatal("it was leased with the disk full")
	}
	b.wait("it to be given back", func() bool { return m.minted.Load() == 1 && m.live() == 0 })
	b.full.Store(false)
	m.hook(&m.mint, nil)
	set := b.mint("3", db)
	b.full.Store(true) // a revocation needs no disk
	b.k.End("01J3", "")
	b.wait("the revocation", func() bool { return !m.accepts("value-of-"+set.slots[0].want.Secret) && m.live() == 0 })
}

// TestAProviderThatLies: a lease that is to live for ever is given back; one that claims to be over at once is revoked all
// the same.
func TestAProviderThatLies(t *testing.T) {
	t.Parallel()
	long := newMill(2 * time.Hour)
	b := newBed(t, map[string]*mill{"a": long})
	if _, err := b.k.Mint(t.Context(), who("1"), []Want{db}); err == nil || !strings.Contains(err.Error(), "maxLifetime") {
		t.Fatal(err)
	}
	b.wait("it to be given back", func() bool { return long.live() == 0 })
	b = newBed(t, map[string]*mill{"a": long}) // what the other began may still be under way
	b.k.cfg.Issuers["a"] = Issuer{Provider: long, Attempt: time.Second, MaxLifetime: 3 * time.Hour, MinLifetime: 150 * time.Minute}
	if _, err := b.k.Mint(t.Context(), who("2"), []Want{db}); err == nil || !strings.Contains(err.Error(), "too short") {
		t.Fatal(err)
	}
	b.wait("that to be given back too", func() bool { return long.live() == 0 && long.minted.Load() == 2 })
	short := newMill(time.Millisecond)
	b2 := newBed(t, map[string]*mill{"a": short})
	short.hook(&short.revoke, func(context.Context) error { return &provider.Error{Kind: provider.Unsure, Text: "later"} })
	set, err := b2.k.Mint(t.Context(), who("1"), []Want{db})
	if err != nil {
		t.Fatal(err)
	}
	b2.k.End("01J1", "")
	b2.wait("the first try", func() bool { return b2.rec.count(audit.EventRevokeFailed) > 0 })
	if _, _, err := set.Secret("db"); err == nil {
		t.Error("what is over is given out")
	}
	short.hook(&short.revoke, nil)
	b2.wait("the revocation", func() bool { return short.live() == 0 })
}

// TestAMintThatIsGivenUp: the caller of a spawn went away while the provider hung; its lease is not lost from sight.
func TestAMintThatIsGivenUp(t *testing.T) {
	t.Parallel()
	m := newMill(time.Hour)
	b := newBed(t, map[string]*mill{"a": m})
	m.hook(&m.mint, func(ctx context.Context) error {
		<-ctx.Done()
		return &provider.Error{Kind: provider.Unsure, Text: "given up"}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := b.k.Mint(ctx, who("1"), []Want{db}); err == nil {
		t.Fatal("it hung, and there is a lease")
	}
	b.wait("the truth", func() bool { return b.state("01J1") == wire.LeaseUnknown })
}

// TestClosing: Close revokes what there is while it may, and leaves the rest to the journal.
func TestClosing(t *testing.T) {
	t.Parallel()
	m := newMill(time.Hour)
	b := newBed(t, map[string]*mill{"a": m})
	b.mint("1", db)
	b.k.Close(5 * time.Second)
	if m.live() != 0 || b.files() != 0 {
		t.Errorf("%d live, %d in the journal", m.live(), b.files())
	}
}

// TestWhatIsRevokedIsRedactedNoMore: a value is redacted while it is worth anything, and for a while after; then it is
// forgotten.
func TestWhatIsRevokedIsRedactedNoMore(t *testing.T) {
	t.Parallel()
	m := newMill(time.Hour)
	b := newBed(t, map[string]*mill{"a": m})
	b.k.dropAfter = 50 * time.Millisecond
	v := value(t, b.mint("1", db), "db")
	if !b.rec.redacts(v) {
		t.Fatal("what was leased may be logged")
	}
	m.hook(&m.revoke, func(context.Context) error { return &provider.Error{Kind: provider.Unsure, Text: "later"} })
	b.k.End("01J1", "")
	b.wait("a try", func() bool { return b.rec.count(audit.EventRevokeFailed) == 1 })
	if !b.rec.redacts(v) {
		t.Error("what is still valid may be logged")
	}
	m.hook(&m.revoke, nil)
	b.wait("it to be forgotten", func() bool { return !b.rec.redacts(v) && m.live() == 0 })
}
