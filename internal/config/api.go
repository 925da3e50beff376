package config

import (
	"net/netip"
	"slices"
	"strings"

	"tagout/internal/apikey"
	"tagout/internal/yamlx"
)

// API says how sandboxd serves its API over TCP. Zero: only over its unix socket.
type API struct {
	Listen      netip.AddrPort // without a certificate always a loopback address
	Certificate string         // PEM files, absolute paths; both or none
	Key         string
	ClientCA    string      // PEM file with the authorities of clients' certificates; empty: keys alone count
	Clients     []APIClient // each name once
}

// APIClient gives roles to whoever has a certificate for a name.
type APIClient struct {
	Name  string // a DNS name, URI or mail address of the certificate; its common name where it has none of these
	Roles []apikey.Role
}

// apiFile is the form of the api section.
type apiFile struct {
	Listen      string          `yaml:"listen"`
	Certificate string          `yaml:"certificate,omitempty"`
	Key         string          `yaml:"key,omitempty"`
	ClientCA    string          `yaml:"clientCA,omitempty"`
	Clients     []apiClientFile `yaml:"clients,omitempty"`
}

type apiClientFile struct {
	Name  string        `yaml:"name"`
	Roles []apikey.Role `yaml:"roles"`
}

func (a API) file() *apiFile {
	if !a.Listen.IsValid() {
		return nil
	}
	f := &apiFile{Listen: a.Listen.String(), Certificate: a.Certificate, Key: a.Key, ClientCA: a.ClientCA}
	for _, c := range a.Clients {
		f.Clients = append(f.Clients, apiClientFile(c))
	}
	return f
}

var (
	apiKeys = []yamlx.Key{
		{Name: "listen", Example: `"127.0.0.1:8470"`},
		{Name: "certificate", Example: "/etc/tagout/api.pem"},
		{Name: "key", Example: "/etc/tagout/api.key"},
		{Name: "clientCA", Example: "/etc/tagout/clients.pem"},
		{Name: "clients", Example: "[{name: ci.example.com, roles: [read, spawn]}]"},
	}
	apiClientKeys = []yamlx.Key{
		{Name: "name", Example: "ci.example.com"},
		{Name: "roles", Example: "[read, spawn]"},
	}
)

func readAPI(v yamlx.Value) API {
	m, ok := v.Map(apiKeys...)
	if !ok {
		return API{}
	}
	a := API{
		Certificate: readPath(m.Get("certificate")), Key: readPath(m.Get("key")), ClientCA: readPath(m.Get("clientCA")),
		Clients: readAPIClients(m.Get("clients")),
	}
	listen := m.Need("listen")
	if s, ok := listen.Text(); ok {
		a.Listen, _ = readAddrPort(yamlx.TextAt{Value: listen, Text: s}, "8470")
	}
	switch {
	case (a.Certificate == "") != (a.Key == ""):
		v.Refuse("write both certificate and key, or neither", "certificate and key go together")
	case a.Listen.IsValid() && !a.Listen.Addr().IsLoopback() && a.Certificate == "":
		listen.Refuse("add certificate and key, or listen on 127.0.0.1", "without TLS nothing is served to other machines")
	case a.ClientCA != "" && a.Certificate == "":
		v.Refuse("add certificate and key", "clients' certificates need TLS")
	case len(a.Clients) > 0 && a.ClientCA == "":
		v.Refuse("add clientCA: who signs the clients' certificates", "nobody's certificate would count")
	}
	return a
}

func readAPIClients(v yamlx.Value) []APIClient {
	var out []APIClient
	for _, entry := range v.List() {
		m, ok := entry.Map(apiClientKeys...)
		if !ok {
			continue
		}
		c := APIClient{}
		name := m.Need("name")
		if s, ok := name.Text(); ok {
			c.Name = s
			if slices.ContainsFunc(out, func(o APIClient) bool { return o.Name == s }) {
				name.Refuse("put all roles into one entry", "%s is in this list already", yamlx.Quote(s))
			}
			if s == "" || len(s) > 256 {
				name.Refuse("write the name in the client's certificate", "%s is no name", yamlx.Quote(s))
			}
		}
		for _, at := range m.Need("roles").Texts() {
			if !slices.Contains(apikey.Roles(), apikey.Role(at.Text)) {
				at.Refuse("write one of "+apiRoles()+" instead", "unknown role %s", yamlx.Quote(at.Text))
				continue
			}
			c.Roles = append(c.Roles, apikey.Role(at.Text))
		}
		out = append(out, c)
	}
	return out
}

func apiRoles() string {
	var words []string
	for _, r := range apikey.Roles() {
		words = append(words, string(r))
	}
	return strings.Join(words, ", ")
}

// readPath reads the absolute path of one file.
func readPath(v yamlx.Value) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	if s == "" || s[0] != '/' || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' }) {
		v.Refuse("write an absolute path, such as `/etc/tagout/api.pem`", "%s is not an absolute path", yamlx.Quote(s))
		return ""
	}
	return s
}
