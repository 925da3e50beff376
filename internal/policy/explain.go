package policy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"tagout/internal/reason"
)

// Question is what a policy can be asked about by hand: a connection, or with a Method one HTTP request.
type Question struct {
	Method string // empty: a connection to Host and Port
	Secure bool   // with a Method: https
	Host   string // canonical where it is a name at all
	Port   uint16
	Path   string // with a Method: the request target in origin form, as given

	Kid     string // whom a grant would be for; empty: not said
	Grantor string // see GrantCommand
}

func (q Question) String() string {
	at := q.Host + ":" + strconv.Itoa(int(q.Port))
	if q.Method == "" {
		return at
	}
	scheme, usual := "http://", uint16(80)
	if q.Secure {
		scheme, usual = "https://", 443
	}
	if q.Port == usual {
		at = q.Host
	}
	return q.Method + " " + scheme + at + q.Path
}

// ParseQuestion reads "host:port", or a method and a URL. Whether the host is a name is left to Explain.
func ParseQuestion(words ...string) (Question, error) {
	switch len(words) {
	case 1:
		if strings.Contains(words[0], "://") {
			return Question{}, errors.New("a URL needs a method in front of it: write `GET " + cut(words[0], 80) + "`, or `host:port` to ask about the connection alone")
		}
		q, err := parseHostPort(words[0], 0)
		if err == nil && q.Port == 0 {
			err = fmt.Errorf("%q has no port: write `host:port`, such as `%s:443`", cut(words[0], 80), cut(words[0], 80))
		}
		return q, err
	case 2:
		return parseRequest(words[0], words[1])
	}
	return Question{}, errors.New("write `METHOD URL` or `host:port`")
}

func parseRequest(method, url string) (Question, error) {
	scheme, rest, found := strings.Cut(url, "://")
	secure := strings.EqualFold(scheme, "https")
	if !found || !secure && !strings.EqualFold(scheme, "http") {
		return Question{}, fmt.Errorf("%q is not a URL: write one that begins with http:// or https://", cut(url, 80))
	}
	if !isToken(method) {
		return Question{}, fmt.Errorf("%q is not a method: write one such as GET", cut(method, 40))
	}
	rest, _, _ = strings.Cut(rest, "#") // clients keep it to themselves
	end := strings.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	usual := uint16(80)
	if secure {
		usual = 443
	}
	q, err := parseHostPort(rest[:end], usual)
	q.Method, q.Secure, q.Path = method, secure, rest[end:]
	if !strings.HasPrefix(q.Path, "/") {
		q.Path = "/" + q.Path
	}
	return q, err
}

// parseHostPort takes the port off, usual where there is none, and leaves a host that is no name as it is.
func parseHostPort(raw string, usual uint16) (Question, error) {
	name, port, err := Authority(raw)
	host, told, found := raw, "", false
	if i := strings.LastIndexByte(raw, ':'); i > strings.LastIndexByte(raw, ']') && (strings.Count(raw, ":") == 1 || strings.HasPrefix(raw, "[")) {
		host, told, found = raw[:i], raw[i+1:], true
	}
	if err == nil {
		host = name
	} else if found {
		if port, err = parsePort(told); err != nil {
			return Question{}, fmt.Errorf("%q is not a port: write a number from 1 to 65535", cut(told, 20))
		}
	}
	if host == "" {
		return Question{}, errors.New("the host is empty: write `METHOD URL` or `host:port`")
	}
	if port == 0 {
		port = usual
	}
	return Question{Host: host, Port: port}, nil
}

// Explanation is a decision for people.
type Explanation struct {
	Question string      `json:"question"` // in its canonical spelling
	Allowed  bool        `json:"allowed"`
	Reason   reason.Code `json:"reason"`
	Text     string      `json:"text"` // what the reason means, one plain sentence
	Detail   string      `json:"detail,omitempty"`
	Line     int         `json:"line,omitempty"`   // in the card, of the rule that decided: an allow rule, or for deny-rule a deny rule
	Rule     *Rule       `json:"rule,omitempty"`   // the allow rule that decided or came closest
	Change   []string    `json:"change,omitempty"` // what would have to change, one way each; empty with a refusal: nothing helps
	Notes    []string    `json:"notes,omitempty"`  // what only shows when it happens
}

// Explain says what the policy decides at bootNow (CLOCK_BOOTTIME in ns) and why. It asks the same compiled
// policy as the proxy does. The error says why spec cannot be enforced at all.
func Explain(spec Spec, bootNow int64, q Question) (Explanation, error) {
	spec = spec.At(bootNow)
	p, err := Compile(spec)
	if err != nil {
		return Explanation{}, err
	}
	d, notes := p.answer(q)
	e := Explanation{
		Question: q.String(), Allowed: d.Verdict == Allow, Reason: d.Reason, Text: d.Reason.Info().Text, Detail: d.Detail,
		Line: d.DenyLine, Rule: d.Rule, Notes: notes,
	}
	if d.Rule != nil {
		e.Line = d.Rule.Line
	}
	if e.Allowed {
		e.Notes = append(e.Notes, p.addressNotes(d.Rule, q.Port)...)
		return e, nil
	}
	e.Change = changes(spec, q, d)
	return e, nil
}

// answer asks the policy in the order in which a connection is judged.
func (p *Policy) answer(q Question) (d Decision, notes []string) {
	d = p.Connect(q.Host, q.Port)
	if d.Verdict != Allow || q.Method == "" {
		return d, nil
	}
	rule := d.Rule
	switch {
	case rule.Protocol == TCP:
		return d, []string{"the rule says tcp: any bytes pass, requests are not seen; a client of the explicit proxy must use CONNECT"}
	case q.Secure && rule.Protocol == HTTP:
		return denyBy(rule, reason.NotHTTP, "the rule says http, and this is TLS"), nil
	case !q.Secure && rule.Protocol == TLS:
		return denyBy(rule, reason.NotTLS, "the rule says tls, and this is plain HTTP"), nil
	case q.Secure && !rule.Inspect:
		return d, []string{"the rule does not inspect: the server name is checked, method and path are not seen"}
	}
	return p.Request(q.Host, q.Port, q.Method, q.Path), nil
}

// addressNotes says what is still asked when the name has been resolved.
func (p *Policy) addressNotes(rule *Rule, port uint16) []string {
	note := "a private address is refused when the name resolves to one: the rule lists no `addresses`"
	if len(rule.Addresses) > 0 {
		var list []string
		for _, a := range rule.Addresses {
			list = append(list, a.String())
		}
		note = "the name may resolve to public addresses and to " + strings.Join(list, ", ")
	}
	notes := []string{note}
	for _, r := range p.ranges {
		if line, closed := r.ports.has(port); closed {
			notes = append(notes, fmt.Sprintf("not to %s: deny rule in line %d", r.prefix, line))
		}
	}
	return notes
}

// changes says what would have to change for q to be allowed, which d refuses. Nothing is suggested that a
// card could not say.
func changes(spec Spec, q Question, d Decision) []string {
	at := func(r *Rule) string { return fmt.Sprintf("the rule in line %d (%s)", r.Line, r.Host) }
	switch d.Reason {
	case reason.DenyRule:
		return []string{fmt.Sprintf("take %s:%d out of the deny rule in line %d: a deny rule always wins, and no grant overrides it", q.Host, q.Port, d.DenyLine)}
	case reason.Canary:
		return []string{"take " + q.Host + " out of the canary names of the trip rules: a canary is never allowed, and no grant overrides it"}
	case reason.RawAddress:
		return []string{"use a host name that a rule allows; a private address that it resolves to belongs under `addresses` of that rule"}
	case reason.NameNotAllowed, reason.PortNotAllowed, reason.PublicSuffix:
		if MetadataName(q.Host) || q.Port == 53 || q.Port == 853 {
			return nil
		}
		return append(nearMisses(spec, q), addRule(q), grantHint(q))
	case reason.Expired:
		return []string{"write a later `expires` into " + at(d.Rule) + " and load the card again", grantHint(q)}
	case reason.MethodDenied:
		if CheckMethod(q.Method) != nil {
			return nil
		}
		return []string{fmt.Sprintf("add %s to `methods` of %s", q.Method, at(d.Rule)),
			"or " + addRule(q) + " behind it, if only this path is meant"}
	case reason.PathDenied:
		path, err := Path(q.Path)
		if err != nil || CheckPathGlob(path) != nil {
			return []string{"send the path without dot segments"}
		}
		return []string{fmt.Sprintf("add %q to `paths` of %s", path, at(d.Rule))}
	case reason.AmbiguousHTTP:
		out := []string{"send a path that can be read in one way only: " + d.Detail}
		if spelled, ok := spellSlashes(q.Path); ok {
			out = append(out, fmt.Sprintf("or add %q to `paths` of %s, if the server may take it either way", spelled, at(d.Rule)))
		}
		return out
	case reason.NotTLS:
		return []string{"use https", "or write `protocol: http` into " + at(d.Rule)}
	case reason.NotHTTP:
		return []string{"use http", "or write `protocol: tls` into " + at(d.Rule)}
	}
	return nil
}

// spellSlashes returns the glob for one path that has encoded slashes and is otherwise plain.
func spellSlashes(raw string) (glob string, ok bool) {
	path, err := canonical(raw)
	glob = strings.ReplaceAll(path, slashMark, encodedSlash)
	return glob, err == nil && glob != path && CheckPathGlob(glob) == nil && !strings.Contains(glob, "*")
}

// nearMisses names the rules that would match if they were written a little differently.
func nearMisses(spec Spec, q Question) []string {
	var out []string
	for _, r := range spec.Allow {
		name, span := splitPattern(r.Host)
		switch {
		case Covers(r.Host, q.Host) && !stands(r.Host, q.Host):
			out = append(out, fmt.Sprintf("name %s in a rule of its own: anybody can have names there, so the stars in line %d (%s) do not stand for it", q.Host, r.Line, r.Host))
		case Covers(r.Host, q.Host):
			out = append(out, fmt.Sprintf("add %d to `ports` of the rule in line %d (%s), if the same rules hold there", q.Port, r.Line, r.Host))
		case span == OneLabel && Covers("**."+name, q.Host):
			out = append(out, fmt.Sprintf("write \"**.%s\" in line %d: \"*.\" stands for exactly one label", name, r.Line))
		case span != ExactHost && name == q.Host:
			out = append(out, fmt.Sprintf("name %s in a rule of its own: the stars in line %d (%s) stand for at least one label", name, r.Line, r.Host))
		case span == ExactHost && Covers("**."+name, q.Host):
			out = append(out, fmt.Sprintf("the rule in line %d means %s alone, not the names under it", r.Line, name))
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// addRule is the narrowest rule that would allow q, as a card writes it.
func addRule(q Question) string {
	rule := fmt.Sprintf("host: %s, ports: [%d], protocol: ", q.Host, q.Port)
	switch path, err := Path(q.Path); {
	case q.Method == "" && q.Port == 80:
		rule += "http"
	case q.Method == "":
		rule += "tls"
	case err != nil || CheckMethod(q.Method) != nil || CheckPathGlob(path) != nil:
		rule += map[bool]string{true: "tls", false: "http"}[q.Secure]
	case q.Secure:
		rule += fmt.Sprintf("tls, inspect: true, methods: [%s], paths: [%q]", q.Method, path)
	default:
		rule += fmt.Sprintf("http, methods: [%s], paths: [%q]", q.Method, path)
	}
	return "add a rule to egress.allow: {" + rule + "}"
}

func grantHint(q Question) string {
	return "or open it for a while: " + GrantCommand(cmp.Or(q.Kid, "KID"), q.Host, q.Port, q.Grantor)
}

// GrantCommand is what an operator runs to open a host and port for a kid. grantor is the flag that says who grants
// it, which depends on the box; empty: with a key, as boxes should be.
func GrantCommand(kid, host string, port uint16, grantor string) string {
	return fmt.Sprintf("tagout grant %s %s:%d --for 15m %s --reason WHY", kid, host, port, cmp.Or(grantor, "--key FILE"))
}
