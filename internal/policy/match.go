package policy

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"tagout/internal/reason"
)

// Policy is a compiled Spec. It never changes, so any number of goroutines may ask it. A nil Policy denies
// everything with reason policy-not-loaded.
type Policy struct {
	allow  [spans]map[string]*host  // by the pattern's span and the name behind its stars
	deny   [spans]map[string]closed // likewise
	canary []string                 // patterns of hosts, among those that deny closes
	ranges []denyRange
	lapsed []Rule // canonical; they open nothing, but a refusal says that they once did
	ports  []uint16
	names  []string
}

// host is what the allow rules say of one pattern.
type host struct {
	ports  map[uint16][]*Rule // never an empty list; the first rule that takes a request decides
	order  []uint16           // the keys of ports, in the order of the rules
	lookup Decision           // exact hosts only: the answer, settled once
}

// closed is the ports that deny rules close, each with the line of the first such rule.
type closed struct {
	isAll bool
	all   int // its line
	ports map[uint16]int
}

// has says whether port is closed. Port 0 asks for rules on all ports.
func (c closed) has(port uint16) (line int, ok bool) {
	if c.isAll {
		return c.all, true
	}
	line, ok = c.ports[port]
	return line, ok
}

func (c closed) with(r DenyRule) closed {
	if len(r.Ports) == 0 {
		if !c.isAll {
			c.isAll, c.all = true, r.Line
		}
		return c
	}
	if c.ports == nil {
		c.ports = map[uint16]int{}
	}
	for _, p := range r.Ports {
		if _, ok := c.ports[p]; !ok {
			c.ports[p] = r.Line
		}
	}
	return c
}

type denyRange struct {
	prefix netip.Prefix
	ports  closed
}

// Lookup decides whether the session may look rawName up, in whatever form it came off the wire. canonical is
// empty where rawName is no host name. The rule of an allowed lookup is one of those that made it so.
func (p *Policy) Lookup(rawName string) (canonical string, d Decision) {
	if p == nil {
		return "", deny(reason.PolicyNotLoaded, "")
	}
	if h := p.allow[ExactHost][rawName]; h != nil { // keys are canonical: a hit needs no normalising
		return rawName, h.lookup
	}
	name, err := Name(rawName)
	if err != nil {
		return "", denyName(err)
	}
	if h := p.allow[ExactHost][name]; h != nil {
		return name, h.lookup
	}
	return name, p.lookup(name)
}

// lookup allows a canonical name when at least one port of it is open.
func (p *Policy) lookup(name string) Decision {
	var refused Decision
	for h := range p.matching(name) {
		for _, port := range h.order {
			line, closed := p.closed(name, port)
			if !closed {
				return Decision{Verdict: Allow, Rule: h.ports[port][0], Reason: reason.OK}
			}
			refused = p.denyHost(name, line)
		}
	}
	if refused.Reason != reason.OK {
		return refused
	}
	if line, closed := p.closed(name, 0); closed {
		return p.denyHost(name, line)
	}
	if rule := p.lapsedRule(name, 0); rule != nil {
		return denyBy(rule, reason.Expired, name)
	}
	return p.denyUnnamed(name)
}

// denyUnnamed is the refusal of a canonical name for which no allow rule stands.
func (p *Policy) denyUnnamed(name string) Decision {
	if suffix, pattern := p.outOfReach(name); suffix != "" {
		return deny(reason.PublicSuffix, fmt.Sprintf("%s is under the public suffix %s, and %s does not reach below one", name, suffix, pattern))
	}
	return deny(reason.NameNotAllowed, name)
}

// matching returns what the allow rules say of a canonical name, the most exact pattern first: the name
// itself, then "*.", then "**." with the longest name behind it. A pattern says nothing of names that lie
// under a public suffix below its base.
func (p *Policy) matching(name string) iter.Seq[*host] {
	return func(yield func(*host) bool) {
		if h := p.allow[ExactHost][name]; h != nil && !yield(h) {
			return
		}
		for span, base := range bases(name) {
			if h := p.allow[span][base]; h != nil && publicBelow(name, base) == "" && !yield(h) {
				return
			}
		}
	}
}

// closed says whether a deny rule closes the port of a canonical name. Port 0 asks for rules on all ports.
func (p *Policy) closed(name string, port uint16) (line int, is bool) {
	if c, ok := p.deny[ExactHost][name]; ok {
		if line, is = c.has(port); is {
			return line, true
		}
	}
	_, parent, _ := strings.Cut(name, ".")
	if c, ok := p.deny[OneLabel][parent]; ok {
		if line, is = c.has(port); is {
			return line, true
		}
	}
	for ; parent != "" && len(p.deny[AnyLabels]) > 0; _, parent, _ = strings.Cut(parent, ".") {
		if c, ok := p.deny[AnyLabels][parent]; ok {
			if line, is = c.has(port); is {
				return line, true
			}
		}
	}
	return 0, false
}

// denyHost is the refusal of a canonical name that a deny rule closes.
func (p *Policy) denyHost(name string, line int) Decision {
	if slices.ContainsFunc(p.canary, func(pattern string) bool { return Covers(pattern, name) }) {
		return deny(reason.Canary, name)
	}
	return denyRule(name, line)
}

// lapsedRule returns a rule that would open the port of a canonical name if it had not run out, nil where
// there is none. Port 0 stands for any.
func (p *Policy) lapsedRule(name string, port uint16) *Rule {
	for i := range p.lapsed {
		r := &p.lapsed[i]
		if stands(r.Host, name) && (port == 0 || slices.Contains(r.Ports, port)) {
			return r
		}
	}
	return nil
}

// Connect decides whether the session may connect to port of name (in any spelling). The rule of an allowed
// connection says what may be spoken on it. Where several rules share the host and the port, it is the first
// of them, and Request says which one takes a request; they agree in protocol, inspection and addresses.
func (p *Policy) Connect(name string, port uint16) Decision {
	rules, d := p.connect(name, port)
	if d.Verdict == Allow {
		d.Rule = rules[0]
	}
	return d
}

// connect returns the rules of an allowed connection, never an empty list with Allow.
func (p *Policy) connect(name string, port uint16) ([]*Rule, Decision) {
	if p == nil {
		return nil, deny(reason.PolicyNotLoaded, "")
	}
	if p.allow[ExactHost][name] == nil {
		canonical, err := Name(name)
		if err != nil {
			return nil, denyName(err)
		}
		name = canonical
	}
	if line, closed := p.closed(name, port); closed {
		return nil, p.denyHost(name, line)
	}
	known := false
	for h := range p.matching(name) {
		known = true
		if rules := h.ports[port]; rules != nil {
			return rules, Decision{Verdict: Allow, Reason: reason.OK}
		}
	}
	if rule := p.lapsedRule(name, port); rule != nil && port != 0 {
		return nil, denyBy(rule, reason.Expired, hostPort(name, port))
	}
	if known {
		return nil, deny(reason.PortNotAllowed, hostPort(name, port))
	}
	return nil, p.denyUnnamed(name)
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
