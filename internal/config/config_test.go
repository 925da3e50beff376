package config

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

const minimal = "apiVersion: tagout/v1\nkind: Box\nresolvers: [\"203.0.113.2:53\"]\n"

func TestExample(t *testing.T) {
	t.Parallel()
	b, err := Load("../../deploy/box.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(b.Resolvers) != 2 || len(b.MetricsListen) != 5 || len(b.UpstreamCAs) != 1 || b.AlertWebhook == "" || len(b.DenySecrets) != 2 {
		t.Errorf("%+v", b)
	}
	if !b.May("Ada Operator", RoleRelease) || !b.May("Night Watch", RoleStop) || b.May("Night Watch", RoleRelease) || b.May("Mallory", RoleStop) {
		t.Errorf("authorities %+v", b.Authorities)
	}
}

func TestMinimal(t *testing.T) {
	t.Parallel()
	b, err := Parse("box.yaml", []byte(minimal))
	if err != nil {
		t.Fatal(err)
	}
	if want := (&Box{Resolvers: []netip.AddrPort{netip.MustParseAddrPort("203.0.113.2:53")}}); !reflect.DeepEqual(b, want) {
		t.Errorf("got %+v", b)
	}
	if b.May("", RoleStop) {
		t.Error("a box without authorities gives a role to somebody (invariant 1)")
	}
}

// TestRoundTrip: Load reads what Marshal writes.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	for _, want := range []*Box{
		{Resolvers: []netip.AddrPort{netip.MustParseAddrPort("203.0.113.2:53")}},
		{
			Resolvers:     []netip.AddrPort{netip.MustParseAddrPort("203.0.113.2:53"), netip.MustParseAddrPort("[2001:db8::2]:5353")},
			UpstreamCAs:   []string{"/run/practice ca.pem", "/etc/ca: #1.pem"},
			AlertWebhook:  "http://203.0.113.5:8080/hook?a=b&c={d}",
			MetricsListen: map[string]string{"proxy": "127.0.0.1:9101", "credd": "[::1]:9103"},
			Authorities:   []Authority{{"Ada Operator", []string{"spawn", "stop"}}, {"null", []string{"release"}}, {"1234", []string{"grant"}}, {"yes", []string{"stop"}}},
			DenySecrets:   []string{"*", "root_*", "[a-c]?"},
		},
	} {
		raw, err := want.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "box.yaml")
		if err := os.WriteFile(file, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := Load(file)
		if err != nil {
			t.Fatalf("%v\n%s", err, raw)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got  %+v\nwant %+v\n%s", got, want, raw)
		}
	}
}

func TestMissing(t *testing.T) {
	t.Parallel()
	if _, err := Load(filepath.Join(t.TempDir(), "box.yaml")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ add, want string }{
		"unknown key":          {"resolver: []", "4:1: unknown key \"resolver\" in the file: write `resolvers:` instead"},
		"relative CA":          {"upstreamCAs: [ca.pem]", "4:15: \"ca.pem\" is not an absolute path"},
		"webhook":              {"alertWebhook: alerts.example.com", "4:15: alertWebhook is not an http or https URL"},
		"webhook with secrets": {"alertWebhook: https://user:hunter2@alerts.example.com/", "4:15: alertWebhook has a user or a password in it"},
		"unknown daemon":       {"metricsListen: {prox: \"127.0.0.1:1\"}", "4:17: no daemon is called \"prox\": write `proxy:` instead"},
		"all addresses":        {"metricsListen: {proxy: \"0.0.0.0:9101\"}", "4:24: \"0.0.0.0:9101\" is not an address with a port"},
		"no address":           {"metricsListen: {proxy: \":9101\"}", "4:24: \":9101\" is not an address with a port"},
		"same port":            {"metricsListen: {proxy: \"127.0.0.1:1\", credd: \"127.0.0.1:1\"}", "proxy listens on 127.0.0.1:1 already"},
		"unknown role":         {"authorities: [{name: Ada, roles: [stopp]}]", "4:35: unknown role \"stopp\": write `stop` instead"},
		"no roles":             {"authorities: [{name: Ada, roles: []}]", "the list of roles is empty"},
		"no name":              {"authorities: [{roles: [stop]}]", "name is missing in entry 1 of authorities"},
		"same name":            {"authorities: [{name: Ada, roles: [stop]}, {name: Ada, roles: [grant]}]", "put all roles into one entry"},
		"bad pattern":          {"denySecrets: [\"[\"]", "\"[\" is not a pattern"},
		"resolvers twice":      {"resolvers: []", "4:1: resolvers is there already, in line 3"},
	} {
		b, err := Parse("box.yaml", []byte(minimal+c.add+"\n"))
		var problems Errors
		if b != nil || !errors.As(err, &problems) || len(problems) != 1 {
			t.Errorf("%s: got %+v, %v", name, b, err)
			continue
		}
		if !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: got %q, want %q", name, err, c.want)
		}
	}
	for name, c := range map[string]struct{ file, want string }{
		"no port":     {"apiVersion: tagout/v1\nkind: Box\nresolvers: [203.0.113.2]\n", "write `\"203.0.113.2:53\"` instead"},
		"no port, v6": {"apiVersion: tagout/v1\nkind: Box\nresolvers: [\"2001:db8::2\"]\n", "write `\"[2001:db8::2]:53\"` instead"},
		"none":        {"apiVersion: tagout/v1\nkind: Box\nresolvers: []\n", "there is no resolver"},
		"missing":     {"apiVersion: tagout/v1\nkind: Box\n", "resolvers is missing"},
		"a card":      {"apiVersion: tagout/v1\nkind: Card\nresolvers: [\"203.0.113.2:53\"]\n", "box.yaml:2:7: this build does not know \"Card\": write `Box` instead"},
		"half":        {minimal[:40], ""},
		"empty":       {"", "the file is empty"},
	} {
		if b, err := Parse("box.yaml", []byte(c.file)); err == nil || b != nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %+v, %v; want %q", name, b, err, c.want)
		}
	}
}
