package policy

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"tagout/internal/reason"
)

// Policy is a compiled Spec. It never changes, so any number of goroutines may ask it. A nil Policy denies
// everything with reason policy-not-loaded.
type Policy struct {
	exact    map[string]*host   // by canonical name
	wildcard map[string]*host   // by the suffix behind "*."
	denied   map[string]portSet // exact names
	suffixes map[string]portSet // deny wildcards, by the suffix behind "*."
	ranges   []denyRange
	ports    []uint16
	names    []string
}

// host is what the allow rules say of one name or of one wildcard.
type host struct {
	ports  map[uint16]*Rule
	order  []uint16 // the keys of ports, in the order of the rules
	lookup Decision // exact hosts only: the answer, settled once
}

// portSet is the ports that deny rules close. The line is for explanations.
type portSet struct {
	all   bool
	ports map[uint16]bool
	line  int
}

func (s portSet) has(port uint16) bool { return s.all || s.ports[port] }

func (s portSet) with(r DenyRule) portSet {
	if s.line == 0 {
		s.line = r.Line
	}
	if len(r.Ports) == 0 {
		s.all = true
		return s
	}
	if s.ports == nil {
		s.ports = map[uint16]bool{}
	}
	for _, p := range r.Ports {
		s.ports[p] = true
	}
	return s
}

type denyRange struct {
	prefix netip.Prefix
	ports  portSet
}

// Compile checks spec and makes a Policy of it. It keeps nothing of spec. Each pair of host and port belongs
// to one rule at most; an exact host goes before a wildcard. Any rule that could be read in two ways is an
// error: a policy that cannot be compiled must not be enforced in part.
func Compile(spec Spec) (*Policy, error) {
	p := &Policy{
		exact: map[string]*host{}, wildcard: map[string]*host{},
		denied: map[string]portSet{}, suffixes: map[string]portSet{},
	}
	for i := range spec.Allow {
		if err := p.addAllow(spec.Allow[i]); err != nil {
			return nil, fmt.Errorf("compiling allow rule %d (%s): %w", i+1, cut(spec.Allow[i].Host, 80), err)
		}
	}
	for i := range spec.Deny {
		if err := p.addDeny(spec.Deny[i]); err != nil {
			return nil, fmt.Errorf("compiling deny rule %d (%s): %w", i+1, cut(spec.Deny[i].Host, 80), err)
		}
	}
	for name, h := range p.exact {
		h.lookup = p.lookup(name)
	}
	p.names = slices.Sorted(maps.Keys(p.exact))
	for _, r := range spec.Allow {
		p.ports = append(p.ports, r.Ports...)
	}
	slices.Sort(p.ports)
	p.ports = slices.Compact(p.ports)
	return p, nil
}

func (p *Policy) addAllow(r Rule) error {
	name, wild, err := Pattern(r.Host)
	if err != nil {
		return err
	}
	if wild && !strings.Contains(name, ".") {
		return errors.New("a wildcard needs at least two labels behind it")
	}
	if err := checkRule(r); err != nil {
		return err
	}
	set := p.exact
	r.Host = name
	if wild {
		set, r.Host = p.wildcard, "*."+name
	}
	r.Ports, r.Methods = slices.Clone(r.Ports), slices.Clone(r.Methods)
	r.Paths, r.Addresses = slices.Clone(r.Paths), slices.Clone(r.Addresses)
	h := set[name]
	if h == nil {
		h = &host{ports: map[uint16]*Rule{}}
		set[name] = h
	}
	rule := &r
	for _, port := range r.Ports {
		if h.ports[port] != nil {
			return fmt.Errorf("port %d of this host is in another rule already", port)
		}
		h.ports[port] = rule
		h.order = append(h.order, port)
	}
	return nil
}

// checkRule checks what does not depend on other rules.
func checkRule(r Rule) error {
	if err := checkPorts(r.Ports); err != nil {
		return err
	}
	if len(r.Ports) == 0 {
		return errors.New("no ports")
	}
	switch r.Protocol {
	case TLS, HTTP, TCP:
	default:
		return fmt.Errorf("unknown protocol %q", cut(string(r.Protocol), 20))
	}
	readable := r.Protocol == HTTP || r.Protocol == TLS && r.Inspect
	switch {
	case r.Inspect && r.Protocol != TLS:
		return errors.New("only TLS can be inspected")
	case len(r.Methods)+len(r.Paths) > 0 && !readable:
		return errors.New("methods and paths need HTTP or inspected TLS")
	case r.Credential != "" && !readable:
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
	case r.Address.IsValid():
		prefix, err := unmapPrefix(r.Address)
		if err != nil {
			return err
		}
		p.ranges = append(p.ranges, denyRange{prefix, portSet{}.with(r)})
		return nil
	}
	name, wild, err := Pattern(r.Host)
	if err != nil {
		return err
	}
	set := p.denied
	if wild {
		set = p.suffixes
	}
	set[name] = set[name].with(r)
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

// Pattern returns the canonical name of a rule's host and whether it was a "*." wildcard for it. A star
// anywhere else is an error.
func Pattern(raw string) (name string, wild bool, err error) {
	rest, wild := strings.CutPrefix(raw, "*.")
	if strings.Contains(rest, "*") {
		return "", false, nameError(raw, `a star may only stand for the whole first label, as in "*.example.com"`)
	}
	name, err = Name(rest)
	return name, wild, err
}

// Lookup decides whether the session may look rawName up, in whatever form it came off the wire. canonical is
// empty where rawName is no host name. The rule of an allowed lookup is one of those that made it so.
func (p *Policy) Lookup(rawName string) (canonical string, d Decision) {
	if p == nil {
		return "", deny(reason.PolicyNotLoaded, "")
	}
	if h := p.exact[rawName]; h != nil { // keys are canonical: a hit needs no normalising
		return rawName, h.lookup
	}
	name, err := Name(rawName)
	if err != nil {
		return "", denyName(err)
	}
	if h := p.exact[name]; h != nil {
		return name, h.lookup
	}
	return name, p.lookup(name)
}

// lookup allows a canonical name when at least one port of it is open.
func (p *Policy) lookup(name string) Decision {
	var refused Decision
	for _, h := range p.hosts(name) {
		if h == nil {
			continue
		}
		for _, port := range h.order {
			line, closed := p.closed(name, port)
			if !closed {
				return Decision{Verdict: Allow, Rule: h.ports[port], Reason: reason.OK}
			}
			refused = denyRule(name, line)
		}
	}
	if refused.Reason != reason.OK {
		return refused
	}
	if line, closed := p.closed(name, 0); closed {
		return denyRule(name, line)
	}
	return deny(reason.NameNotAllowed, name)
}

// hosts returns what the allow rules say of a canonical name: the exact entry, then the wildcard's.
func (p *Policy) hosts(name string) [2]*host {
	found := [2]*host{p.exact[name], nil}
	if i := strings.IndexByte(name, '.'); i > 0 {
		found[1] = p.wildcard[name[i+1:]]
	}
	return found
}

// closed says whether a deny rule closes the port of a canonical name. Port 0 asks for rules on all ports.
func (p *Policy) closed(name string, port uint16) (line int, closed bool) {
	if set, ok := p.denied[name]; ok && set.has(port) {
		return set.line, true
	}
	if len(p.suffixes) == 0 {
		return 0, false
	}
	for rest := name; ; {
		i := strings.IndexByte(rest, '.')
		if i < 0 {
			return 0, false
		}
		rest = rest[i+1:]
		if set, ok := p.suffixes[rest]; ok && set.has(port) {
			return set.line, true
		}
	}
}

// Connect decides whether the session may connect to port of name (in any spelling). The rule of an allowed
// connection says what may be spoken on it.
func (p *Policy) Connect(name string, port uint16) Decision {
	if p == nil {
		return deny(reason.PolicyNotLoaded, "")
	}
	if p.exact[name] == nil {
		canonical, err := Name(name)
		if err != nil {
			return denyName(err)
		}
		name = canonical
	}
	if line, closed := p.closed(name, port); closed {
		return denyRule(name, line)
	}
	known := false
	for _, h := range p.hosts(name) {
		if h == nil {
			continue
		}
		known = true
		if rule := h.ports[port]; rule != nil {
			return Decision{Verdict: Allow, Rule: rule, Reason: reason.OK}
		}
	}
	if known {
		return deny(reason.PortNotAllowed, fmt.Sprintf("%s port %d", name, port))
	}
	return deny(reason.NameNotAllowed, name)
}

// ExactHosts returns the canonical names that allow rules name exactly, sorted, each once. The caller owns
// the slice.
func (p *Policy) ExactHosts() []string {
	if p == nil {
		return nil
	}
	return slices.Clone(p.names)
}

// Ports returns the ports of all allow rules, sorted, each once. The caller owns the slice.
func (p *Policy) Ports() []uint16 {
	if p == nil {
		return nil
	}
	return slices.Clone(p.ports)
}

func deny(code reason.Code, detail string) Decision {
	return Decision{Verdict: Deny, Reason: code, Detail: detail}
}

func denyRule(what string, line int) Decision {
	if line == 0 {
		return deny(reason.DenyRule, what)
	}
	return deny(reason.DenyRule, fmt.Sprintf("%s: deny rule in line %d", what, line))
}

func denyName(err error) Decision {
	var ne *NameError
	if errors.As(err, &ne) {
		return deny(ne.Reason, ne.Error())
	}
	return deny(reason.NameInvalid, err.Error())
}
