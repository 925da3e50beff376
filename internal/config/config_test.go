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
	"time"

	"tagout/internal/trip"
	"tagout/internal/wire"
)

// adaKey is a public key whose private half was thrown away.
const adaKey = "Ada_Operator+a35edb3e+ASBNc2H2rxVDBl4BE2Q+7HkbkySFfu+e91SknlLf2Jxp"

const minimal = "apiVersion: tagout/v1\nkind: Box\nresolvers: [\"203.0.113.2:53\"]\n"

func TestExample(t *testing.T) {
	t.Parallel()
	b, err := Load("../../deploy/box.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(b.Resolvers) != 2 || len(b.MetricsListen) != 5 || len(b.UpstreamCAs) != 1 || b.AlertWebhook == "" || len(b.Alerts) != 3 || len(b.Sinks()) != 4 || len(b.DenySecrets) != 2 {
		t.Errorf("%+v", b)
	}
	if !b.May("Ada Operator", RoleRelease) || !b.May("Night Watch", RoleStop) || b.May("Night Watch", RoleRelease) || b.May("Mallory", RoleStop) {
		t.Errorf("authorities %+v", b.Authorities)
	}
	ends := time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC) // all of 2030-12-31 is still good
	if p := b.People(); len(p) != 3 || p[0].Key != adaKey || !p[0].ValidUntil.IsZero() || p[1].Key == "" || !p[1].ValidUntil.Equal(ends) || p[2].Key != "" {
		t.Errorf("people %+v", p)
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
			Authorities:   []Authority{{Name: "Ada Operator", Roles: []string{"spawn", "stop"}, Key: adaKey, ValidUntil: time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC)}, {Name: "null", Roles: []string{"release"}}, {Name: "1234", Roles: []string{"grant"}}, {Name: "yes", Roles: []string{"stop"}}},
			DenySecrets:   []string{"*", "root_*", "[a-c]?"},
			Alerts: []Sink{
				{"ops", SinkWebhook, "https://alerts.example.com/t?a={b}", "/etc/tagout/key #1", time.Second, time.Minute, 16},
				{"pager", SinkAlertmanager, "http://[::1]:9093/prefix", "", time.Hour, DefaultTimeout, 65536},
				{"siem-1", SinkSyslog, "unix:///dev/log", "", 1500 * time.Millisecond, DefaultTimeout, DefaultQueue},
				{"007", SinkSyslog, "tcp://[2001:db8::1]:601", "", DefaultWindow, DefaultTimeout, DefaultQueue},
			},
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
		"no key":               {"authorities: [{name: Ada, roles: [stop], key: hunter2}]", "4:47: the key cannot be used: this is no key as `tagout key new` prints it: write what `tagout key new` printed for this person"},
		"private key":          {"authorities: [{name: Ada, roles: [stop], key: PRIVATE+KEY+hunter2}]", "this is the private key"},
		"another's key":        {"authorities: [{name: Ada, roles: [stop], key: " + adaKey + "}]", "this key was made for Ada_Operator"},
		"one key, two people":  {"authorities: [{name: Ada Operator, roles: [stop], key: " + adaKey + "}, {name: Ada_Operator, roles: [release], key: " + adaKey + "}]", "\"Ada Operator\" has this key already"},
		"end":                  {"authorities: [{name: Ada, roles: [stop], validUntil: soon}]", "\"soon\" is not a date: write a day, such as `2030-12-31`"},
		"bad pattern":          {"denySecrets: [\"[\"]", "\"[\" is not a pattern"},
		"alert without name":   {"alerts: [{webhook: \"https://a.example/\"}]", "4:10: name is missing in entry 1 of alerts"},
		"alert name":           {"alerts: [{name: Ops, webhook: \"https://a.example/\"}]", "4:17: \"Ops\" cannot name a receiver"},
		"alert name taken":     {"alerts: [{name: webhook, webhook: \"https://a.example/\"}]", "4:17: \"webhook\" is the name of the receiver that alertWebhook gives"},
		"alert name twice":     {"alerts: [{name: a, syslog: \"udp://h:1\"}, {name: a, syslog: \"udp://h:1\"}]", "\"a\" is in this list already"},
		"alert to nowhere":     {"alerts: [{name: a}]", "4:10: nothing says where the alerts go: write one of webhook, alertmanager, syslog"},
		"alert to two":         {"alerts: [{name: a, webhook: \"https://a.example/\", syslog: \"udp://h:514\"}]", "4:59: a receiver cannot be both webhook and syslog"},
		"alert key":            {"alerts: [{name: a, webhok: \"https://a.example/\", syslog: \"udp://h:514\"}]", "write `webhook:` instead"},
		"alert URL":            {"alerts: [{name: a, alertmanager: \"127.0.0.1:9093\"}]", "4:34: alertmanager is not an http or https URL"},
		"alert URL's secret":   {"alerts: [{name: a, webhook: \"https://user:hunter2@a.example/\"}]", "4:29: webhook has a user or a password in it"},
		"inline secret":        {"alerts: [{name: a, webhook: \"https://a.example/\", secretFile: hunter2}]", "4:63: secretFile is not an absolute path"},
		"syslog's secret":      {"alerts: [{name: a, syslog: \"udp://h:514\", secretFile: /x}]", "only a webhook's alerts are signed"},
		"syslog scheme":        {"alerts: [{name: a, syslog: \"tls://h:514\"}]", "4:28: \"tls://h:514\" is not an address of a syslog receiver"},
		"syslog port":          {"alerts: [{name: a, syslog: \"udp://h\"}]", "4:28: \"udp://h\" is not a host and a port"},
		"syslog path":          {"alerts: [{name: a, syslog: \"unix://dev/log\"}]", "4:28: \"unix://dev/log\" is not the path of a socket"},
		"alert window":         {"alerts: [{name: a, syslog: \"udp://h:514\", window: 10ms}]", "window is \"10ms\": write a time from 1s to 1h0m0s"},
		"alert timeout":        {"alerts: [{name: a, syslog: \"udp://h:514\", timeout: soon}]", "timeout is \"soon\""},
		"alert queue":          {"alerts: [{name: a, syslog: \"udp://h:514\", queue: 1}]", "queue is 1: write a number from 16 to 65536"},
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

// TestTripRules: the box's trip rules are read as a card's are, and come back as they were.
func TestTripRules(t *testing.T) {
	t.Parallel()
	b, err := Load("../../deploy/box.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(b.Trip) != 5 || b.Trip[0].String() != "wallTime over 24h" || len(b.Trip[2].Names) != 2 {
		t.Errorf("%+v", b.Trip)
	}
	b.Trip = append(b.Trip, trip.Rule{On: trip.BytesOut, Over: 5 << 20, Fires: wire.AllLayers()}, trip.Rule{On: trip.Processes, Fires: wire.AllLayers()})
	raw, err := b.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	back, err := Parse("box.yaml", raw)
	if err != nil || !reflect.DeepEqual(back.Trip, b.Trip) {
		t.Errorf("%v: got %+v, want %+v", err, back, b.Trip)
	}
	if _, err := Parse("box.yaml", []byte(minimal+"trip: [{on: denied, over: 1}]\n")); err == nil || !strings.Contains(err.Error(), "box.yaml:4:8: within is missing") {
		t.Errorf("half a rule: %v", err)
	}
}
