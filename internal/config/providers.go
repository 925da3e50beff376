package config

import (
	"net/netip"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"tagout/internal/policy"
	"tagout/internal/yamlx"
)

// Kinds of providers, as the configuration names them; each is the key of the provider's URL.
const (
	ProviderOpenBao   = "openbao" // HashiCorp Vault too
	ProviderOAuth     = "oauth"
	ProviderGitHubApp = "githubApp"
	ProviderAWS       = "awsSTS"
)

// Defaults and bounds of a provider.
const (
	DefaultProviderTimeout = 3 * time.Second
	DefaultMaxLifetime     = 24 * time.Hour
)

// Provider is an issuer that secrets are leased from. What speaks to it lies in the vault; fields named Secret… are
// names of entries there.
type Provider struct {
	Name        string // letters, digits and dashes
	Kind        string
	URL         string        // https, with a host name; without a slash at its end
	Addresses   []netip.Addr  // where it is reached; empty: the resolvers say, and only public addresses count
	CA          string        // PEM file (absolute path) with authorities that count beside the box's; may be empty
	Timeout     time.Duration // of one request
	MaxLifetime time.Duration // a lease that says it lives longer is given back

	TokenFile, Namespace, Mount  string // openbao; without TokenFile AppRole
	SecretRoleID, SecretSecretID string
	RevokeURL, ClientID          string // oauth
	SecretClient                 string
	ClientInBody                 bool
	AppID, SecretAppKey          string // githubApp
	IAM, Region                  string // awsSTS
	SecretAccessKeyID, SecretAWS string
	Roles                        []ProviderRole // each name once; never empty
}

// ProviderRole bounds what a lease is good for. Which fields count depends on the provider's kind.
type ProviderRole struct {
	Name               string
	Path, Value, User  string            // openbao
	Scopes             []string          // oauth
	Audience, Resource string            // oauth
	Subject            string            // oauth: vault entry with the token that is exchanged
	SubjectType        string            // oauth
	Installation       int64             // githubApp
	Repositories       []string          // githubApp
	Permissions        map[string]string // githubApp
	ARN                string            // awsSTS
}

// Hosts returns the provider's hosts as name:port, its own first.
func (p Provider) Hosts() []string {
	var out []string
	for _, u := range []string{p.URL, p.IAM} {
		if u == "" {
			continue
		}
		at, err := url.Parse(u)
		if err != nil {
			continue // Parse has refused it
		}
		port := at.Port()
		if port == "" {
			port = "443"
		}
		if host := at.Hostname() + ":" + port; !slices.Contains(out, host) {
			out = append(out, host)
		}
	}
	return out
}

// Secrets returns the vault entries that credd speaks to the provider with. No kid gets any of them.
func (p Provider) Secrets() []string {
	var out []string
	for _, s := range []string{p.SecretRoleID, p.SecretSecretID, p.SecretClient, p.SecretAppKey, p.SecretAccessKeyID, p.SecretAWS} {
		if s != "" {
			out = append(out, s)
		}
	}
	for _, r := range p.Roles {
		if r.Subject != "" {
			out = append(out, r.Subject)
		}
	}
	return out
}

// Role returns the role of a name; ok is false where there is none.
func (p Provider) Role(name string) (ProviderRole, bool) {
	i := slices.IndexFunc(p.Roles, func(r ProviderRole) bool { return r.Name == name })
	if i < 0 {
		return ProviderRole{}, false
	}
	return p.Roles[i], true
}

// kindKeys are the keys of one kind: those that it needs, and those that it may have.
type kindKeys struct{ need, may, roleNeed, roleMay []string }

var providerKinds = []string{ProviderOpenBao, ProviderOAuth, ProviderGitHubApp, ProviderAWS}

var keysOfKind = map[string]kindKeys{
	ProviderOpenBao:   {nil, []string{"tokenFile", "roleID", "secretID", "mount", "namespace"}, []string{"path", "value"}, []string{"user"}},
	ProviderOAuth:     {[]string{"revoke", "clientID", "clientSecret"}, []string{"inBody"}, nil, []string{"scopes", "audience", "resource", "subject", "subjectType"}},
	ProviderGitHubApp: {[]string{"appID", "key"}, nil, []string{"installation", "repositories", "permissions"}, nil},
	ProviderAWS:       {[]string{"iam", "region", "accessKeyID", "secretKey"}, nil, []string{"arn"}, nil},
}

var (
	providerKeys = []yamlx.Key{
		{Name: "name", Example: "bao"},
		{Name: ProviderOpenBao, Example: "https://bao.example.com:8200"},
		{Name: ProviderOAuth, Example: "https://id.example.com/oauth2/token"},
		{Name: ProviderGitHubApp, Example: "https://api.github.com"},
		{Name: ProviderAWS, Example: "https://sts.eu-central-1.amazonaws.com"},
		{Name: "addresses", Example: "[192.0.2.70]"},
		{Name: "ca", Example: "/etc/tagout/bao-ca.pem"},
		{Name: "timeout", Example: "3s"},
		{Name: "maxLifetime", Example: "24h"},
		{Name: "tokenFile", Example: "/run/bao-agent/token"},
		{Name: "roleID", Example: "bao_role_id"},
		{Name: "secretID", Example: "bao_secret_id"},
		{Name: "mount", Example: "approle"},
		{Name: "namespace", Example: "team-a"},
		{Name: "revoke", Example: "https://id.example.com/oauth2/revoke"},
		{Name: "clientID", Example: "tagout"},
		{Name: "clientSecret", Example: "id_client_secret"},
		{Name: "inBody", Example: "true"},
		{Name: "appID", Example: `"12345"`},
		{Name: "key", Example: "github_app_key"},
		{Name: "iam", Example: "https://iam.amazonaws.com"},
		{Name: "region", Example: "eu-central-1"},
		{Name: "accessKeyID", Example: "aws_access_key_id"},
		{Name: "secretKey", Example: "aws_secret_access_key"},
		{Name: "roles", Example: "[{name: readonly, path: database/creds/readonly, value: password}]"},
	}
	roleKeys = []yamlx.Key{
		{Name: "name", Example: "readonly"},
		{Name: "path", Example: "database/creds/readonly"},
		{Name: "value", Example: "password"},
		{Name: "user", Example: "username"},
		{Name: "scopes", Example: "[orders.read]"},
		{Name: "audience", Example: "https://orders.example.com"},
		{Name: "resource", Example: "https://orders.example.com"},
		{Name: "subject", Example: "ada_token"},
		{Name: "subjectType", Example: "urn:ietf:params:oauth:token-type:id_token"},
		{Name: "installation", Example: "77"},
		{Name: "repositories", Example: "[docs]"},
		{Name: "permissions", Example: "{contents: read}"},
		{Name: "arn", Example: "arn:aws:iam::123456789012:role/deploy"},
	}
)

func readProviders(v yamlx.Value) []Provider {
	var out []Provider
	for _, entry := range v.List() {
		m, ok := entry.Map(providerKeys...)
		if !ok {
			continue
		}
		p := Provider{
			Timeout:     readDuration(m.Get("timeout"), "timeout", DefaultProviderTimeout, 100*time.Millisecond, 5*time.Second),
			MaxLifetime: readDuration(m.Get("maxLifetime"), "maxLifetime", DefaultMaxLifetime, time.Minute, 31*24*time.Hour),
			Addresses:   readProviderAddresses(m.Get("addresses")), CA: readPath(m.Get("ca")),
		}
		p.Name = readProviderName(m.Need("name"), func(n string) bool { return slices.ContainsFunc(out, func(o Provider) bool { return o.Name == n }) })
		if p.Kind = readProviderKind(entry, m); p.Kind == "" {
			continue
		}
		p.URL = readProviderURL(m.Get(p.Kind), p.Kind == ProviderOAuth || p.Kind == ProviderGitHubApp)
		checkKeys(m, providerKeys[5:], keysOfKind[p.Kind].need, append([]string{"addresses", "ca", "timeout", "maxLifetime", "roles"}, keysOfKind[p.Kind].may...), p.Kind)
		p.readSpeaker(m)
		p.Roles = readProviderRoles(m.Need("roles"), p.Kind)
		out = append(out, p)
	}
	return out
}

var providerName = regexp.MustCompile(`^[a-z0-9](-?[a-z0-9]){0,31}$`)

func readProviderName(v yamlx.Value, taken func(string) bool) string {
	s, ok := v.Text()
	switch {
	case !ok:
	case !providerName.MatchString(s):
		v.Refuse("write up to 32 small letters, digits and single dashes", "%s cannot be a name here", yamlx.Quote(s))
	case taken(s):
		v.Refuse("write another name", "%s is in this list already", yamlx.Quote(s))
	}
	return s
}

// readProviderKind returns the kind whose key is there: exactly one.
func readProviderKind(entry yamlx.Value, m yamlx.Map) string {
	kind := ""
	for _, k := range providerKinds {
		switch {
		case !m.Has(k):
		case kind != "":
			m.Get(k).Refuse("write two entries, each with a name of its own", "a provider cannot be both %s and %s", kind, k)
		default:
			kind = k
		}
	}
	if kind == "" {
		entry.Refuse("write one of "+strings.Join(providerKinds, ", ")+" with the provider's URL", "nothing says what provider this is")
	}
	return kind
}

// checkKeys reports keys that are missing, and keys that mean nothing for the kind.
func checkKeys(m yamlx.Map, all []yamlx.Key, need, may []string, kind string) {
	for _, k := range all {
		switch {
		case slices.Contains(need, k.Name):
			m.Need(k.Name)
		case m.Has(k.Name) && !slices.Contains(may, k.Name):
			m.Get(k.Name).Refuse("remove it", "%s means nothing for %s", k.Name, kind)
		}
	}
}

// readSpeaker reads how credd speaks to the provider.
func (p *Provider) readSpeaker(m yamlx.Map) {
	p.TokenFile, p.Namespace, p.Mount = readPath(m.Get("tokenFile")), readWord(m.Get("namespace")), readWord(m.Get("mount"))
	p.SecretRoleID, p.SecretSecretID = readEntryName(m.Get("roleID")), readEntryName(m.Get("secretID"))
	p.ClientID, p.SecretClient = readWord(m.Get("clientID")), readEntryName(m.Get("clientSecret"))
	p.ClientInBody, _ = m.Get("inBody").Bool()
	p.AppID, p.SecretAppKey = readWord(m.Get("appID")), readEntryName(m.Get("key"))
	p.Region, p.SecretAccessKeyID, p.SecretAWS = readWord(m.Get("region")), readEntryName(m.Get("accessKeyID")), readEntryName(m.Get("secretKey"))
	switch p.Kind {
	case ProviderOpenBao:
		if p.Mount == "" {
			p.Mount = "approle"
		}
		if (p.TokenFile == "") == (p.SecretRoleID == "" || p.SecretSecretID == "") || p.TokenFile != "" && p.SecretRoleID+p.SecretSecretID != "" {
			m.Refuse("write tokenFile, or both roleID and secretID", "one of two says how to log in")
		}
	case ProviderOAuth:
		p.RevokeURL = readProviderURL(m.Get("revoke"), true)
		if a, b := (Provider{URL: p.URL}).Hosts(), (Provider{URL: p.RevokeURL}).Hosts(); p.URL != "" && p.RevokeURL != "" && !slices.Equal(a, b) {
			m.Get("revoke").Refuse("write the server's own revocation endpoint (RFC 7009)", "it is at another host than the token endpoint")
		}
	case ProviderAWS:
		p.IAM = readProviderURL(m.Get("iam"), false)
	}
}

// readProviderURL reads an https URL with a host name: secrets are bound to names.
func readProviderURL(v yamlx.Value, path bool) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	const fix = "write a URL such as `https://bao.example.com:8200`"
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Scheme != "https" || u.Hostname() == "":
		v.Refuse(fix, "%s is not an https URL", yamlx.Quote(s))
		return ""
	case u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		v.Refuse(fix, "the URL holds more than a host and a path")
		return ""
	case !path && strings.Trim(u.Path, "/") != "":
		v.Refuse("remove the path", "the URL has a path")
		return ""
	}
	name, err := policy.Name(u.Hostname())
	if _, ip := netip.ParseAddr(u.Hostname()); err != nil || ip == nil {
		v.Refuse("write the name that is in its certificate, and its address into `addresses`", "%s is not a host name", yamlx.Quote(u.Hostname()))
		return ""
	}
	if port := u.Port(); port != "" {
		name += ":" + port
	}
	u.Host = name
	return strings.TrimRight(u.String(), "/")
}

func readProviderAddresses(v yamlx.Value) []netip.Addr {
	var out []netip.Addr
	for _, at := range v.Texts() {
		a, err := netip.ParseAddr(at.Text)
		switch {
		case err != nil || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsMulticast():
			at.Refuse("write an address, such as `192.0.2.70`", "%s is not an address", yamlx.Quote(at.Text))
		case policy.IsMetadata(a) || a.IsLinkLocalUnicast():
			at.Refuse("remove it", "%s is a metadata or link-local address, which is never called", a)
		case slices.Contains(out, a):
			at.Refuse("remove it", "%s is in this list already", a)
		default:
			out = append(out, a)
		}
	}
	return out
}

// readWord reads a text without spaces and control characters; empty where there is none.
func readWord(v yamlx.Value) string {
	s, ok := v.Text()
	if ok && (s == "" || len(s) > 256 || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })) {
		v.Refuse("write it without spaces", "%s is not a plain word", yamlx.Quote(s))
	}
	return s
}

var entryName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_.-]{0,63}$`)

// readEntryName reads the name of a vault entry. It is not quoted where it is none: it may be the secret itself.
func readEntryName(v yamlx.Value) string {
	s, ok := v.Text()
	if ok && !entryName.MatchString(s) {
		v.Refuse("put the secret into the vault with `tagout vault set`, and write its name", "this is not the name of a secret in the vault")
	}
	return s
}

func readProviderRoles(v yamlx.Value, kind string) []ProviderRole {
	var out []ProviderRole
	if v.IsList() && len(v.List()) == 0 {
		v.Refuse("write the roles that can be leased", "nothing can be leased")
	}
	for _, entry := range v.List() {
		m, ok := entry.Map(roleKeys...)
		if !ok {
			continue
		}
		checkKeys(m, roleKeys[1:], keysOfKind[kind].roleNeed, keysOfKind[kind].roleMay, kind)
		r := ProviderRole{
			Value: readWord(m.Get("value")), User: readWord(m.Get("user")),
			Scopes: readWords(m.Get("scopes")), Audience: readWord(m.Get("audience")), Resource: readWord(m.Get("resource")),
			Subject: readEntryName(m.Get("subject")), SubjectType: readWord(m.Get("subjectType")),
			Repositories: readWords(m.Get("repositories")),
		}
		r.Name = readProviderName(m.Need("name"), func(n string) bool { return slices.ContainsFunc(out, func(o ProviderRole) bool { return o.Name == n }) })
		r.Path, r.ARN = readBaoPath(m.Get("path")), readARN(m.Get("arn"))
		r.Installation, r.Permissions = readInstallation(m.Get("installation")), readPermissions(m.Get("permissions"))
		if kind == ProviderGitHubApp && m.Get("repositories").IsList() && len(r.Repositories) == 0 {
			m.Get("repositories").Refuse("name the repositories", "without them the token is good for all of the installation's")
		}
		out = append(out, r)
	}
	return out
}

func readWords(v yamlx.Value) []string {
	var out []string
	for _, at := range v.Texts() {
		out = append(out, readWord(at.Value))
	}
	return out
}

func readBaoPath(v yamlx.Value) string {
	s := readWord(v)
	if s != "" && (strings.HasPrefix(s, "/") || path.Clean(s) != s || strings.HasPrefix(s, "..") || strings.ContainsAny(s, "?#%") || strings.HasPrefix(s, "sys/") || strings.HasPrefix(s, "auth/")) {
		v.Refuse("write the path of a dynamic secret, such as `database/creds/readonly`", "%s is not one", yamlx.Quote(s))
	}
	return s
}

var roleARN = regexp.MustCompile(`^arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]{1,512}$`)

func readARN(v yamlx.Value) string {
	s, ok := v.Text()
	if ok && !roleARN.MatchString(s) {
		v.Refuse("write the role's ARN, such as `arn:aws:iam::123456789012:role/deploy`", "%s is not one", yamlx.Quote(s))
	}
	return s
}

func readInstallation(v yamlx.Value) int64 {
	n, ok := v.Int()
	if ok && n <= 0 {
		v.Refuse("write the number that ends the address of the installation's page", "%d is not one", n)
	}
	return n
}

func readPermissions(v yamlx.Value) map[string]string {
	entries, ok := v.Entries()
	if !ok {
		return nil
	}
	out := map[string]string{}
	for _, e := range entries {
		level, ok := e.Value.Text()
		if ok && !slices.Contains([]string{"read", "write", "admin"}, level) {
			e.Value.Refuse("write read, write or admin", "%s is no level of a permission", yamlx.Quote(level))
		}
		out[readWord(e.Key.Value)] = level
	}
	if len(out) == 0 {
		v.Refuse("name the permissions", "without them the token is good for all of the app's")
	}
	return out
}

// Called is a place that credd may call.
type Called struct {
	Addr netip.Addr // zero: wherever the provider's name leads
	Port uint16
	DNS  bool // a resolver, over UDP and TCP
}

// Called returns what credd may call: the providers, and the resolvers where they say where a provider is.
func (b *Box) Called() []Called {
	var out []Called
	asks := false
	for _, p := range b.Providers {
		for i, at := range p.Hosts() {
			_, port, _ := strings.Cut(at, ":")
			n, err := strconv.ParseUint(port, 10, 16)
			if err != nil {
				continue // Parse has refused it
			}
			if i > 0 || len(p.Addresses) == 0 { // the addresses are those of the URL's own host
				asks = true
				out = append(out, Called{Port: uint16(n)})
				continue
			}
			for _, a := range p.Addresses {
				out = append(out, Called{Addr: a, Port: uint16(n)})
			}
		}
	}
	if asks {
		for _, r := range b.Resolvers {
			out = append(out, Called{Addr: r.Addr(), Port: r.Port(), DNS: true})
		}
	}
	return out
}
