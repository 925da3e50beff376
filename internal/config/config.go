// Package config reads the box's configuration file: where the real internet's resolvers are, which extra
// certificate authorities count, where alerts go, who may give orders.
package config

import (
	"fmt"
	"net/netip"
	"os"

	"github.com/goccy/go-yaml"
)

// Box is one instance's configuration.
type Box struct {
	Resolvers     []netip.AddrPort  // never empty
	UpstreamCAs   []string          // PEM files trusted beside the system's
	AlertWebhook  string            // URL, empty: no alerts are sent
	MetricsListen map[string]string // daemon -> address:port, for those that also serve metrics over TCP
	Authorities   []Authority
	DenySecrets   []string // vault names (globs) that can never be granted, beside payment_*
}

// Authority is a named person who may give orders.
type Authority struct {
	Name  string   `yaml:"name"`
	Roles []string `yaml:"roles"`
}

// boxFile is the file's form.
type boxFile struct {
	APIVersion    string            `yaml:"apiVersion"`
	Kind          string            `yaml:"kind"`
	Resolvers     []string          `yaml:"resolvers"`
	UpstreamCAs   []string          `yaml:"upstreamCAs,omitempty"`
	AlertWebhook  string            `yaml:"alertWebhook,omitempty"`
	MetricsListen map[string]string `yaml:"metricsListen,omitempty"`
	Authorities   []Authority       `yaml:"authorities,omitempty"`
	DenySecrets   []string          `yaml:"denySecrets,omitempty"`
}

// Load reads the file at path.
func Load(path string) (*Box, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the box's configuration: %w", err)
	}
	var f boxFile
	if err := yaml.UnmarshalWithOptions(raw, &f, yaml.Strict()); err != nil {
		return nil, fmt.Errorf("reading the box's configuration %s: %w", path, err)
	}
	b := &Box{UpstreamCAs: f.UpstreamCAs, AlertWebhook: f.AlertWebhook, MetricsListen: f.MetricsListen, Authorities: f.Authorities, DenySecrets: f.DenySecrets}
	for _, r := range f.Resolvers {
		ap, err := netip.ParseAddrPort(r)
		if err != nil {
			return nil, fmt.Errorf("reading the box's configuration %s: resolver %q: write address:port: %w", path, r, err)
		}
		b.Resolvers = append(b.Resolvers, ap)
	}
	return b, nil
}

// Marshal returns the file that Load reads back.
func (b *Box) Marshal() ([]byte, error) {
	f := boxFile{APIVersion: "tagout/v1", Kind: "Box", UpstreamCAs: b.UpstreamCAs, AlertWebhook: b.AlertWebhook,
		MetricsListen: b.MetricsListen, Authorities: b.Authorities, DenySecrets: b.DenySecrets}
	for _, r := range b.Resolvers {
		f.Resolvers = append(f.Resolvers, r.String())
	}
	return yaml.Marshal(f)
}
