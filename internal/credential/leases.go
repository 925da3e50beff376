package credential

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"tagout/internal/control"
	"tagout/internal/leased"
	"tagout/internal/provider"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// How long providers are waited for.
const (
	leaseWithin = 10 * time.Second        // all the leases of one new session; sandboxd waits a little longer
	leaveLeases = 1500 * time.Millisecond // revocations at credd's own end; the next credd carries on
)

// Lessor is a provider that secrets are leased from.
type Lessor struct {
	Name  string
	Roles []string
	Own   []string // vault entries that it is called with: each bound to one of Hosts, and never granted to a kid
	Hosts []string // "name:port"
	// Make makes it what leases are had from. secrets gives the entries of Own.
	Make func(secrets provider.Secrets) leased.Issuer
}

// leasing is what credd knows of leases.
type leasing struct {
	keeper *leased.Keeper
	roles  map[string]bool   // "PROVIDER/ROLE"
	own    map[string]string // vault entry -> the provider that is called with it
	vault  *vault
}

func newLeasing(cfg Config, v *vault) *leasing {
	l := &leasing{vault: v, roles: map[string]bool{}, own: map[string]string{}}
	issuers := map[string]leased.Issuer{}
	for _, from := range cfg.Lessors {
		issuers[from.Name] = from.Make(func(name string) (string, error) { return v.ownValue(name, from) })
		for _, role := range from.Roles {
			l.roles[from.Name+"/"+role] = true
		}
		for _, name := range from.Own {
			l.own[name] = from.Name
		}
	}
	l.keeper = leased.New(leased.Config{
		Dir: filepath.Join(cfg.Dir, "leases"), Seal: v.writeSealed, Unseal: v.readSealed, Issuers: issuers,
		Audit: cfg.Audit, Log: cfg.Log, Boottime: cfg.Boottime, Now: time.Now,
	})
	return l
}

var leaseRE = regexp.MustCompile(`^[a-z0-9-]{1,32}/[a-z0-9-]{1,32}$`)

// checkLeased returns the binding of an entry that is leased.
func checkLeased(e wire.VaultEntry) (binding, error) {
	switch {
	case !leaseRE.MatchString(e.Lease):
		return binding{}, &badEntry{"a lease is written PROVIDER/ROLE, as the box's configuration names them"}
	case e.Value != "" || e.Canary:
		return binding{}, &badEntry{"a leased secret has no value of its own and is no canary"}
	}
	as := e.Present
	if as.As == wire.AsSigV4 { // the access key's id comes with the lease
		if as.Name != "" || as.User != "" {
			return binding{}, &badEntry{"the access key's id comes with the lease: write sigv4 alone"}
		}
		e.Present = wire.Presentation{}
	}
	b, err := checkBinding(e)
	if as.As == wire.AsSigV4 {
		b.Present = as
	}
	return b, err
}

// knows refuses a lease that the configuration does not have; empty is none.
func (l *leasing) knows(ref string) error {
	if ref == "" || l.roles[ref] || !leaseRE.MatchString(ref) { // the vault says what is wrong with the last
		return nil
	}
	return &badEntry{fmt.Sprintf("the box's configuration has no provider and role %s: add them under providers, and restart credd", ref)}
}

// ownValue returns a value that a provider is called with, where it is bound to one of the provider's hosts.
func (v *vault) ownValue(name string, from Lessor) (string, error) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	s := v.secrets[name]
	switch {
	case v.id == nil:
		return "", errShut
	case s == nil:
		return "", fmt.Errorf("the vault holds no secret called %q, which %s is called with: put it there with `tagout vault set %s --host %s`", name, from.Name, name, from.Hosts[0])
	case s.Canary || s.Lease != "":
		return "", fmt.Errorf("%s is called with the secret %s, which is a canary or leased itself", from.Name, name)
	case !slices.ContainsFunc(from.Hosts, func(h string) bool { return slices.Contains(s.Hosts, h) }):
		return "", fmt.Errorf("secret %s is not bound to %s: `tagout vault set %s --host %s`", name, strings.Join(from.Hosts, " or "), name, from.Hosts[0])
	}
	return string(s.Value), nil
}

// leaseOf returns the provider and role that an entry is leased from; empty where it is not.
func (v *vault) leaseOf(name string) string {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if s := v.secrets[name]; s != nil {
		return s.Lease
	}
	return ""
}

// leaseFor leases what the request names and the vault has leased. nil, nil where that is nothing.
func (s *Service) leaseFor(ctx context.Context, req *wire.MintRequest) (*leased.Set, *refusal) {
	var wants []leased.Want
	for _, secret := range req.Secrets {
		if from, role, ok := strings.Cut(s.vault.leaseOf(secret.Name), "/"); ok {
			wants = append(wants, leased.Want{Secret: secret.Name, Provider: from, Role: role})
		}
	}
	if len(wants) == 0 {
		return nil, nil
	}
	if no := s.askTags(ctx, req); no != nil { // nothing is leased for a session that is stopped already
		return nil, no
	}
	if s.tokens.taken(req) {
		return nil, refuse(http.StatusConflict, reason.Capacity, "kid %s or mark %#x has tokens already: end that session first", req.Kid, req.Mark)
	}
	ctx, cancel := context.WithTimeout(ctx, leaseWithin)
	defer cancel()
	set, err := s.leasing.keeper.Mint(ctx, leased.Session{ID: req.Session, Kid: req.Kid, Card: req.Card, Mark: req.Mark, Lifetime: s.lifetime(req)}, wants)
	if err != nil {
		return nil, refuse(http.StatusBadGateway, reason.LeaseFailed, "minting: %v", err)
	}
	return set, nil
}

// taken says whether the session's kid or mark has tokens, or may have none any more.
func (t *table) taken(req *wire.MintRequest) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byMark[req.Mark] != nil || t.byKid[req.Kid] != nil
}

// errNoLease is why a leased secret has no value.
var errNoLease = errors.New("its lease is over")

// value puts the session's own lease into a reply for a secret that is leased. reply is what the vault says of it.
func (l *leasing) value(g grant, reply wire.ResolveReply) (wire.ResolveReply, error) {
	v, is, err := g.holder.leases.Secret(g.secret)
	switch {
	case err != nil:
		return wire.ResolveReply{}, fmt.Errorf("%w: %w", errNoLease, err)
	case !is && l.vault.leaseOf(g.secret) != "":
		return wire.ResolveReply{}, fmt.Errorf("%w: secret %s is leased since after this session began: spawn the kid again", errNoLease, g.secret)
	case !is:
		return reply, nil
	}
	reply.Value, reply.SessionToken = v.Value, v.Session
	if reply.Present.User == "" && (reply.Present.As == wire.AsBasic || reply.Present.As == wire.AsSigV4) {
		reply.Present.User = v.User
	}
	return reply, nil
}

// listLeases answers with the leases that may be valid and the last of those that are over, never with a value. Tokens
// and leases are two things: a session's token for a leased secret is listed among its tokens, and is gone the moment it
// is revoked; its lease is listed here until the provider has said the same.
//
// While the vault is sealed its journal cannot be read: then nobody knows what an earlier credd has left.
func (s *Service) listLeases(w http.ResponseWriter, _ *http.Request) {
	if err := s.vault.shut(); err != nil {
		control.Refuse(w, http.StatusServiceUnavailable, reason.VaultSealed, "listing leases: "+err.Error())
		return
	}
	control.Reply(w, s.leasing.keeper.List())
}
