// Package config reads the box's configuration file: where the real internet's resolvers are, which extra
// certificate authorities count, where alerts go, who may give orders. The file is read strictly: unknown
// keys and bad values are refused, all at once, each with its line and column and with what to write instead.
package config

import (
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/goccy/go-yaml"

	"tagout/internal/authority"
	"tagout/internal/lease"
	"tagout/internal/trip"
	"tagout/internal/yamlx"
)

// APIVersion and Kind are the first lines of every box configuration.
const (
	APIVersion = "tagout/v1"
	Kind       = "Box"
)

// Roles that an authority can have.
const (
	RoleSpawn   = authority.RoleSpawn
	RoleGrant   = authority.RoleGrant
	RoleStop    = authority.RoleStop
	RoleRelease = authority.RoleRelease
	RoleHost    = authority.RoleHost
)

// Errors is everything that is wrong with a configuration; Parse returns no other error.
type Errors = yamlx.Problems

// Box is one instance's configuration. Everything but Resolvers may be empty.
type Box struct {
	Resolvers     []netip.AddrPort  // never empty
	UpstreamCAs   []string          // PEM files (absolute paths) trusted beside the system's
	AlertWebhook  string            // http or https URL that gets alerts unsigned; empty: there is no such sink
	Alerts        []Sink            // more receivers of alerts, each name once
	MetricsListen map[string]string // daemon -> address:port, for those that also serve metrics over TCP
	Authorities   []Authority       // each name once
	DenySecrets   []string          // vault names (path.Match globs) that can never be granted, beside payment_*
	KidLimits     KidLimits
	Proof         Proof
	Trip          []trip.Rule // for every kid, beside its card's
	Leases        lease.Terms // zero: the default
	API           API         // over TCP
	Issuer        Issuer      // of tokens for services of the user's own
	Audit         Audit       // how the logs are kept
	SpawnSigned   bool        // making a kid takes a signature

	Providers []Provider // that secrets are leased from; each name once

	TokenLifetime time.Duration // the longest that a session's tokens live; zero: TokenLifetime, the default
}

// Load reads the file at path. The error is an Errors or the file system's.
func Load(path string) (*Box, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the box's configuration: %w", err)
	}
	b, err := Parse(path, raw)
	if err != nil {
		return nil, fmt.Errorf("reading the box's configuration: %w", err)
	}
	return b, nil
}

// boxFile is the file's form, for writing.
type boxFile struct {
	APIVersion    string            `yaml:"apiVersion"`
	Kind          string            `yaml:"kind"`
	Resolvers     []string          `yaml:"resolvers"`
	UpstreamCAs   []string          `yaml:"upstreamCAs,omitempty"`
	AlertWebhook  string            `yaml:"alertWebhook,omitempty"`
	Alerts        []sinkFile        `yaml:"alerts,omitempty"`
	MetricsListen map[string]string `yaml:"metricsListen,omitempty"`
	Authorities   []authorityFile   `yaml:"authorities,omitempty"`
	DenySecrets   []string          `yaml:"denySecrets,omitempty"`
	KidLimits     KidLimits         `yaml:"kidLimits,omitempty"`
	Proof         *proofFile        `yaml:"proof,omitempty"`
	Trip          []tripFile        `yaml:"trip,omitempty"`
	Leases        leasesFile        `yaml:"leases,omitempty"`
	Spawn         spawnFile         `yaml:"spawn,omitempty"`
	Tokens        tokensFile        `yaml:"tokens,omitempty"`
	Providers     []providerFile    `yaml:"providers,omitempty"`
	API           *apiFile          `yaml:"api,omitempty"`
	Issuer        *issuerFile       `yaml:"issuer,omitempty"`
	Audit         *auditFile        `yaml:"audit,omitempty"`
}

// Marshal returns the file that Load reads back. It does not check b.
func (b *Box) Marshal() ([]byte, error) {
	f := boxFile{
		APIVersion: APIVersion, Kind: Kind, UpstreamCAs: b.UpstreamCAs, AlertWebhook: b.AlertWebhook,
		MetricsListen: b.MetricsListen, DenySecrets: b.DenySecrets,
		KidLimits: b.KidLimits, Proof: b.Proof.file(), Trip: tripFiles(b.Trip), Leases: writeLeases(b.Leases), API: b.API.file(), Spawn: spawnFile{Signed: b.SpawnSigned},
		Tokens: writeTokens(b.TokenLifetime), Issuer: b.Issuer.file(), Audit: b.Audit.file(),
	}
	for _, a := range b.Authorities {
		f.Authorities = append(f.Authorities, a.file())
	}
	for _, p := range b.Providers {
		f.Providers = append(f.Providers, p.file())
	}
	for _, s := range b.Alerts {
		f.Alerts = append(f.Alerts, s.file())
	}
	for _, r := range b.Resolvers {
		f.Resolvers = append(f.Resolvers, r.String())
	}
	return yaml.Marshal(f)
}
