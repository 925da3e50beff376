package card

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/yamlx"
)

// Bounds of what a card can have minted.
const (
	maxMints     = 32
	maxScope     = 32
	maxMintHosts = 64

	minMintLife = 5 * time.Second
	maxMintLife = time.Hour
)

// Characters that can stand in a scope (RFC 6749 section 3.3); an audience has the same.
var (
	audienceRE = regexp.MustCompile(`^[!#-\[\]-~]{1,256}$`)
	scopeRE    = regexp.MustCompile(`^[!#-\[\]-~]{1,128}$`)
)

// carried returns everything that the proxy puts into requests, by name.
func (id Identity) carried() []session.Secret {
	out := slices.Clone(id.Scope)
	for _, t := range id.Mint {
		if t.Env != "" {
			out = append(out, session.Secret{Name: t.Name, Env: t.Env})
		}
	}
	return out
}

// readMints reads what the box's issuer makes for the kid. scope is what was read before.
func readMints(v yamlx.Value, scope []session.Secret) []session.Mint {
	entries := v.List()
	if len(entries) > maxMints {
		v.Refuse("give the kid less to do", "there are more than %d tokens", maxMints)
		return nil
	}
	var out []session.Mint
	for _, entry := range entries {
		m, ok := entry.Map(mintKeys...)
		if !ok {
			continue
		}
		t := session.Mint{
			Name: readSecretName(m.Need("name")), Audience: readAudience(m.Need("audience")),
			Scope:    readUnique(m.Get("scope"), checkScopeWord, "write a word without spaces, quotes and backslashes, such as `books:read`"),
			Lifetime: readDuration(m.Get("lifetime"), minMintLife, maxMintLife),
		}
		readCarrier(m, &t)
		checkTaken(m, t, scope, out)
		out = append(out, t)
	}
	return out
}

func readAudience(v yamlx.Value) string {
	s, ok := v.Text()
	if ok && !audienceRE.MatchString(s) {
		v.Refuse("write what the service calls itself, such as `https://books.example.com`", "%s cannot be an audience", yamlx.Quote(s))
	}
	return s
}

type scopeError string

func (e scopeError) Error() string { return string(e) }

func checkScopeWord(s string) error {
	switch {
	case NeverGranted(s):
		return scopeError("scopes that begin with " + neverPrefix + " can never be granted")
	case !scopeRE.MatchString(s):
		return scopeError(yamlx.Quote(s) + " is not a scope")
	}
	return nil
}

// readCarrier reads how the token gets to the service: by the proxy, or by the kid itself.
func readCarrier(m yamlx.Map, t *session.Mint) {
	env, hosts, file := m.Get("env"), m.Get("hosts"), m.Get("file")
	switch {
	case file.Present() && (env.Present() || hosts.Present()):
		file.Refuse("remove it, or write it without env and hosts", "a token is either in a variable, for the proxy, or in a file")
	case file.Present():
		t.File = readTo(file)
	case !m.Has("env") && !m.Has("file"):
		m.Refuse("write `env: BOOKS_TOKEN` and its hosts", "nothing says where the kid finds the token %s", yamlx.Quote(t.Name))
	default:
		t.Env = readEnvName(env)
		t.Hosts = readMintHosts(m.Need("hosts"))
	}
}

func readMintHosts(v yamlx.Value) []string {
	texts := v.Texts()
	if v.IsList() && len(texts) == 0 {
		v.Refuse("write the hosts, such as `[\"books.example.com:443\"]`", "the list is empty, so the token would be of no use")
	}
	if len(texts) > maxMintHosts {
		v.Refuse("give other hosts a token of their own", "there are more than %d hosts", maxMintHosts)
		return nil
	}
	var out []string
	for _, at := range texts {
		host, ok := canonicalHostPort(at.Text)
		switch {
		case !ok:
			at.Refuse("write an exact name with a port, such as `books.example.com:443`", "%s is not a host with a port", yamlx.Quote(at.Text))
		case slices.Contains(out, host):
			at.Refuse("remove it", "%s is in this list already", host)
		default:
			out = append(out, host)
		}
	}
	return out
}

func canonicalHostPort(s string) (string, bool) {
	host, port, ok := strings.Cut(s, ":")
	n, err := strconv.ParseUint(port, 10, 16)
	if !ok || err != nil || n == 0 || strings.ContainsAny(host, "*/") {
		return "", false
	}
	name, err := policy.Name(host)
	if err != nil {
		return "", false
	}
	return name + ":" + strconv.FormatUint(n, 10), true
}

// checkTaken reports a name, variable or file that something else has.
func checkTaken(m yamlx.Map, t session.Mint, scope []session.Secret, mints []session.Mint) {
	for _, s := range scope {
		if t.Name != "" && s.Name == t.Name {
			m.Get("name").Refuse("write another name", "%s is the name of a secret in the scope", t.Name)
		}
		if t.Env != "" && s.Env == t.Env {
			m.Get("env").Refuse("write another name", "the variable %s is taken already", t.Env)
		}
	}
	for _, other := range mints {
		if t.Name != "" && other.Name == t.Name {
			m.Get("name").Refuse("write another name", "there is a token %s already", t.Name)
		}
		if t.Env != "" && other.Env == t.Env {
			m.Get("env").Refuse("write another name", "the variable %s is taken already", t.Env)
		}
	}
}

// checkMintFiles reports tokens' files that inputs stand in the way of.
func (c *Card) checkMintFiles(v yamlx.Value) {
	for i, t := range c.Identity.Mint {
		if t.File == "" {
			continue
		}
		var taken []string
		for _, in := range c.Filesystem.Inputs {
			taken = append(taken, in.To)
		}
		for _, other := range c.Identity.Mint[:i] {
			taken = append(taken, other.File)
		}
		for _, to := range taken {
			if to != "" && (to == t.File || strings.HasPrefix(to, t.File+"/") || strings.HasPrefix(t.File, to+"/")) {
				v.Refuse("write another path for the token "+t.Name, "%s and %s cannot both be files", t.File, to)
			}
		}
	}
}
