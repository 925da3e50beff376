package proxy

import (
	"context"
	"errors"
	"net/netip"

	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// destination finds out where a transparent connection was going.
func (p *Proxy) destination(c *conn) (target, *refusal) {
	orig, err := p.cfg.OriginalDst(c.client)
	if err != nil {
		return target{}, &refusal{code: reason.HostAddress, detail: err.Error()}
	}
	orig = netip.AddrPortFrom(orig.Addr().Unmap(), orig.Port())
	c.mu.Lock()
	c.orig = orig
	c.mu.Unlock()
	switch {
	case orig.Addr() == p.cfg.Gateway:
		return target{}, &refusal{code: reason.HostAddress, detail: "the proxy's own port " + orig.String()}
	case policy.IsMetadata(orig.Addr()):
		return target{}, &refusal{code: reason.Metadata, detail: orig.String()}
	case !p.cfg.Virtual.Contains(orig.Addr()):
		return target{}, &refusal{code: reason.RawAddress, detail: orig.String()}
	}
	r := c.sess.current()
	if r == nil {
		return target{}, &refusal{code: reason.PolicyNotLoaded}
	}
	name, why := p.nameOf(c.ctx, r, c.sess.doc.Mark, orig.Addr())
	if name == "" {
		return target{}, &refusal{code: reason.VirtualUnknown, detail: orig.String() + why}
	}
	return target{name, orig.Port()}, nil
}

// nameOf returns the name for which a virtual address stands in a session: the exact names are known from
// the policy; dnsfilter is asked about others, once. A late or failing answer means unknown.
func (p *Proxy) nameOf(ctx context.Context, r *rules, mark uint32, addr netip.Addr) (name, why string) {
	if name, ok := r.exact.Name(addr); ok {
		return name, ""
	}
	if name, ok := r.learned.Load(addr); ok {
		return name.(string), ""
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Limits.Names)
	defer cancel()
	told, err := p.cfg.Names.Name(ctx, mark, addr)
	if err != nil {
		return "", ": " + oneLine(err)
	}
	if canonical, err := policy.Name(told); err != nil || canonical != told {
		return "", ": dnsfilter told a name that is not canonical"
	}
	r.learned.Store(addr, told)
	r.claimed.Store(told, struct{}{})
	return told, ""
}

// claim has dnsfilter count a name that no rule spells out before it is resolved: resolving is how what a kid
// wrote into a name leaves the box, and by way of the explicit proxy dnsfilter has never seen the name. A late
// or failing answer means no.
func (p *Proxy) claim(ctx context.Context, r *rules, mark uint32, name string) *refusal {
	if r == nil {
		return &refusal{code: reason.PolicyNotLoaded}
	}
	if _, exact := r.exact.Addr(name); exact {
		return nil
	}
	if _, known := r.claimed.Load(name); known {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Limits.Names)
	defer cancel()
	err := p.cfg.Names.Claim(ctx, mark, name)
	var refused *control.Error
	switch {
	case errors.As(err, &refused):
		return &refusal{code: refused.Problem.Reason, detail: oneLine(err)}
	case err != nil:
		return &refusal{code: reason.Internal, detail: "counting a wildcard name: " + oneLine(err)}
	}
	r.claimed.Store(name, struct{}{})
	return nil
}
