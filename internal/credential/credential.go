// Package credential is credd: the vault of secrets, the sessions' tokens and the truth about what is revoked.
//
// A kid holds opaque tokens. The proxy brings each one here every time it is used, with the session's mark
// and the host and port that the request goes to, and gets the secret's value for that one request. Nothing
// is cached anywhere, so a revocation is one write under a lock.
//
// What it promises:
//   - secrets never touch a disk in clear: the vault is one age-encrypted file (vault.go), and while its identity is sealed
//     and nobody has opened it, everything is denied (seal.go);
//   - a token resolves only with its own session's mark and only towards the hosts bound in the vault;
//   - after a revocation is acknowledged no acceptance is delivered any more (tokens.go);
//   - tokens live in memory only: after a restart every token is unknown, so a crash revokes everything;
//   - until killswitchd has said once which tags hang, nothing is minted and nothing is accepted;
//   - secrets called payment_* and those that the box's configuration denies are never minted.
//
// What it does not promise: Go's runtime may leave copies of a value in its heap until the memory is used
// again. That memory is locked, is not dumped, and belongs to this process alone (harden.go).
package credential

import (
	"context"
	"fmt"
	"log/slog"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/tally"
	"tagout/internal/wire"
)

// Recorder is the audit log. Log must not block.
type Recorder interface {
	Log(audit.Record)
	AddSecret(value string)
}

// Metrics is what credd counts.
type Metrics interface {
	// Minted adds tokens that were given out.
	Minted(tokens int)
	// Issued adds one JWT that was made.
	Issued()
	// Used adds one decision about a token; reason.OK is an acceptance.
	Used(code reason.Code)
	// MintRefused adds one session whose tokens were refused.
	MintRefused(code reason.Code)
	// Revoked adds one revocation with the tokens that it forgot and the time from request to acknowledgement.
	Revoked(tokens int, took time.Duration)
	// Expired adds tokens whose lifetime was over.
	Expired(tokens int)
	// Held sets how many sessions, tokens and secrets are held now.
	Held(sessions, tokens, secrets int)
	// Leases sets how many leased secrets providers may take now, by state: revoked and over are none.
	Leases(open map[wire.LeaseState]int)
}

// Peers are the uids that the routes ask for, and the gid of the instance's group.
type Peers struct{ Root, Proxy, Killswitchd, Group int }

// Config is what a Service needs. Nothing may be nil or empty unless it says so.
type Config struct {
	Dir      string                                    // belongs to credd alone; must exist
	BootID   string                                    // the kernel's, 36 characters
	OwnsMark func(mark uint32) bool                    // whether a mark is one of this instance's
	Deny     []string                                  // secrets never minted: names or path.Match globs; may be empty
	Tags     func(context.Context) ([]wire.Tag, error) // asks killswitchd which tags hang
	Peers    Peers
	Audit    Recorder
	Metrics  Metrics
	Log      *slog.Logger
	Boottime func() time.Duration // CLOCK_BOOTTIME, for expiry
	// Unlock opens an identity that is sealed: the passphrase, or the text of the age identity that it is sealed to. nil:
	// nothing was handed over. Open wipes it.
	Unlock   []byte
	Lifetime time.Duration    // the longest that a session's tokens may live; 0: as long as the session
	Lessors  []Lessor         // that secrets are leased from, each name once; may be empty
	Issuer   *IssuerConfig    // nil: the box issues no tokens of its own
	Walltime func() time.Time // for what is said to others; nil: time.Now
}

// auditLines bounds how many uses and refusals a session writes one by one in a second; see package tally.
const auditLines = 64

// tagRetry is how often killswitchd is asked for its tags until it has answered once.
const tagRetry = 100 * time.Millisecond

// paymentPrefix begins the names of secrets that no kid can ever be granted.
const paymentPrefix = "payment_"

// Service is credd. Its methods and handlers are safe for concurrent use.
type Service struct {
	cfg     Config
	deny    []string // cfg.Deny, lower case
	vault   *vault
	tokens  *table
	ledger  *ledger
	tally   *tally.Tally
	ready   atomic.Bool // killswitchd has answered once
	onOpen  []func() error
	usage   *usage
	issuing *issuing // nil where the box is no issuer
	leasing *leasing

	begun atomic.Uint64 // sessions that got their tokens

	closeOnce sync.Once
	closing   chan struct{} // closed when streams are to end
}

// Open reads (or makes) the identity, the vault and the revocation ledger in cfg.Dir. Another process that
// uses the directory, an identity that others can read, and a vault that does not decrypt are errors.
func Open(cfg Config) (*Service, error) {
	s := &Service{cfg: cfg, tally: tally.New(cfg.Audit, auditLines), usage: newUsage(), closing: make(chan struct{})}
	for _, pattern := range append([]string{paymentPrefix + "*"}, cfg.Deny...) {
		pattern = strings.ToLower(pattern)
		if _, err := path.Match(pattern, ""); err != nil {
			return nil, fmt.Errorf("reading denySecrets: %q is neither a name nor a pattern: %w", pattern, err)
		}
		s.deny = append(s.deny, pattern)
	}
	var err error
	defer clear(cfg.Unlock)
	if s.vault, err = openVault(cfg.Dir, cfg.Unlock, cfg.Audit.AddSecret); err != nil {
		return nil, err
	}
	s.vault.denied = s.denied
	var revoked revocations
	if s.ledger, revoked, err = openLedger(cfg.Dir, cfg.BootID); err != nil {
		return nil, err
	}
	s.tokens = newTable(cfg.Boottime, revoked)
	if cfg.Issuer != nil {
		if s.issuing, err = newIssuing(cfg, s.vault, s.tokens); err != nil {
			return nil, err
		}
		if err := s.whenOpen(s.issuing.open); err != nil {
			return nil, err
		}
	}
	s.leasing = newLeasing(cfg, s.vault)
	if err := s.whenOpen(s.leasing.keeper.Load); err != nil {
		return nil, err
	}
	s.reportBadLines(revoked.bad)
	return s, nil
}

// Run waits for killswitchd's first answer, keeps the ledger and folds the records of floods, until ctx
// ends; then it writes what is left, wipes the secrets and returns.
func (s *Service) Run(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.tally.Run(ctx, tally.Window)
	}()
	go s.awaitTags(ctx)
	go s.expire(ctx)
	go s.trim(ctx)
	if s.issuing != nil {
		go s.rotateInTime(ctx)
	}
	s.ledger.run(ctx, s.reportLedger)
	<-done
	if s.issuing != nil {
		s.issuing.keys().Wipe()
	}
	s.leasing.keeper.Close(leaveLeases)
	s.vault.close()
	s.ledger.close()
}

// Healthy says whether credd serves.
func (s *Service) Healthy() error {
	if !s.ready.Load() {
		return fmt.Errorf("killswitchd has not said yet which tags hang: is it running?")
	}
	return s.ledger.healthy()
}

// Warning says what an operator should know of a credd that serves; nil where that is nothing.
func (s *Service) Warning() error { return s.vault.shut() }

// awaitTags opens the gate as soon as killswitchd has answered once. Which tags it names does not matter
// here: no token outlives a restart, and each mint asks again.
func (s *Service) awaitTags(ctx context.Context) {
	tick := time.NewTicker(tagRetry)
	defer tick.Stop()
	for {
		ask, cancel := context.WithTimeout(ctx, time.Second)
		_, err := s.cfg.Tags(ask)
		cancel()
		if err == nil {
			s.ready.Store(true)
			s.cfg.Log.Info("killswitchd has answered: serving tokens")
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (s *Service) reportBadLines(bad []badLine) {
	for _, b := range bad {
		s.cfg.Log.Error("the revocation ledger has a line that a crash tore or something changed: its sessions get no token",
			"file", s.ledger.path, "line", b.line, "marks_beginning_with", b.prefix)
		s.cfg.Audit.Log(audit.Record{Event: audit.EventTokenRevoked, Outcome: audit.OutcomeFail, Reason: reason.Malformed,
			Detail: fmt.Sprintf("revocation ledger line %d is torn or changed: marks beginning with %q get no token", b.line, b.prefix)})
	}
}

func (s *Service) reportLedger(err error) {
	s.cfg.Log.Error("the revocation ledger cannot be written: revocations hold in memory and are written again in a second", "error", err)
	s.cfg.Audit.Log(audit.Record{Event: audit.EventTokenRevoked, Outcome: audit.OutcomeFail, Reason: reason.Internal,
		Detail: "the revocation ledger cannot be written: " + err.Error()})
}

func (s *Service) countHeld() {
	sessions, tokens := s.tokens.size()
	s.cfg.Metrics.Held(sessions, tokens, s.vault.len())
}
