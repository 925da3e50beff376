package credential

import (
	"context"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/leased"
	"tagout/internal/provider"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// lender is a provider in memory: it checks the secret that it is called with.
type lender struct {
	secrets provider.Secrets
	revoked atomic.Int64
	live    atomic.Int64
	hold    chan struct{} // not nil: revocations wait for it
	asked   chan struct{} // gets one for each revocation that arrives
}

func (l *lender) Mint(_ context.Context, r provider.Request) (provider.Lease, error) {
	if _, err := l.secrets("lender_key"); err != nil {
		return provider.Lease{}, &provider.Error{Kind: provider.Refused, Text: err.Error()}
	}
	l.live.Add(1)
	return provider.Lease{Handle: provider.Handle{Role: r.Role, Token: r.ID}, Secret: provider.Secret{Value: "leased-" + r.ID, User: "user-" + r.ID, Session: "session-" + r.ID}, Lifetime: time.Hour},
		r.Note(provider.Handle{Role: r.Role, Token: r.ID})
}

func (l *lender) Renew(context.Context, provider.Handle, time.Duration) (time.Duration, error) {
	return 0, &provider.Error{Kind: provider.Refused, Text: "no"}
}

func (l *lender) Revoke(ctx context.Context, _ provider.Handle) error {
	select {
	case l.asked <- struct{}{}:
	default:
	}
	if l.hold != nil {
		select {
		case <-l.hold:
		case <-ctx.Done():
			return &provider.Error{Kind: provider.Unsure, Text: "no answer in time"}
		}
	}
	l.revoked.Add(1)
	l.live.Add(-1)
	return nil
}

func withLender(l *lender) func(*Config) {
	l.asked = make(chan struct{}, 64)
	return func(c *Config) {
		c.Boottime = bootclock.Now
		c.Lessors = []Lessor{{Name: "lender", Roles: []string{"r"}, Own: []string{"lender_key"}, Hosts: []string{"lender.test:443"},
			Make: func(s provider.Secrets) leased.Issuer {
				l.secrets = s
				return leased.Issuer{Provider: l, Attempt: 2 * time.Second, MaxLifetime: 2 * time.Hour}
			}}}
	}
}

func (b *box) putLeased(name string, as wire.Presentation) {
	b.t.Helper()
	if err := b.call("PUT", "/v1/vault/"+name, wire.VaultEntry{Lease: "lender/r", Hosts: []string{"api.vendor.test:443"}, Present: as}, nil); err != nil {
		b.t.Fatal(err)
	}
}

// TestALeasedSecretIsSwappedForItsOwnSession: two kids of one card each have a lease of their own behind a token of their
// own, towards the bound host alone; it is revoked when its session ends.
func TestALeasedSecretIsSwappedForItsOwnSession(t *testing.T) {
	l := &lender{}
	b := newBox(t).start(withLender(l))
	b.put("lender_key", "the-key-of-the-lender", "lender.test:443")
	b.putLeased("db", wire.Presentation{})
	b.putLeased("cloud", wire.Presentation{As: wire.AsSigV4})
	var one, two wire.MintReply
	for kid, reply := range map[string]*wire.MintReply{"kid1": &one, "kid2": &two} {
		mark := uint32(testMark)
		if kid == "kid2" {
			mark = otherMark
		}
		if err := b.call("POST", "/v1/sessions", mintFor(kid, mark, "db", "cloud"), reply); err != nil {
			t.Fatal(err)
		}
	}
	first, err := b.resolve(testMark, one.Tokens["db"], "api.vendor.test", 443)
	if err != nil || !strings.HasPrefix(first.Value, "leased-") {
		t.Fatalf("%+v, %v", first, err)
	}
	second, err := b.resolve(otherMark, two.Tokens["db"], "api.vendor.test", 443)
	if err != nil || second.Value == first.Value {
		t.Fatalf("%+v, %v", second, err)
	}
	var cloud wire.ResolveReply
	err = b.call("POST", "/v1/resolve", wire.ResolveRequest{Mark: testMark, Token: one.Tokens["cloud"], Host: "api.vendor.test", Port: 443, Place: wire.Presentation{As: wire.AsSigV4}}, &cloud)
	if err != nil || !strings.HasPrefix(cloud.Present.User, "user-") || !strings.HasPrefix(cloud.SessionToken, "session-") {
		t.Errorf("%+v, %v", cloud, err)
	}
	_, err = b.resolve(testMark, one.Tokens["db"], "evil.test", 443)
	refusedWith(t, err, 403, reason.TokenScope)
	_, err = b.resolve(testMark, two.Tokens["db"], "api.vendor.test", 443)
	refusedWith(t, err, 403, reason.TokenScope)
	if err := b.call("DELETE", "/v1/sessions/kid1", nil, nil); err != nil {
		t.Fatal(err)
	}
	_, err = b.resolve(testMark, one.Tokens["db"], "api.vendor.test", 443)
	refusedWith(t, err, 403, reason.TokenUnknown)
	b.wait("the leases of the session to be revoked", func() bool { return l.revoked.Load() == 2 })
	if _, err := b.resolve(otherMark, two.Tokens["db"], "api.vendor.test", 443); err != nil {
		t.Errorf("the other session: %v", err)
	}
	for _, rec := range b.rec.find(audit.EventLeaseRevoked) {
		if rec.Kid != "kid1" || rec.Fields["took"] == "" || rec.Fields["provider"] != "lender" {
			t.Errorf("%+v", rec)
		}
	}
}

// TestRevocationAtTheProviderComesAfterTheAcknowledgement: the provider hangs, the stop is acknowledged at once, and the
// provider was not asked before; then the lease is shown as what it is.
func TestRevocationAtTheProviderComesAfterTheAcknowledgement(t *testing.T) {
	l := &lender{hold: make(chan struct{})}
	b := newBox(t).start(withLender(l))
	b.put("lender_key", "the-key-of-the-lender", "lender.test:443")
	b.putLeased("db", wire.Presentation{})
	b.mint("kid1", testMark, "db")
	begun := time.Now()
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}}, nil); err != nil {
		t.Fatal(err)
	}
	acknowledged := time.Now()
	if took := acknowledged.Sub(begun); took > time.Second {
		t.Errorf("the acknowledgement took %v", took)
	}
	<-l.asked
	var list []wire.Leased
	if err := b.call("GET", "/v1/leases", nil, &list); err != nil || len(list) != 1 || list[0].State != wire.LeaseRevoking || list[0].Ended.Before(begun) || list[0].Mark != testMark {
		t.Fatalf("%+v, %v", list, err)
	}
	if n := b.svc.leasing.keeper.Open(); n[wire.LeaseRevoking]+n[wire.LeaseValid] != 1 || n[wire.LeaseHeld] != 0 {
		t.Errorf("counted as %v", n)
	}
	b.wait("it to be called valid", func() bool {
		return b.call("GET", "/v1/leases", nil, &list) == nil && list[0].State == wire.LeaseValid && list[0].ValidUntil.After(time.Now())
	})
	close(l.hold)
	b.wait("the revocation", func() bool {
		return b.call("GET", "/v1/leases", nil, &list) == nil && list[0].State == wire.LeaseRevoked && list[0].Took > time.Second
	})
}

// TestLeasesThatAreNotGiven: with the reason, and without a token.
func TestLeasesThatAreNotGiven(t *testing.T) {
	l := &lender{}
	b := newBox(t).start(withLender(l))
	b.putLeased("db", wire.Presentation{})
	refusedWith(t, b.call("POST", "/v1/sessions", mintFor("kid1", testMark, "db"), nil), 502, reason.LeaseFailed) // the vault has no key for the lender
	b.put("lender_key", "the-key-of-the-lender", "elsewhere.test:443")
	refusedWith(t, b.call("POST", "/v1/sessions", mintFor("kid1", testMark, "db"), nil), 502, reason.LeaseFailed) // it is for another host
	b.put("lender_key", "the-key-of-the-lender", "lender.test:443")
	refusedWith(t, b.call("POST", "/v1/sessions", mintFor("kid1", testMark, "lender_key"), nil), 403, reason.SecretDenied)
	for _, e := range []wire.VaultEntry{
		{Lease: "lender/other", Hosts: []string{"a.test:443"}},
		{Lease: "lender", Hosts: []string{"a.test:443"}},
		{Lease: "lender/r", Hosts: []string{"a.test:443"}, Value: "a-value-of-its-own"},
		{Lease: "lender/r", Hosts: []string{"a.test:443"}, Canary: true},
		{Lease: "lender/r"},
	} {
		refusedWith(t, b.call("PUT", "/v1/vault/x", e, nil), 400, reason.Malformed)
	}
	refusedWith(t, b.call("POST", "/v1/vault/db/rotate", wire.RotateRequest{Value: "another-value"}, nil), 400, reason.Malformed)
	b.tags.Store(&[]wire.Tag{{Scope: wire.Scope{All: true}, By: "Ada"}})
	refusedWith(t, b.call("POST", "/v1/sessions", mintFor("kid1", testMark, "db"), nil), 423, reason.Tagged)
	if l.live.Load() != 0 {
		t.Error("something was leased for a session that is stopped")
	}
	b.tags.Store(&[]wire.Tag{})
	b.mint("kid1", testMark, "db")
	refusedWith(t, b.call("POST", "/v1/sessions", mintFor("kid1", otherMark, "db"), nil), 409, reason.Capacity)
	if l.live.Load() != 1 {
		t.Errorf("%d leases for one session", l.live.Load())
	}
}

// TestAStopDuringAMintGivesItsLeasesBack: everything is revoked while the provider is asked.
func TestAStopDuringAMintGivesItsLeasesBack(t *testing.T) {
	l := &lender{}
	b := newBox(t).start(withLender(l))
	b.put("lender_key", "the-key-of-the-lender", "lender.test:443")
	b.putLeased("db", wire.Presentation{})
	inside, goOn := make(chan struct{}), make(chan struct{})
	secrets := l.secrets
	l.secrets = func(name string) (string, error) {
		close(inside)
		<-goOn
		return secrets(name)
	}
	failed := make(chan error, 1)
	go func() { failed <- b.call("POST", "/v1/sessions", mintFor("kid1", testMark, "db"), nil) }()
	<-inside
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}}, nil); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	refusedWith(t, <-failed, 423, reason.Stopped)
	b.wait("the lease to be given back", func() bool { return l.revoked.Load() == 1 && l.live.Load() == 0 })
}

// TestLeasesOutliveACrash: nothing of a lease lies on disk in clear, and the next credd revokes what the dead one left.
func TestLeasesOutliveACrash(t *testing.T) {
	l := &lender{hold: make(chan struct{})}
	b := newBox(t).start(withLender(l))
	b.put("lender_key", "the-key-of-the-lender", "lender.test:443")
	b.putLeased("db", wire.Presentation{})
	b.mint("kid1", testMark, "db")
	b.stop() // the provider hangs, so nothing is revoked at the end
	files, err := os.ReadDir(b.dir + "/leases")
	if err != nil || len(files) != 1 || l.live.Load() != 1 {
		t.Fatalf("%d in the journal, %d live, %v: the test shows nothing", len(files), l.live.Load(), err)
	}
	raw, err := os.ReadFile(b.dir + "/leases/" + files[0].Name())
	if err != nil || strings.Contains(string(raw), "leased-") || !strings.HasPrefix(string(raw), "age-encryption.org/") {
		t.Errorf("the journal is not sealed: %q, %v", raw[:min(len(raw), 40)], err)
	}
	close(l.hold)
	b.start(withLender(l))
	b.wait("the next credd to revoke it", func() bool { return l.live.Load() == 0 })
	b.wait("the journal to be empty", func() bool { files, err := os.ReadDir(b.dir + "/leases"); return err == nil && len(files) == 0 })
}

// TestLeasesBehindASealedVault: what a dead credd left cannot be read before the vault is opened, and nobody is told that
// there is nothing; once it is opened the leases are revoked.
func TestLeasesBehindASealedVault(t *testing.T) {
	l := &lender{hold: make(chan struct{})}
	b := newBox(t).start(withLender(l))
	b.put("lender_key", "the-key-of-the-lender", "lender.test:443")
	b.putLeased("db", wire.Presentation{})
	b.mint("kid1", testMark, "db")
	if err := b.call("POST", "/v1/vault-seal", wire.SealRequest{Passphrase: testPassphrase}, nil); err != nil {
		t.Fatal(err)
	}
	b.stop()
	close(l.hold)
	b.start(withLender(l))
	refusedWith(t, b.call("GET", "/v1/leases", nil, nil), 503, reason.VaultSealed)
	if l.live.Load() != 1 {
		t.Fatalf("%d leases live: the test shows nothing", l.live.Load())
	}
	if err := b.call("POST", "/v1/vault-unlock", wire.UnlockRequest{Key: testPassphrase}, nil); err != nil {
		t.Fatal(err)
	}
	b.wait("the leases to be revoked", func() bool { return l.live.Load() == 0 })
}
