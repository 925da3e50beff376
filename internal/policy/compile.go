package policy

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Compile checks spec and makes a Policy of it. It keeps nothing of spec. An exact host goes before a
// wildcard. Any rule that could be read in two ways is an error: a policy that cannot be compiled must not be
// enforced in part. Compile knows no clock: whoever enforces the policy compiles spec.At(now).
func Compile(spec Spec) (*Policy, error) {
	p := &Policy{}
	for s := range p.allow {
		p.allow[s], p.deny[s] = map[string]*host{}, map[string]closed{}
	}
	for i, r := range spec.Allow {
		if err := p.addAllow(r); err != nil {
			return nil, fmt.Errorf("compiling allow rule %d (%s): %w", i+1, cut(r.Host, 80), err)
		}
	}
	for i, r := range spec.Deny {
		if err := p.addDeny(r); err != nil {
			return nil, fmt.Errorf("compiling deny rule %d (%s): %w", i+1, cut(r.Host, 80), err)
		}
	}
	for i, r := range spec.Lapsed {
		r, err := checkRule(r)
		if err != nil {
			return nil, fmt.Errorf("compiling lapsed rule %d (%s): %w", i+1, cut(r.Host, 80), err)
		}
		p.lapsed = append(p.lapsed, r)
	}
	for name, h := range p.allow[ExactHost] {
		h.lookup = p.lookup(name)
	}
	p.names = slices.Sorted(maps.Keys(p.allow[ExactHost]))
	for _, r := range spec.Allow {
		p.ports = append(p.ports, r.Ports...)
	}
	slices.Sort(p.ports)
	p.ports = slices.Compact(p.ports)
	return p, nil
}

func (p *Policy) addAllow(r Rule) error {
	r, err := checkRule(r)
	if err != nil {
		return err
	}
	name, span := splitPattern(r.Host)
	h := p.allow[span][name]
	if h == nil {
		h = &host{ports: map[uint16][]*Rule{}}
		p.allow[span][name] = h
	}
	for _, port := range r.Ports {
		for _, earlier := range h.ports[port] {
			if err := Conflict(*earlier, r); err != nil {
				return fmt.Errorf("port %d of this host is in another rule already: %w", port, err)
			}
		}
		if h.ports[port] == nil {
			h.order = append(h.order, port)
		}
		h.ports[port] = append(h.ports[port], &r)
	}
	return nil
}

// checkRule checks what does not depend on other rules and returns the rule in its canonical form, sharing
// nothing with r.
func checkRule(r Rule) (Rule, error) {
	name, span, err := Pattern(r.Host)
	if err != nil {
		return r, err
	}
	if span != ExactHost && !strings.Contains(name, ".") {
		return r, errors.New("a wildcard needs at least two labels behind it")
	}
	r.Host = span.String() + name
	r.Ports, r.Methods = slices.Clone(r.Ports), slices.Clone(r.Methods)
	r.Paths, r.Addresses = slices.Clone(r.Paths), slices.Clone(r.Addresses)
	if len(r.Ports) == 0 {
		return r, errors.New("no ports")
	}
	if err := checkPorts(r.Ports); err != nil {
		return r, err
	}
	switch {
	case r.MaxUp < 0 || r.MaxDown < 0:
		return r, errors.New("a byte limit below zero")
	case r.Rate < 0:
		return r, errors.New("a rate below zero")
	case r.Expires < 0:
		return r, errors.New("an expiry before the machine started")
	}
	return r, checkProtocol(r)
}

// checkProtocol checks what the rule's protocol must be for.
func checkProtocol(r Rule) error {
	switch r.Protocol {
	case TLS, HTTP, TCP:
	default:
		return fmt.Errorf("unknown protocol %q", cut(string(r.Protocol), 20))
	}
	switch {
	case r.Inspect && r.Protocol != TLS:
		return errors.New("only TLS can be inspected")
	case len(r.Methods)+len(r.Paths) > 0 && !r.Readable():
		return errors.New("methods and paths need HTTP or inspected TLS")
	case r.Credential != "" && !r.Readable():
		return errors.New("a credential needs HTTP or inspected TLS")
	}
	for _, m := range r.Methods {
		if err := CheckMethod(m); err != nil {
			return err
		}
	}
	for _, glob := range r.Paths {
		if err := CheckPathGlob(glob); err != nil {
			return err
		}
	}
	for _, a := range r.Addresses {
		if err := CheckGrant(a); err != nil {
			return fmt.Errorf("address %s: %w", a, err)
		}
	}
	return nil
}

// Readable says whether requests under the rule are seen one by one.
func (r *Rule) Readable() bool { return r.Protocol == HTTP || r.Protocol == TLS && r.Inspect }

// Conflict says why later cannot stand beside earlier for one and the same host and port; nil where it can.
// Several rules may share a host and a port when requests can be told apart, so that the first one that takes
// a request decides: they must agree on what is settled before the request is known, and each must have a
// request left to take. A grant may also repeat a rule: it outlives an expiry.
func Conflict(earlier, later Rule) error {
	switch {
	case earlier.Protocol != later.Protocol || earlier.Inspect != later.Inspect:
		return errors.New("rules for one host and port must have the same protocol and inspection")
	case !sameAddresses(earlier.Addresses, later.Addresses):
		return errors.New("rules for one host and port must list the same addresses")
	case earlier.Grant != later.Grant || earlier.Expires != 0 && earlier.Expires != later.Expires:
		return nil
	case !earlier.Readable():
		return errors.New("only rules that see requests, http or inspected tls, can share a host and port")
	case subsumes(&earlier, &later):
		return errors.New("the earlier rule takes every request that this one names")
	}
	return nil
}

func sameAddresses(a, b []netip.Prefix) bool {
	for _, x := range a {
		if !slices.Contains(b, x) {
			return false
		}
	}
	return len(a) == len(b)
}

// subsumes says whether a takes every request that b does. It may miss that two globs come to the same.
func subsumes(a, b *Rule) bool {
	if len(a.Methods) > 0 && (len(b.Methods) == 0 || slices.ContainsFunc(b.Methods, func(m string) bool { return !slices.Contains(a.Methods, m) })) {
		return false
	}
	if len(a.Paths) == 0 {
		return true
	}
	return len(b.Paths) > 0 && !slices.ContainsFunc(b.Paths, func(glob string) bool {
		return !slices.ContainsFunc(a.Paths, func(wide string) bool { return globCovers(wide, glob) })
	})
}

// globCovers says whether everything that narrow matches is matched by wide. It may miss some pairs that are.
func globCovers(wide, narrow string) bool {
	prefix, open := strings.CutSuffix(wide, "*")
	switch {
	case wide == narrow:
		return true
	case !strings.Contains(narrow, "*"):
		return matchGlob(wide, strings.ReplaceAll(narrow, encodedSlash, slashMark))
	}
	rest, ok := strings.CutPrefix(narrow, prefix)
	return ok && open && !strings.Contains(prefix, "*") && !strings.Contains(rest, encodedSlash)
}

func checkPorts(ports []uint16) error {
	for i, port := range ports {
		if port == 0 {
			return errors.New("port 0 is not a port")
		}
		if slices.Contains(ports[:i], port) {
			return fmt.Errorf("port %d is listed twice", port)
		}
	}
	return nil
}

func (p *Policy) addDeny(r DenyRule) error {
	if err := checkPorts(r.Ports); err != nil {
		return err
	}
	switch {
	case (r.Host == "") == !r.Address.IsValid():
		return errors.New("a deny rule has either a host or an address")
	case r.Canary && (r.Host == "" || len(r.Ports) > 0):
		return errors.New("a canary is a host, on all ports")
	case r.Address.IsValid():
		prefix, err := unmapPrefix(r.Address)
		if err != nil {
			return err
		}
		p.ranges = append(p.ranges, denyRange{prefix, closed{}.with(r)})
		return nil
	}
	name, span, err := Pattern(r.Host)
	if err != nil {
		return err
	}
	p.deny[span][name] = p.deny[span][name].with(r)
	if r.Canary {
		p.canary = append(p.canary, span.String()+name)
	}
	return nil
}

// unmapPrefix brings a range that was written in v4-mapped form into the form that addresses are compared in.
func unmapPrefix(prefix netip.Prefix) (netip.Prefix, error) {
	if !prefix.Addr().Is4In6() {
		return prefix.Masked(), nil
	}
	if prefix.Bits() < 96 {
		return netip.Prefix{}, errors.New("a v4-mapped range needs at least 96 bits")
	}
	return netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-96).Masked(), nil
}
