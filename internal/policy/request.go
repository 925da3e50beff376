package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"tagout/internal/reason"
)

// Request decides about one HTTP request to port of a host. host is the request's own word (Host, :authority
// or the host of an absolute URI), with or without a port; rawPath is the request target in origin form as it
// came ("*" for OPTIONS *), with or without a query. The caller compares host with the name of the connection.
// Of the rules for the host and port the first one that takes the request decides; a refusal carries the one
// that came closest. A rule without paths lets any well-formed path pass, one with paths only what Path can
// read in one way, or what one of them spells out.
func (p *Policy) Request(host string, port uint16, method, rawPath string) Decision {
	if p == nil {
		return deny(reason.PolicyNotLoaded, "")
	}
	name, said, err := Authority(host)
	if err != nil {
		return denyName(err)
	}
	if said != 0 && said != port {
		return deny(reason.HostMismatch, fmt.Sprintf("the request says %s, the connection port %d", cut(host, 80), port))
	}
	rules, d := p.connect(name, port)
	if d.Verdict != Allow {
		return d
	}
	var nearest Decision
	for _, rule := range rules {
		d := rule.request(method, rawPath)
		if d.Verdict == Allow {
			return d
		}
		if nearest.Rule == nil || nearest.Reason == reason.MethodDenied && d.Reason != reason.MethodDenied {
			nearest = d
		}
	}
	return nearest
}

// request holds one request against one rule.
func (r *Rule) request(method, rawPath string) Decision {
	switch {
	case r.Protocol == TLS && !r.Inspect:
		return denyBy(r, reason.NotTLS, "the rule does not inspect; use CONNECT or TLS")
	case r.Protocol == TCP:
		return denyBy(r, reason.NotHTTP, "the rule says plain TCP; use CONNECT")
	case forbiddenMethod(method) || !isToken(method) || len(r.Methods) > 0 && !slices.Contains(r.Methods, method):
		return denyBy(r, reason.MethodDenied, cut(method, 40))
	}
	if err := checkPath(r, method, rawPath); err != nil {
		code := reason.PathDenied
		var pe *pathError
		if errors.As(err, &pe) {
			code = pe.code
		}
		return denyBy(r, code, err.Error())
	}
	return Decision{Verdict: Allow, Rule: r, Reason: reason.OK}
}

func checkPath(rule *Rule, method, rawPath string) error {
	if len(rule.Paths) == 0 {
		if rawPath == "*" && method == "OPTIONS" {
			return nil
		}
		return wellFormed(rawPath)
	}
	path, err := canonical(rawPath)
	if err != nil {
		return err
	}
	if matchAny(rule.Paths, path) {
		return nil
	}
	if strings.Contains(path, slashMark) {
		return errEncodedSlash
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
		return denyBy(rule, reason.PortNotAllowed, hostPort(rule.Host, port))
	}
	plain, inner := addr.Unmap().WithZone(""), effective(addr)
	for _, r := range p.ranges {
		if line, closed := r.ports.has(port); closed && (r.prefix.Contains(plain) || r.prefix.Contains(inner)) {
			return denyRule(plain.String(), line)
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
