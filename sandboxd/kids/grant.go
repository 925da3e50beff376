package kids

import (
	"context"
	"slices"
	"time"

	"github.com/oklog/ulid/v2"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// maxGrant is the longest exception. Whoever needs more changes the card.
const maxGrant = 24 * time.Hour

// grant is one exception as it lies in the kid's record.
type grant struct {
	wire.Grant
	Until time.Duration `json:"until"` // CLOCK_BOOTTIME: what counts
}

func (g grant) rule() policy.Rule {
	return policy.Rule{Host: g.Host, Ports: []uint16{g.Port}, Protocol: policy.Protocol(g.Protocol), Expires: int64(g.Until), Grant: g.ID}
}

func (g grant) record(event, actor, detail string) audit.Record {
	return audit.Record{Event: event, Actor: actor, Outcome: audit.OutcomeOK, Detail: detail,
		Dst:    &audit.Dst{Name: g.Host, Port: g.Port, Proto: g.Protocol},
		Fields: map[string]string{"grant": g.ID, "by": g.By, "expires": g.Expires.Format(time.RFC3339)}}
}

// Signature is what vouches for whoever changes a kid's egress. The zero value: nobody signed.
type Signature struct{ Order, Key, Note string }

// into says in a record what vouches for it: the signed order as it came, or the uid that the kernel saw.
func (s Signature) into(fields map[string]string, actor string) {
	if s.Order == "" {
		fields["unsigned"] = actor
		return
	}
	fields["order"], fields["key"], fields["note"] = s.Order, s.Key, s.Note
}

// Grant adds an exception to a living kid's policy. It is refused where a deny rule matches, where the host is
// not a name, and where the policy allows the same already.
func (m *Manager) Grant(ctx context.Context, name, actor string, r wire.GrantRequest, sig Signature) (wire.Grant, error) {
	g, err := newGrant(r)
	if err != nil {
		return wire.Grant{}, err
	}
	g.Order, g.Key = sig.Order, sig.Key
	err = m.withRunning(ctx, name, func(k *kid) error {
		before := m.egress(k)
		if err := grantable(before, g); err != nil {
			return err
		}
		m.mu.Lock()
		k.rec.Grants = append(k.rec.Grants, g)
		m.mu.Unlock()
		_, err := m.applyEgress(ctx, k)
		if KindOf(err) == Invalid {
			k.dropGrant(g.ID)
			return err
		}
		rec := g.record(audit.EventGrantPlaced, actor, g.Reason)
		rec.Generation = k.rec.Session.Generation
		difference(before, k.rec.Session.Egress, rec.Fields)
		sig.into(rec.Fields, actor)
		m.log(k, rec)
		return err
	})
	return g.Grant, err
}

// newGrant checks what can be checked without the kid.
func newGrant(r wire.GrantRequest) (grant, error) {
	host, err := policy.Name(r.Host)
	if err != nil {
		return grant{}, refuse(Invalid, reason.NameInvalid, "granting %q: %w: a grant names one host exactly", r.Host, err)
	}
	if r.Protocol == "" {
		r.Protocol = string(policy.TLS)
		if r.Port == 80 {
			r.Protocol = string(policy.HTTP)
		}
	}
	switch {
	case r.Port == 0 || r.Port == 53 || r.Port == 853:
		return grant{}, refuse(Invalid, reason.PortNotAllowed, "granting port %d: it can never be granted: name another port", r.Port)
	case !slices.Contains([]policy.Protocol{policy.TLS, policy.HTTP, policy.TCP}, policy.Protocol(r.Protocol)):
		return grant{}, refuse(Invalid, reason.Malformed, "granting protocol %q: use tls, http or tcp", r.Protocol)
	case r.For <= 0 || r.For > maxGrant:
		return grant{}, refuse(Invalid, reason.Malformed, "granting for %v: say how long with --for, at most %v; what is needed longer belongs into the card", r.For, maxGrant)
	case r.By == "" || r.Reason == "":
		return grant{}, refuse(Invalid, reason.Malformed, "granting %s:%d: say who and why with --by and --reason", host, r.Port)
	}
	now := time.Now().UTC().Truncate(time.Second)
	return grant{Until: bootclock.Now() + r.For, Grant: wire.Grant{ID: ulid.Make().String(), Host: host, Port: r.Port,
		Protocol: r.Protocol, By: r.By, Reason: r.Reason, Placed: now, Expires: now.Add(r.For)}}, nil
}

// grantable asks the policy as it would stand.
func grantable(spec policy.Spec, g grant) error {
	boot := int64(bootclock.Now())
	now, err := policy.Compile(spec.At(boot)) // a rule that has run out allows nothing
	if err != nil {
		return refuse(Invalid, reason.Malformed, "granting %s:%d: %w", g.Host, g.Port, err)
	}
	if d := now.Connect(g.Host, g.Port); d.Verdict == policy.Allow {
		return refuse(Conflict, reason.OK, "granting %s:%d: it is allowed already", g.Host, g.Port)
	}
	spec.Allow = append(spec.Allow, g.rule())
	then, err := policy.Compile(spec.At(boot))
	if err != nil {
		return refuse(Invalid, reason.Malformed, "granting %s:%d: %w", g.Host, g.Port, err)
	}
	if d := then.Connect(g.Host, g.Port); d.Verdict != policy.Allow {
		return refuse(Invalid, d.Reason, "granting %s:%d: %s, and a grant never overrides that", g.Host, g.Port, d.Reason.Info().Text)
	}
	return nil
}

// Ungrant takes an exception back and cuts what lived on it. One that is not there is no error.
func (m *Manager) Ungrant(ctx context.Context, name, id, actor, by, why string, sig Signature) error {
	if by == "" || why == "" {
		return refuse(Invalid, reason.Malformed, "taking grant %s back: say who and why with --by and --reason", id)
	}
	m.mu.Lock()
	k := m.kids[name]
	m.mu.Unlock()
	if k == nil {
		return notFound(name)
	}
	k.life.Lock() // also under a tag: taking back is always right
	defer k.life.Unlock()
	g, ok := k.dropGrant(id)
	if !ok {
		return nil
	}
	_, err := m.applyEgress(ctx, k)
	rec := g.record(audit.EventGrantEnded, actor, why)
	rec.Fields["ended_by"], rec.Generation = by, k.rec.Session.Generation
	sig.into(rec.Fields, actor)
	m.log(k, rec)
	return err
}

// Grants lists the exceptions that hold.
func (m *Manager) Grants(name string) ([]wire.Grant, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.kids[name]
	if k == nil {
		return nil, notFound(name)
	}
	out, now := []wire.Grant{}, bootclock.Now()
	for _, g := range k.rec.Grants {
		if g.Until > now {
			out = append(out, g.Grant)
		}
	}
	return out, nil
}

// dropGrant and dropEndedGrants need life held; readers of Grants only hold Manager.mu, so the list is
// replaced and never changed in place.
func (k *kid) dropGrant(id string) (grant, bool) {
	i := slices.IndexFunc(k.rec.Grants, func(g grant) bool { return g.ID == id })
	if i < 0 {
		return grant{}, false
	}
	g := k.rec.Grants[i]
	k.rec.Grants = slices.Concat(k.rec.Grants[:i], k.rec.Grants[i+1:])
	return g, true
}

func (k *kid) dropEndedGrants() (ended []grant) {
	now := bootclock.Now()
	var left []grant
	for _, g := range k.rec.Grants {
		if g.Until <= now {
			ended = append(ended, g)
		} else {
			left = append(left, g)
		}
	}
	if len(ended) > 0 {
		k.rec.Grants = left
	}
	return ended
}
