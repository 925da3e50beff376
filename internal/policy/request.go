package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"tagout/internal/reason"
)

// Request decides about one HTTP request on a connection that rule allowed. host is the request's own word
// (Host, :authority or the host of an absolute URI), with or without a port; rawPath is the request target in
// origin form as it came ("*" for OPTIONS *), with or without a query. The caller compares host with the name
// of the connection; Request only makes sure that the rule names it. A rule without paths lets any
// well-formed path pass, one with paths only what Path can read in one way.
func (p *Policy) Request(rule *Rule, host, method, rawPath string) Decision {
	if p == nil || rule == nil {
		return deny(reason.PolicyNotLoaded, "")
	}
	switch {
	case rule.Protocol == TLS && !rule.Inspect:
		return denyBy(rule, reason.NotTLS, "the rule does not inspect; use CONNECT or TLS")
	case rule.Protocol == TCP:
		return denyBy(rule, reason.NotHTTP, "the rule says plain TCP; use CONNECT")
	}
	name, port, err := Authority(host)
	if err != nil {
		d := denyName(err)
		d.Rule = rule
		return d
	}
	if !covers(rule.Host, name) || port != 0 && !slices.Contains(rule.Ports, port) {
		return denyBy(rule, reason.HostMismatch, fmt.Sprintf("the request says %s, the rule %s", cut(host, 80), rule.Host))
	}
	if line, closed := p.closed(name, port); closed {
		return denyRule(name, line)
	}
	if forbiddenMethod(method) || !isToken(method) || len(rule.Methods) > 0 && !slices.Contains(rule.Methods, method) {
		return denyBy(rule, reason.MethodDenied, cut(method, 40))
	}
	if err := checkPath(rule, method, rawPath); err != nil {
		code := reason.PathDenied
		var pe *pathError
		if errors.As(err, &pe) {
			code = pe.code
		}
		return denyBy(rule, code, err.Error())
	}
	return Decision{Verdict: Allow, Rule: rule, Reason: reason.OK}
}

func checkPath(rule *Rule, method, rawPath string) error {
	if len(rule.Paths) == 0 {
		if rawPath == "*" && method == "OPTIONS" {
			return nil
		}
		return wellFormed(rawPath)
	}
	path, err := Path(rawPath)
	if err != nil {
		return err
	}
	for _, glob := range rule.Paths {
		if matchGlob(glob, path) {
			return nil
		}
	}
	return &pathError{reason.PathDenied, cut(path, 200)}
}

// wellFormed is all that is asked of a path where any path may pass: nothing that would end the request line
// or name another resource to the next hop.
func wellFormed(rawPath string) error {
	if !strings.HasPrefix(rawPath, "/") {
		return ambiguous("the path does not begin with a slash")
	}
	for i := range len(rawPath) {
		if c := rawPath[i]; c <= 0x20 || c == 0x7f || c == '#' {
			return ambiguous("the path has a control byte, a blank or a fragment")
		}
	}
	return nil
}

// isToken is RFC 9110's token, of a sane length.
func isToken(s string) bool {
	if s == "" || len(s) > 32 {
		return false
	}
	for i := range len(s) {
		c := s[i]
		alnum := 'a' <= c|0x20 && c|0x20 <= 'z' || '0' <= c && c <= '9'
		if !alnum && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return true
}

// covers says whether a rule's host, exact or with "*." in front, stands for a canonical name.
func covers(pattern, name string) bool {
	suffix, wild := strings.CutPrefix(pattern, "*.")
	if !wild {
		return pattern == name
	}
	_, rest, found := strings.Cut(name, ".")
	return found && rest == suffix
}

func denyBy(rule *Rule, code reason.Code, detail string) Decision {
	return Decision{Verdict: Deny, Rule: rule, Reason: code, Detail: detail}
}

// Upstream decides whether a connection that rule allowed may go to addr, which the rule's host resolved to.
// A deny rule's range wins over everything; then addresses that are not public need a grant in
// rule.Addresses; metadata, link-local, multicast, unspecified, reserved and Tagout's own addresses take none
// (invariant 2). Mapped, NAT64, 6to4, Teredo and ISATAP addresses are judged by what is inside as well.
// 203.0.113.0/24 counts as public (see blocks).
func (p *Policy) Upstream(rule *Rule, addr netip.Addr, port uint16) Decision {
	if p == nil || rule == nil {
		return deny(reason.PolicyNotLoaded, "")
	}
	if !addr.IsValid() {
		return denyBy(rule, reason.PrivateAnswer, "no address")
	}
	if !slices.Contains(rule.Ports, port) {
		return denyBy(rule, reason.PortNotAllowed, fmt.Sprintf("%s port %d", rule.Host, port))
	}
	plain, inner := addr.Unmap().WithZone(""), effective(addr)
	for _, r := range p.ranges {
		if r.ports.has(port) && (r.prefix.Contains(plain) || r.prefix.Contains(inner)) {
			return denyRule(plain.String(), r.ports.line)
		}
	}
	class, what := classify(addr)
	switch class {
	case public:
		return Decision{Verdict: Allow, Rule: rule, Reason: reason.OK}
	case grantable:
		for _, grant := range rule.Addresses {
			if grant.Contains(plain) && addr.Zone() == "" {
				return Decision{Verdict: Allow, Rule: rule, Reason: reason.OK, Detail: plain.String() + " by grant"}
			}
		}
	}
	return denyBy(rule, reason.PrivateAnswer, fmt.Sprintf("%s resolves to %s (%s)", rule.Host, plain, what))
}
