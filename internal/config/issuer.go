package config

import (
	"net/netip"
	"net/url"
	"regexp"
	"time"

	"tagout/internal/yamlx"
)

// Issuer makes the box an issuer of tokens for services of the user's own. Zero: it is none, and cards that ask for such
// tokens are refused.
type Issuer struct {
	URL         string         // what tokens name as their issuer: https://name[:port]
	TrustDomain string         // of the SPIFFE IDs in tokens
	Algorithm   string         // EdDSA or ES256; counts for keys that are made from now on
	Lifetime    time.Duration  // of a token at most
	RotateEvery time.Duration  // after which another key signs; 0: only by order
	Audiences   []string       // path.Match globs; empty: whatever a card says
	Listen      netip.AddrPort // zero: only over credd's unix socket; without a certificate always a loopback address
	Certificate string         // PEM files, absolute paths; both or none
	Key         string
}

// Algorithms of tokens' signatures. What knows more of them is kept out of the daemons that only read this.
const (
	edDSA = "EdDSA"
	es256 = "ES256"
)

// trustDomainRE is what a trust domain looks like (SPIFFE-ID, section 2.1).
var trustDomainRE = regexp.MustCompile(`^[a-z0-9._-]{1,255}$`)

// Defaults and bounds of the issuer's times.
const (
	DefaultTokenLife = 5 * time.Minute
	minTokenLife     = 5 * time.Second
	maxTokenLife     = time.Hour
	DefaultRotation  = 30 * 24 * time.Hour
	minRotation      = time.Hour
	maxRotation      = 366 * 24 * time.Hour
)

// issuerFile is the form of the issuer section.
type issuerFile struct {
	URL         string   `yaml:"url"`
	TrustDomain string   `yaml:"trustDomain"`
	Algorithm   string   `yaml:"algorithm,omitempty"`
	Lifetime    string   `yaml:"lifetime,omitempty"`
	RotateEvery string   `yaml:"rotateEvery,omitempty"`
	Audiences   []string `yaml:"audiences,omitempty"`
	Listen      string   `yaml:"listen,omitempty"`
	Certificate string   `yaml:"certificate,omitempty"`
	Key         string   `yaml:"key,omitempty"`
}

func (i Issuer) file() *issuerFile {
	if i.URL == "" {
		return nil
	}
	f := &issuerFile{URL: i.URL, TrustDomain: i.TrustDomain, Algorithm: i.Algorithm, Audiences: i.Audiences, Certificate: i.Certificate, Key: i.Key,
		RotateEvery: "off"}
	if i.Lifetime > 0 {
		f.Lifetime = i.Lifetime.String()
	}
	if i.RotateEvery > 0 {
		f.RotateEvery = i.RotateEvery.String()
	}
	if i.Listen.IsValid() {
		f.Listen = i.Listen.String()
	}
	return f
}

var issuerKeys = []yamlx.Key{
	{Name: "url", Example: `"https://issuer.example.com"`},
	{Name: "trustDomain", Example: "example.com"},
	{Name: "algorithm", Example: edDSA},
	{Name: "lifetime", Example: "5m"},
	{Name: "rotateEvery", Example: "720h"},
	{Name: "audiences", Example: `["https://*.example.com"]`},
	{Name: "listen", Example: `"127.0.0.1:8471"`},
	{Name: "certificate", Example: "/etc/tagout/issuer.pem"},
	{Name: "key", Example: "/etc/tagout/issuer.key"},
}

func readIssuer(v yamlx.Value) Issuer {
	m, ok := v.Map(issuerKeys...)
	if !ok {
		return Issuer{}
	}
	i := Issuer{
		URL: readIssuerURL(m.Need("url")), TrustDomain: readTrustDomain(m.Need("trustDomain")), Algorithm: readAlgorithm(m.Get("algorithm")),
		Lifetime: DefaultTokenLife, RotateEvery: DefaultRotation, Audiences: readGlobs(m.Get("audiences")),
		Certificate: readPath(m.Get("certificate")), Key: readPath(m.Get("key")),
	}
	if m.Has("lifetime") {
		i.Lifetime = readDuration(m.Get("lifetime"), "lifetime", DefaultTokenLife, minTokenLife, maxTokenLife)
	}
	if every := m.Get("rotateEvery"); every.Present() {
		if s, ok := every.Text(); ok && s == "off" {
			i.RotateEvery = 0
		} else if ok {
			i.RotateEvery = readDuration(every, "rotateEvery", DefaultRotation, minRotation, maxRotation)
		}
	}
	listen := m.Get("listen")
	if s, ok := listen.Text(); ok {
		i.Listen, _ = readAddrPort(yamlx.TextAt{Value: listen, Text: s}, "8471")
	}
	switch {
	case (i.Certificate == "") != (i.Key == ""):
		v.Refuse("write both certificate and key, or neither", "certificate and key go together")
	case i.Listen.IsValid() && !i.Listen.Addr().IsLoopback() && i.Certificate == "":
		listen.Refuse("add certificate and key, or listen on 127.0.0.1", "without TLS nothing is served to other machines")
	case i.Certificate != "" && !i.Listen.IsValid() && !m.Has("listen"):
		m.Get("certificate").Refuse("add listen, or remove certificate and key", "nothing is served with the certificate")
	}
	return i
}

// readIssuerURL reads a URL that tokens are compared with byte by byte, so it has one form.
func readIssuerURL(v yamlx.Value) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	u, err := url.Parse(s)
	const fix = "write scheme and name, with a port where it is not 443, such as `https://issuer.example.com`"
	switch {
	case err != nil || u.Host == "" || u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" || u.String() != s:
		v.Refuse(fix, "%s is not the name of an issuer", yamlx.Quote(s))
	case u.Scheme != "https" && !(u.Scheme == "http" && isLoopback(u.Hostname())):
		v.Refuse(fix, "an issuer is reached by https, or by http on a loopback address")
	}
	return s
}

func isLoopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsLoopback()
}

func readTrustDomain(v yamlx.Value) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	if !trustDomainRE.MatchString(s) {
		v.Refuse("write a name in lower-case letters, digits, dots and dashes, such as `example.com`", "%s is not a trust domain", yamlx.Quote(s))
	}
	return s
}

func readAlgorithm(v yamlx.Value) string {
	s, ok := v.Text()
	switch {
	case !ok:
		return edDSA
	case s != edDSA && s != es256:
		v.Refuse("write "+edDSA+" or "+es256, "tokens are not signed with %s", yamlx.Quote(s))
	}
	return s
}
