package credential

import (
	"fmt"
	"net/textproto"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"tagout/internal/policy"
	"tagout/internal/wire"
)

// What a use is refused for, in records' field "scope".
const (
	scopeSession = "session"
	scopeHost    = "host"
	scopePlace   = "place"
	scopeMethod  = "method"
	scopePath    = "path"
)

// Bounds of a binding.
const (
	maxMethods = 32
	maxPaths   = 64
	maxPath    = 1 << 10
	maxName    = 128 // bytes of a header's, parameter's, cookie's or field's name
)

// binding is where and how a secret is shown. Hosts are canonical "name:port"; empty Methods and Paths mean any.
type binding struct {
	Hosts   []string          `json:"hosts"`
	Present wire.Presentation `json:"present,omitzero"`
	Methods []string          `json:"methods,omitempty"`
	Paths   []string          `json:"paths,omitempty"`
}

// refuses says what of the request the secret is not for, and in words; empty where it may be shown. hostport is
// canonical.
func (b *binding) refuses(hostport string, req *wire.ResolveRequest) (scope, detail string) {
	switch {
	case !slices.Contains(b.Hosts, hostport):
		return scopeHost, "is not bound to " + hostport
	case !shownAt(b.Present, req.Place):
		return scopePlace, fmt.Sprintf("is presented as %s, and its token stood in %s", presentation(b.Present), place(req.Place))
	case len(b.Methods) > 0 && !slices.Contains(b.Methods, req.Method):
		return scopeMethod, fmt.Sprintf("is for the methods %s, not for %q", strings.Join(b.Methods, ", "), cut(req.Method, 40))
	case len(b.Paths) > 0 && !policy.PathMatches(b.Paths, req.Path):
		path, _, _ := strings.Cut(req.Path, "?") // a query may hold what is not for a log
		return scopePath, fmt.Sprintf("is for the paths %s, not for %q", cut(strings.Join(b.Paths, ", "), 300), cut(path, 200))
	}
	return "", ""
}

// shownAt says whether a token that stood in at may be swapped for a secret that is presented as p.
func shownAt(p, at wire.Presentation) bool {
	switch p.As {
	case "": // any header field, as it always was; a proxy that says nothing means one
		return at.As == "" || headerField(at) != ""
	case wire.AsHeader:
		return headerField(at) != "" && strings.EqualFold(headerField(at), p.Name)
	case wire.AsBearer, wire.AsBasic, wire.AsSigV4:
		return at.As == p.As
	case wire.AsQuery, wire.AsCookie, wire.AsBody: // a WebSocket's message is no body: nothing is swapped there
		return at.As == p.As && at.Name == p.Name
	}
	return false
}

// headerField returns the header field that a place lies in; empty where it lies in none.
func headerField(at wire.Presentation) string {
	switch at.As {
	case wire.AsHeader:
		return at.Name
	case wire.AsBearer, wire.AsBasic:
		return "Authorization"
	case wire.AsCookie:
		return "Cookie"
	}
	return ""
}

// presentation renders a checked presentation for people.
func presentation(p wire.Presentation) string {
	switch {
	case p.As == "":
		return "any header field"
	case p.Name != "":
		return p.As + ":" + p.Name
	}
	return p.As
}

// place renders a place as it was told: quoted, since a kid may have chosen the name.
func place(at wire.Presentation) string {
	switch {
	case at.As == "":
		return "a place that was not told"
	case at.Name != "":
		return cut(at.As, 20) + " " + fmt.Sprintf("%q", cut(at.Name, maxName))
	}
	return cut(at.As, 20)
}

func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + "…"
}

// checkBinding returns the entry's binding in canonical form, or a *badEntry.
func checkBinding(e wire.VaultEntry) (binding, error) {
	var b binding
	if len(e.Hosts) == 0 && !e.Canary || len(e.Hosts) > maxHosts {
		return b, &badEntry{fmt.Sprintf("a secret is bound to 1 to %d hosts: name them as host:port, for example api.vendor.test:443", maxHosts)}
	}
	for _, h := range e.Hosts {
		canonical, err := hostPort(h)
		if err != nil {
			return b, &badEntry{err.Error()}
		}
		b.Hosts = append(b.Hosts, canonical)
	}
	slices.Sort(b.Hosts)
	b.Hosts = slices.Compact(b.Hosts)
	var err error
	if b.Present, err = checkPresentation(e.Present); err != nil {
		return b, err
	}
	if b.Methods, err = checkEach(e.Methods, maxMethods, "method", policy.CheckMethod); err != nil {
		return b, err
	}
	b.Paths, err = checkEach(e.Paths, maxPaths, "path", policy.CheckPathGlob)
	return b, err
}

func checkEach(list []string, most int, what string, check func(string) error) ([]string, error) {
	if len(list) > most {
		return nil, &badEntry{fmt.Sprintf("a secret has %d %ss at most, and this one has %d", most, what, len(list))}
	}
	for _, s := range list {
		if err := check(s); err != nil {
			return nil, &badEntry{err.Error()}
		}
		if len(s) > maxPath {
			return nil, &badEntry{fmt.Sprintf("a %s has %d bytes at most", what, maxPath)}
		}
	}
	out := slices.Clone(list)
	slices.Sort(out)
	return slices.Compact(out), nil
}

var (
	fieldNameRE = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$") // RFC 9110's token
	accessKeyRE = regexp.MustCompile(`^[A-Za-z0-9_]{16,128}$`)              // AWS IAM's AccessKeyId
)

// Header fields that say how a message is framed, routed or held together. A secret in one of them would change what
// the request is; the cookie field has a presentation of its own.
var framing = []string{"Connection", "Content-Length", "Content-Type", "Content-Encoding", "Cookie", "Expect", "Host", "Keep-Alive", "Proxy-Connection",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade"}

// checkPresentation returns p in canonical form, or a *badEntry.
func checkPresentation(p wire.Presentation) (wire.Presentation, error) {
	bad := func(text string) (wire.Presentation, error) {
		return p, &badEntry{"presenting the secret as " + p.As + ": " + text}
	}
	needsName, takesUser := false, false
	switch p.As {
	case wire.AsHeader, wire.AsQuery, wire.AsCookie, wire.AsBody:
		needsName = true
	case wire.AsBasic, wire.AsSigV4:
		takesUser = true
	case "", wire.AsBearer:
	default: // not repeated: somebody may have written the value here
		return p, &badEntry{"a secret is presented as header:NAME, bearer, basic, basic:USER, query:NAME, cookie:NAME, sigv4:ACCESSKEYID or body:FIELD"}
	}
	switch {
	case needsName && p.Name == "":
		return bad("it needs a name, as in " + p.As + ":NAME")
	case !needsName && p.Name != "":
		return bad("it takes no name")
	case !takesUser && p.User != "":
		return bad("it takes no user name")
	case len(p.Name) > maxName || len(p.User) > maxName || !plain(p.Name) || !plain(p.User):
		return bad(fmt.Sprintf("a name has %d printable characters at most", maxName))
	case p.As == wire.AsHeader || p.As == wire.AsCookie:
		if !fieldNameRE.MatchString(p.Name) {
			return bad("this is not the name of a " + p.As)
		}
		if p.As == wire.AsHeader {
			if p.Name = textproto.CanonicalMIMEHeaderKey(p.Name); slices.Contains(framing, p.Name) {
				return bad("the field " + p.Name + " holds the message together and can carry no secret")
			}
		}
	case p.As == wire.AsBody && slices.Contains(strings.Split(p.Name, "."), ""):
		return bad("write a field such as api_key, or a dotted one such as auth.key")
	case p.As == wire.AsBasic && strings.Contains(p.User, ":"):
		return bad("a user name has no colon")
	case p.As == wire.AsSigV4 && !accessKeyRE.MatchString(p.User):
		return bad("it needs the access key's id, as in sigv4:AKIAIOSFODNN7EXAMPLE")
	}
	return p, nil
}

// plain says whether s is UTF-8 that prints.
func plain(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}
