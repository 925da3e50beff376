package config

import (
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"
	"unicode"

	"tagout/internal/card"
	"tagout/internal/instance"
	"tagout/internal/yamlx"
)

var (
	boxKeys = []yamlx.Key{
		{Name: "apiVersion", Example: APIVersion},
		{Name: "kind", Example: Kind},
		{Name: "resolvers", Example: `["192.0.2.53:53"]`},
		{Name: "upstreamCAs", Example: "[/etc/tagout/extra-ca.pem]"},
		{Name: "alertWebhook", Example: "https://alerts.example.com/tagout"},
		{Name: "alerts", Example: `[{name: ops, webhook: "https://alerts.example.com/tagout"}]`},
		{Name: "metricsListen", Example: `{proxy: "127.0.0.1:9101"}`},
		{Name: "authorities", Example: `[{name: "Ada Operator", roles: [stop, release]}]`},
		{Name: "denySecrets", Example: "[root_*]"},
		{Name: "kidLimits", Example: "{queriesPerSecond: 500}"},
		{Name: "proof", Example: "{every: 10m}"},
		{Name: "trip", Example: "[{on: auditGap, fires: [network]}]"},
		{Name: "leases", Example: "{kids: 30s}"},
		{Name: "providers", Example: `[{name: bao, openbao: "https://bao.example.com:8200"}]`},
		{Name: "tokens", Example: "{lifetime: 24h}"},
		{Name: "spawn", Example: "{signed: true}"},
		{Name: "api", Example: `{listen: "127.0.0.1:8470"}`},
		{Name: "audit", Example: "{retention: 183d}"},
		{Name: "issuer", Example: `{url: "https://issuer.example.com", trustDomain: example.com}`},
	}
)

// Parse reads a configuration. file is what messages call it. The error is an Errors.
func Parse(file string, data []byte) (*Box, error) {
	doc, root := yamlx.Parse(file, data)
	m, _ := root.Map(boxKeys...)
	m.Need("apiVersion").Const(APIVersion)
	m.Need("kind").Const(Kind)
	b := &Box{
		Resolvers:     readResolvers(m.Need("resolvers")),
		UpstreamCAs:   readFiles(m.Get("upstreamCAs")),
		AlertWebhook:  readURL(m.Get("alertWebhook"), "alertWebhook", "https://alerts.example.com/tagout"),
		Alerts:        readSinks(m.Get("alerts")),
		MetricsListen: readListen(m.Get("metricsListen")),
		Authorities:   readAuthorities(m.Get("authorities")),
		DenySecrets:   readGlobs(m.Get("denySecrets")),
		KidLimits:     readKidLimits(m.Get("kidLimits")),
		Proof:         readProof(m.Get("proof")),
		Trip:          card.ReadTrips(m.Get("trip")),
		Leases:        readLeases(m.Get("leases")),
		Providers:     readProviders(m.Get("providers")),
		TokenLifetime: readTokens(m.Get("tokens")),
		SpawnSigned:   readSpawn(m.Get("spawn")),
		API:           readAPI(m.Get("api")),
		Issuer:        readIssuer(m.Get("issuer")),
		Audit:         readAudit(m.Get("audit")),
	}
	if err := doc.Err(); err != nil {
		return nil, err
	}
	return b, nil
}

func readResolvers(v yamlx.Value) []netip.AddrPort {
	var out []netip.AddrPort
	texts := v.Texts()
	if v.IsList() && len(texts) == 0 {
		v.Refuse("write the resolvers of /etc/resolv.conf, such as `resolvers: [\"192.0.2.53:53\"]`", "there is no resolver, so no host would be reachable")
	}
	for _, at := range texts {
		ap, ok := readAddrPort(at, "53")
		switch {
		case !ok:
		case slices.Contains(out, ap):
			at.Refuse("remove it", "%s is in this list already", ap)
		default:
			out = append(out, ap)
		}
	}
	return out
}

// readAddrPort reads an address with a port, neither of them a wildcard.
func readAddrPort(at yamlx.TextAt, port string) (netip.AddrPort, bool) {
	ap, err := netip.ParseAddrPort(at.Text)
	if err == nil && ap.Port() != 0 && !ap.Addr().IsUnspecified() && !ap.Addr().IsMulticast() {
		return ap, true
	}
	fix := "write one address and a port, such as `\"127.0.0.1:" + port + "\"`"
	if a, err := netip.ParseAddr(strings.Trim(at.Text, "[]")); err == nil && !a.IsUnspecified() {
		fix = "write `\"" + netip.AddrPortFrom(a, 0).String()
		fix = strings.TrimSuffix(fix, "0") + port + "\"` instead"
	}
	at.Refuse(fix, "%s is not an address with a port", yamlx.Quote(at.Text))
	return netip.AddrPort{}, false
}

func readFiles(v yamlx.Value) []string {
	var out []string
	for _, at := range v.Texts() {
		switch {
		case !path.IsAbs(at.Text) || strings.IndexFunc(at.Text, unicode.IsControl) >= 0:
			at.Refuse("write an absolute path, such as `/etc/tagout/extra-ca.pem`", "%s is not an absolute path", yamlx.Quote(at.Text))
		case slices.Contains(out, at.Text):
			at.Refuse("remove it", "%s is in this list already", yamlx.Quote(at.Text))
		default:
			out = append(out, at.Text)
		}
	}
	return out
}

// readURL never quotes the URL: its path is often a secret.
func readURL(v yamlx.Value, key, example string) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		v.Refuse("write a whole URL, such as `"+example+"`, or remove the key", "%s is not an http or https URL", key)
	case u.User != nil:
		v.Refuse("put the secret into the URL's path instead", "%s has a user or a password in it", key)
	case u.Fragment != "":
		v.Refuse("remove what follows the #", "%s has a fragment, which is never sent", key)
	}
	return s
}

func readListen(v yamlx.Value) map[string]string {
	entries, _ := v.Entries()
	if len(entries) == 0 {
		return nil
	}
	out := map[string]string{}
	taken := map[netip.AddrPort]string{}
	for _, e := range entries {
		daemon := e.Key.Text
		if !slices.Contains(instance.Daemons(), daemon) {
			fix := "write one of " + strings.Join(instance.Daemons(), ", ") + " instead"
			if near := yamlx.Nearest(daemon, instance.Daemons()); near != "" {
				fix = "write `" + near + ":` instead"
			}
			e.Key.Refuse(fix, "no daemon is called %s", yamlx.Quote(daemon))
			continue
		}
		s, ok := e.Value.Text()
		if !ok {
			continue
		}
		ap, ok := readAddrPort(yamlx.TextAt{Value: e.Value, Text: s}, "9101")
		if !ok {
			continue
		}
		if other, twice := taken[ap]; twice {
			e.Value.Refuse("write another port", "%s listens on %s already", other, ap)
			continue
		}
		taken[ap] = daemon
		out[daemon] = ap.String()
	}
	return out
}

func readGlobs(v yamlx.Value) []string {
	var out []string
	for _, at := range v.Texts() {
		if _, err := path.Match(at.Text, ""); err != nil || at.Text == "" {
			at.Refuse("write a secret's name, with * for any characters, such as `root_*`", "%s is not a pattern", yamlx.Quote(at.Text))
			continue
		}
		out = append(out, at.Text)
	}
	return out
}
