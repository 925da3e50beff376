package card

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/publicsuffix"

	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/yamlx"
)

// endpoint is a host pattern and a port.
type endpoint struct {
	host string
	port uint16
}

// egressReader keeps what rules must be compared with.
type egressReader struct {
	now      time.Time
	scope    []session.Secret
	rules    []policy.Rule // the allow rules so far
	expiries []Expiry      // theirs
	denied   map[endpoint]bool
}

func (c *Card) readEgress(v yamlx.Value, now time.Time) {
	m, _ := v.Map(egressKeys...)
	r := egressReader{now: now, scope: c.Identity.carried(), denied: map[endpoint]bool{}}
	for _, entry := range m.Get("allow").List() {
		if rm, ok := entry.Map(allowKeys...); ok {
			r.allow(rm)
		}
	}
	c.Egress.Allow, c.Expiries = r.rules, r.expiries
	for _, entry := range m.Get("deny").List() {
		if rm, ok := entry.Map(denyKeys...); ok {
			c.Egress.Deny = append(c.Egress.Deny, r.deny(rm))
		}
	}
}

// allow reads an allow rule and keeps it with its expiry.
func (r *egressReader) allow(m yamlx.Map) {
	rule := policy.Rule{Line: m.Line()}
	rule.Host = readAllowHost(m.Need("host"))
	ports := readPorts(m.Need("ports"))
	for _, p := range ports {
		if p.port == 53 || p.port == 853 {
			p.Refuse("remove it", "port %d is for name servers, and only the box's own one is reachable", p.port)
		}
		rule.Ports = append(rule.Ports, p.port)
	}
	rule.Protocol = readProtocol(m.Need("protocol"))
	rule.Inspect, _ = m.Get("inspect").Bool()
	if rule.Inspect && rule.Protocol != "" && rule.Protocol != policy.TLS {
		m.Get("inspect").Refuse("remove it, or write `protocol: tls`", "only TLS can be inspected")
	}
	r.readRequestLimits(m, &rule)
	rule.Addresses = readGrants(m.Get("addresses"))
	rule.MaxUp, rule.MaxDown = readMaxBytes(m.Get("max_bytes"))
	rule.Rate = readRate(m.Get("rate"))
	expiry := readExpiry(m.Get("expires"), r.now)
	if expiry != (Expiry{}) {
		rule.Expires = unconverted
	}
	r.compare(rule, expiry, ports)
	r.rules, r.expiries = append(r.rules, rule), append(r.expiries, expiry)
}

// compare reports the ports for which the rule cannot stand beside an earlier one.
func (r *egressReader) compare(rule policy.Rule, expiry Expiry, ports []portAt) {
	if rule.Host == "" || rule.Protocol == "" {
		return
	}
	for _, p := range ports {
		for i, earlier := range r.rules {
			if earlier.Host != rule.Host || earlier.Protocol == "" || !slices.Contains(earlier.Ports, p.port) {
				continue
			}
			// To Conflict an expiry only matters where it leaves something to the later rule.
			earlier.Expires, rule.Expires = 0, 0
			if e := r.expiries[i]; e != (Expiry{}) && e != expiry {
				earlier.Expires = unconverted
			}
			if err := policy.Conflict(earlier, rule); err != nil {
				p.Refuse("remove it, or put both into one rule", "%s port %d has a rule already, in line %d: %v", rule.Host, p.port, earlier.Line, err)
				break
			}
		}
	}
}

// readAllowHost returns the canonical host of an allow rule, "" where it was refused.
func readAllowHost(v yamlx.Value) string {
	raw, ok := v.Text()
	if !ok {
		return ""
	}
	name, span, ok := readPattern(v, raw)
	switch {
	case !ok:
		return ""
	case span != policy.ExactHost && isPublicSuffix(name):
		v.Refuse(`write a name that one owner holds, such as "`+span.String()+`example.com"`, "%s would allow everybody's names under %s", yamlx.Quote(raw), name)
		return ""
	}
	pattern := span.String() + name
	if suffix := policy.SharedUnder(pattern); suffix != "" {
		v.Refuse("name the hosts one by one, without stars", "%s would allow everybody's names: anybody can have one under %s", yamlx.Quote(raw), suffix)
		return ""
	}
	switch bad := policy.MetadataUnder(pattern); {
	case bad == pattern:
		v.Refuse("remove the rule", "%s hands out the machine's credentials and can never be allowed", name)
		return ""
	case bad != "":
		v.Refuse("name the hosts one by one", "%s would allow %s, which hands out the machine's credentials", yamlx.Quote(raw), bad)
		return ""
	}
	return pattern
}

// readPattern reads a host that may begin with "*." or "**.".
func readPattern(v yamlx.Value, raw string) (name string, span policy.Span, ok bool) {
	switch {
	case strings.TrimSpace(raw) == "":
		v.Refuse("write a host name, such as `api.example.com`", "the host is empty")
		return "", 0, false
	case strings.Trim(raw, "*.") == "" && strings.Contains(raw, "*"):
		v.Refuse("name the hosts, one rule each", "%s would match every host", yamlx.Quote(raw))
		return "", 0, false
	}
	name, span, err := policy.Pattern(raw)
	if err == nil {
		return name, span, true
	}
	if prefix, isAddr := readPrefix(raw); isAddr {
		what, fix := "an address, not a name", "write the host's name instead"
		switch err := policy.CheckGrant(prefix); {
		case err == nil:
			fix += ", and the address under its `addresses`"
		case !errors.Is(err, policy.ErrNotPrivate):
			what, fix = "an address that can never be allowed: "+err.Error(), "remove the rule"
		}
		v.Refuse(fix, "%s is %s", yamlx.Quote(raw), what)
		return "", 0, false
	}
	var ne *policy.NameError
	problem := err.Error()
	if errors.As(err, &ne) {
		problem = ne.Problem
	}
	v.Refuse("write a host name, such as `api.example.com` or `\"*.example.com\"`, without scheme, port and path",
		"%s cannot be a host: %s", yamlx.Quote(raw), problem)
	return "", 0, false
}

// isPublicSuffix says whether anybody can register names under name. Single labels always count: a top-level
// domain that no list knows belongs to no one.
func isPublicSuffix(name string) bool {
	if !strings.Contains(name, ".") {
		return true
	}
	suffix, _ := publicsuffix.PublicSuffix(name)
	return suffix == name
}

// portAt is a port with the value that it was read from.
type portAt struct {
	yamlx.Value
	port uint16
}

func readPorts(v yamlx.Value) []portAt {
	entries := v.List()
	if v.IsList() && len(entries) == 0 {
		v.Refuse("write the ports, such as `ports: [443]`", "the list of ports is empty")
	}
	var out []portAt
	for _, entry := range entries {
		n, ok := entry.Int()
		switch {
		case !ok:
		case n < 1 || n > 65535:
			entry.Refuse("write a port from 1 to 65535", "%d is not a port", n)
		case slices.ContainsFunc(out, func(p portAt) bool { return int64(p.port) == n }):
			entry.Refuse("remove it", "port %d is in this list already", n)
		default:
			out = append(out, portAt{entry, uint16(n)})
		}
	}
	return out
}

func readProtocol(v yamlx.Value) policy.Protocol {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	switch p := policy.Protocol(s); p {
	case policy.TLS, policy.HTTP, policy.TCP:
		return p
	}
	fix := "write tls, http or tcp instead"
	if strings.EqualFold(s, "https") || strings.EqualFold(s, "ssl") {
		fix = "write `protocol: tls` instead"
	}
	v.Refuse(fix, "unknown protocol %s", yamlx.Quote(s))
	return ""
}

// readRequestLimits reads what only makes sense where requests can be read: credential, methods, paths.
func (r *egressReader) readRequestLimits(m yamlx.Map, rule *policy.Rule) {
	readable := rule.Protocol == policy.HTTP || rule.Protocol == policy.TLS && rule.Inspect || rule.Protocol == ""
	for _, key := range []string{"credential", "methods", "paths"} {
		if v := m.Get(key); v.Present() && !readable {
			fix := "remove it, or add `inspect: true`"
			if rule.Protocol == policy.TCP {
				fix = "remove it, or write `protocol: http`, or tls with `inspect: true`"
			}
			v.Refuse(fix, "%s needs requests that can be read: http or inspected tls", key)
		}
	}
	if secret, ok := m.Get("credential").Text(); ok {
		rule.Credential = secret
		if !slices.ContainsFunc(r.scope, func(s session.Secret) bool { return s.Name == secret }) {
			m.Get("credential").Refuse("add it to identity.scope or identity.mint, or remove it here", "the secret %s is not in identity.scope", yamlx.Quote(secret))
		}
	}
	rule.Methods = readUnique(m.Get("methods"), policy.CheckMethod, "write methods such as GET or POST, in capital letters")
	rule.Paths = readUnique(m.Get("paths"), policy.CheckPathGlob, "write a decoded path such as `/v1/*`, a star at the end for everything below")
}

// readUnique reads a list of texts that pass check, each once. An empty list is refused: leaving the key out
// means "any", and an empty list reads like "none".
func readUnique(v yamlx.Value, check func(string) error, fix string) []string {
	var out []string
	texts := v.Texts()
	if v.IsList() && len(texts) == 0 {
		v.Refuse("write at least one, or remove the key to allow any", "the list is empty")
	}
	for _, at := range texts {
		if err := check(at.Text); err != nil {
			at.Refuse(fix, "%v", err)
			continue
		}
		if slices.Contains(out, at.Text) {
			at.Refuse("remove it", "%s is in this list already", yamlx.Quote(at.Text))
			continue
		}
		out = append(out, at.Text)
	}
	return out
}

// readGrants reads the private addresses that a host may resolve to.
func readGrants(v yamlx.Value) []netip.Prefix {
	var out []netip.Prefix
	for _, at := range v.Texts() {
		prefix, ok := readPrefix(at.Text)
		if !ok {
			at.Refuse("write an address or a range, such as `10.0.0.5` or `10.0.0.0/24`", "%s is not an address", yamlx.Quote(at.Text))
			continue
		}
		if err := policy.CheckGrant(prefix); err != nil {
			at.Refuse("write a private address or a smaller private range, or remove it", "%s cannot be granted: %v", at.Text, err)
			continue
		}
		if slices.Contains(out, prefix) {
			at.Refuse("remove it", "%s is in this list already", prefix)
			continue
		}
		out = append(out, prefix)
	}
	return out
}

// readPrefix reads an address or a range, as it is written.
func readPrefix(s string) (netip.Prefix, bool) {
	if a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")); err == nil && a.Zone() == "" {
		return netip.PrefixFrom(a, a.BitLen()), true
	}
	p, err := netip.ParsePrefix(s)
	return p, err == nil
}

func (r *egressReader) deny(m yamlx.Map) policy.DenyRule {
	rule := policy.DenyRule{Line: m.Line()}
	host, address := m.Get("host"), m.Get("address")
	switch {
	case host.Present() && address.Present():
		address.Refuse("write two rules", "a deny rule has either a host or an address")
	case !m.Has("host") && !m.Has("address"):
		m.Refuse("write `host:` or `address:`", "the deny rule says neither which host nor which address")
	}
	if raw, ok := host.Text(); ok {
		if name, span, ok := readPattern(host, raw); ok {
			rule.Host = span.String() + name
		}
	}
	if raw, ok := address.Text(); ok {
		prefix, isAddr := readPrefix(raw)
		switch {
		case !isAddr || prefix.Addr().Is4In6():
			address.Refuse("write an address or a range, such as `10.0.0.0/8`", "%s is not an address", yamlx.Quote(raw))
		case prefix != prefix.Masked():
			address.Refuse("write `"+prefix.Masked().String()+"` instead", "%s has bits behind its length", raw)
		default:
			rule.Address = prefix
		}
	}
	ports := readPorts(m.Get("ports"))
	for _, p := range ports {
		rule.Ports = append(rule.Ports, p.port)
	}
	r.checkDenied(m, rule, ports)
	return rule
}

// checkDenied reports deny rules that repeat another one or take back all that an allow rule gives: a reader
// could not tell which of the two was meant.
func (r *egressReader) checkDenied(m yamlx.Map, rule policy.DenyRule, ports []portAt) {
	what := rule.Host
	if rule.Address.IsValid() {
		what = rule.Address.String()
	}
	if what == "" {
		return
	}
	at := func(port uint16, fix, format string, args ...any) {
		for _, p := range ports {
			if p.port == port {
				p.Refuse(fix, format, args...)
				return
			}
		}
		m.Refuse(fix, format, args...)
	}
	closed := rule.Ports
	if len(ports) == 0 && !m.Has("ports") {
		closed = []uint16{0} // all of them
	}
	for _, port := range closed {
		if e := (endpoint{what, port}); r.denied[e] {
			at(port, "remove it", "%s is denied already", describe(e))
		} else {
			r.denied[e] = true
		}
	}
	r.checkDead(rule, closed, at)
}

// checkDead reports what a deny rule takes back in full: an allowed port of an allow rule, or an address that
// one grants. A deny rule inside a broader allow rule is what deny rules are for.
func (r *egressReader) checkDead(rule policy.DenyRule, closed []uint16, at func(port uint16, fix, format string, args ...any)) {
	closes := func(port uint16) bool { return slices.Contains(closed, 0) || slices.Contains(closed, port) }
	told := map[endpoint]bool{}
	for _, allowed := range r.rules {
		switch {
		case rule.Address.IsValid():
			for _, granted := range allowed.Addresses {
				if rule.Address.Bits() <= granted.Bits() && rule.Address.Contains(granted.Addr()) && !slices.ContainsFunc(allowed.Ports, func(p uint16) bool { return !closes(p) }) {
					at(0, "keep one of the two", "%s is denied here and granted to %s in line %d", rule.Address, allowed.Host, allowed.Line)
				}
			}
		case allowed.Host != "" && policy.Covers(rule.Host, allowed.Host):
			for _, port := range allowed.Ports {
				if e := (endpoint{allowed.Host, port}); closes(port) && !told[e] {
					told[e] = true
					at(port, "keep one of the two", "%s is denied here%s and allowed in line %d", describe(e), byPattern(rule.Host, allowed.Host), allowed.Line)
				}
			}
		}
	}
}

func byPattern(pattern, host string) string {
	if pattern == host {
		return ""
	}
	return " by " + pattern
}

func describe(e endpoint) string {
	if e.port == 0 {
		return e.host
	}
	return fmt.Sprintf("%s port %d", e.host, e.port)
}
