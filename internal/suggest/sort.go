package suggest

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"unicode"

	"golang.org/x/net/publicsuffix"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// Bounds of what is suggested. A person has to read it.
const (
	maxRules    = 50
	maxPaths    = 20 // of one rule
	maxSiblings = 5  // names under one domain
	maxLabel    = 32 // bytes; longer ones carry something
)

// sorter puts each attempt where it belongs: to what could be added, or to what is not suggested.
type sorter struct {
	spec  policy.Spec
	names *policy.Policy // spec, compiled
	tried tried
	wants map[target]*want
	skips []Skip
}

// target is what one rule at least is for.
type target struct {
	host     string // a name, or the pattern of the rule that requests are added to
	port     uint16
	protocol policy.Protocol
	inspect  bool
}

// want is what is to be added for a target.
type want struct {
	paths      map[string][]string // by method; nil for every request
	addresses  []netip.Prefix      // of the rules for the same host and port, which must agree
	credential string              // what those rules swap in
	guessed    bool                // port and protocol are not known
	count      uint64
	codes      []reason.Code
}

func (s *sorter) sort() error {
	var err error
	if s.names, err = policy.Compile(s.spec); err != nil {
		return err
	}
	floods := s.floods()
	for _, a := range s.tried.order {
		if why := s.refuse(a, floods); why != "" {
			s.skip(a, why)
			continue
		}
		s.place(a)
	}
	return nil
}

// skip notes that a is not suggested; what reads the same to people is one entry.
func (s *sorter) skip(a attempt, why string) {
	what := a.what()
	n := s.tried.count[a]
	for i := range s.skips {
		if k := &s.skips[i]; k.What == what && k.Reason == a.code && k.Why == why {
			k.Count += n
			return
		}
	}
	s.skips = append(s.skips, Skip{What: what, Reason: a.code, Count: n, Why: why})
}

// what names the attempt. Only canonical names, addresses and numbers of the kid's choosing are in it.
func (a attempt) what() string {
	what := "something that is no host name"
	if name, err := policy.Name(a.name); err == nil {
		what = name
		if len(what) > 80 {
			what = what[:80] + "…"
		}
	} else if a.name == "" && a.addr.IsValid() {
		what = a.addr.String()
	} else if a.name == "" {
		what = "no destination"
	}
	if a.port != 0 {
		what = fmt.Sprintf("%s port %d", what, a.port)
	}
	return what
}

// refuse says why nothing can be suggested for a, "" where something may be.
func (s *sorter) refuse(a attempt, floods map[string]int) string {
	switch a.code {
	case reason.NameNotAllowed, reason.PublicSuffix, reason.PortNotAllowed, reason.MethodDenied, reason.PathDenied:
	case reason.RawAddress, reason.VirtualUnknown, reason.HostAddress:
		return "addresses are never suggested: use a host name"
	case reason.Metadata:
		return "metadata addresses can never be allowed"
	case reason.PrivateAnswer:
		return "the name led to an address that is not public: whether that is meant is for a person to say, under `addresses`"
	case reason.DenyRule:
		return "a deny rule closes it, and a deny rule always wins"
	case reason.Expired:
		return "the rule has run out: write a later `expires`, or grant it for a while"
	case reason.ByteLimit, reason.RateLimit:
		return "a limit was reached: raise it in the rule, if that much is meant"
	default:
		return "no rule of a card would allow it: " + a.code.Info().Text
	}
	name, err := policy.Name(a.name)
	var bad *policy.NameError
	switch {
	case a.name == "" && a.addr.IsValid():
		return "addresses are never suggested, and no name was looked up for this one"
	case errors.As(err, &bad) && bad.Addr.IsValid():
		return "addresses are never suggested: use a host name"
	case err != nil:
		return "it is not a host name"
	case policy.MetadataName(name):
		return "metadata services can never be allowed"
	case local(name):
		return "names like this lead into the local network: whether that is meant is for a person to say"
	case a.port == 53 || a.port == 853:
		return "port 53 and 853 are for name servers, and only the box's own one is reachable"
	case floods[domain(name)] > maxSiblings:
		return fmt.Sprintf("%d names under %s were tried: data leaves by name like this; name hosts by hand", floods[domain(name)], domain(name))
	case longest(name) > maxLabel:
		return "its labels are unusually long: data leaves by name like this; name the host by hand"
	}
	return refuseRequest(a)
}

// refuseRequest says why a request cannot be put into a rule.
func refuseRequest(a attempt) string {
	if a.method == "" || a.method == "CONNECT" && a.code != reason.MethodDenied {
		return ""
	}
	path, err := policy.Path(a.path)
	switch {
	case policy.CheckMethod(a.method) != nil:
		return "its method can never be allowed"
	case a.cutOff:
		return "its path is too long for the record"
	case err != nil || policy.CheckPathGlob(path) != nil:
		return "its path cannot be written as a rule's: it can be read in more than one way, or has a blank in it"
	case strings.Contains(path, "*"):
		return "its path has a star in it, which would mean more in a rule"
	case strings.IndexFunc(path, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0:
		return "its path has characters that cannot be shown"
	}
	return ""
}

// local says whether a name belongs to no public domain.
func local(name string) bool {
	top := name[strings.LastIndexByte(name, '.')+1:]
	return top == name || slices.Contains([]string{"localhost", "local", "localdomain", "internal", "intranet", "lan", "corp", "home", "private"}, top) ||
		strings.HasSuffix("."+name, ".home.arpa") || strings.HasSuffix("."+name, ".in-addr.arpa") || strings.HasSuffix("."+name, ".ip6.arpa")
}

func domain(name string) string {
	if d, err := publicsuffix.EffectiveTLDPlusOne(name); err == nil {
		return d
	}
	return name
}

func longest(name string) int {
	most := 0
	for label := range strings.SplitSeq(name, ".") {
		most = max(most, len(label))
	}
	return most
}

// floods counts the names that were refused, by the domain they are under.
func (s *sorter) floods() map[string]int {
	names := map[string]bool{}
	for _, a := range s.tried.order {
		if name, err := policy.Name(a.name); err == nil && (a.code == reason.NameNotAllowed || a.code == reason.PublicSuffix || a.code == reason.WildcardLimit) {
			names[name] = true
		}
	}
	out := map[string]int{}
	for name := range names {
		out[domain(name)]++
	}
	return out
}

// place finds the rule that a needs. It asks the card as it stands: what a grant, a newer card or a neighbour's
// rule allows by now needs nothing.
func (s *sorter) place(a attempt) {
	name, _ := policy.Name(a.name) // refuse has checked it
	q := policy.Question{Host: name, Port: a.port}
	if a.port == 0 {
		q.Port = 443
		if _, d := s.names.Lookup(name); d.Verdict == policy.Allow {
			return
		}
	}
	request := a.method != "" && a.method != "CONNECT"
	if request {
		q.Method, q.Path, q.Secure = a.method, a.path, a.proto == policy.TLS
	}
	e, err := policy.Explain(s.spec, 0, q)
	switch {
	case err != nil || e.Allowed:
	case e.Reason == reason.DenyRule:
		s.skip(a, fmt.Sprintf("the deny rule in line %d closes it, and a deny rule always wins", e.Line))
	case e.Reason == reason.Expired:
		s.skip(a, "the rule has run out: write a later `expires`, or grant it for a while")
	case request && (e.Reason == reason.MethodDenied || e.Reason == reason.PathDenied):
		// The rule's own pattern: an exact host would hide what the pattern allows on this port.
		s.note(target{e.Rule.Host, a.port, e.Rule.Protocol, e.Rule.Inspect}, a, e.Rule)
	case e.Reason == reason.NameNotAllowed || e.Reason == reason.PublicSuffix || e.Reason == reason.PortNotAllowed:
		s.note(s.guess(name, a, request), a, nil)
	default:
		s.skip(a, "the card's rule wants it otherwise: "+e.Text)
	}
}

// guess makes a target of a connection whose protocol may not be known.
func (s *sorter) guess(name string, a attempt, request bool) target {
	t := target{host: name, port: a.port, protocol: a.proto}
	switch {
	case request && a.proto != policy.TLS:
		t.protocol = policy.HTTP
	case request:
		t.inspect = true
	case a.port == 0:
		t.port, t.protocol = 0, policy.TLS
	case t.protocol == "" && a.port == 80:
		t.protocol = policy.HTTP
	case t.protocol == "":
		t.protocol = policy.TLS
	}
	return t
}

func (s *sorter) note(t target, a attempt, beside *policy.Rule) {
	w := s.wants[t]
	if w == nil {
		w = &want{guessed: a.proto == "" && a.method == "" && a.port != 443 && a.port != 80}
		s.wants[t] = w
	}
	w.count += s.tried.count[a]
	if !slices.Contains(w.codes, a.code) {
		w.codes = append(w.codes, a.code)
	}
	if beside != nil {
		w.addresses, w.credential = beside.Addresses, beside.Credential
	}
	if a.method == "" || a.method == "CONNECT" {
		return
	}
	if w.paths == nil {
		w.paths = map[string][]string{}
	}
	path, _ := policy.Path(a.path) // refuse has checked it
	if !slices.Contains(w.paths[a.method], path) {
		w.paths[a.method] = append(w.paths[a.method], path)
	}
}

// additions makes rules of what is wanted.
func (s *sorter) additions() []Addition {
	s.settleLookups()
	var out []Addition
	order := slices.SortedFunc(maps.Keys(s.wants), func(a, b target) int {
		return cmp.Or(cmp.Compare(a.host, b.host), cmp.Compare(a.port, b.port), cmp.Compare(a.protocol, b.protocol))
	})
	for _, t := range order {
		w := s.wants[t]
		for _, r := range w.rules(t) {
			if i := slices.IndexFunc(out, func(a Addition) bool { return clash(a.Rule, r) }); i >= 0 {
				s.skips = append(s.skips, Skip{What: fmt.Sprintf("%s port %d", t.host, t.port), Reason: w.codes[0], Count: w.count,
					Why: fmt.Sprintf("it was tried with %s as well as with %s, and a port has one protocol", out[i].Rule.Protocol, r.Protocol)})
				break
			}
			if len(out) == maxRules {
				s.skips = append(s.skips, Skip{What: t.host, Reason: w.codes[0], Count: w.count, Why: fmt.Sprintf("%d rules are suggested already: review those first", maxRules)})
				break
			}
			out = append(out, Addition{Rule: r, Count: w.count, Note: w.note(r)})
		}
	}
	return out
}

func clash(a, b policy.Rule) bool {
	return a.Host == b.Host && a.Ports[0] == b.Ports[0] && policy.Conflict(a, b) != nil
}

// settleLookups gives names that were only looked up the port that usually follows, unless something was
// tried that shows the port.
func (s *sorter) settleLookups() {
	for t, w := range maps.Clone(s.wants) {
		if t.port != 0 {
			continue
		}
		delete(s.wants, t)
		shown := false
		for other, v := range s.wants {
			if other.host == t.host && other.port != 0 {
				v.count += w.count
				shown = true
				break
			}
		}
		if !shown {
			t.port = 443
			w.guessed = true
			s.wants[t] = w
		}
	}
}

// rules returns the rule for all requests, or one for each set of paths.
func (w *want) rules(t target) []policy.Rule {
	r := policy.Rule{Host: t.host, Ports: []uint16{t.port}, Protocol: t.protocol, Inspect: t.inspect, Addresses: w.addresses}
	if w.paths == nil {
		return []policy.Rule{r}
	}
	var out []policy.Rule
	for _, method := range slices.Sorted(maps.Keys(w.paths)) {
		paths := slices.Sorted(slices.Values(w.paths[method]))
		if len(paths) > maxPaths {
			paths = paths[:maxPaths]
		}
		if i := slices.IndexFunc(out, func(r policy.Rule) bool { return slices.Equal(r.Paths, paths) }); i >= 0 {
			out[i].Methods = append(out[i].Methods, method)
			continue
		}
		r.Methods, r.Paths = []string{method}, paths
		out = append(out, r)
	}
	return out
}

// note is what a reviewer should know of the rule.
func (w *want) note(r policy.Rule) string {
	var words []string
	for _, c := range w.codes {
		words = append(words, c.String())
	}
	note := fmt.Sprintf("refused %d times: %s", w.count, strings.Join(words, ", "))
	if w.count == 1 {
		note = "refused once: " + words[0]
	}
	if w.guessed {
		note += "; port or protocol is a guess"
	}
	if w.credential != "" {
		note += "; without the credential " + w.credential
	}
	for _, method := range r.Methods {
		if more := len(w.paths[method]) - len(r.Paths); more > 0 {
			note += fmt.Sprintf("; %d more paths with %s are left out", more, method)
		}
	}
	if strings.HasPrefix(r.Host, "*") {
		note += "; for all of the pattern, as the rule beside it"
	}
	return note
}
