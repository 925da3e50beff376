package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// tripCard is card with a canary among its credentials.
var tripCard = strings.Replace(card, "- {secret: vendor_api, env: VENDOR_API_KEY}", "- {secret: vendor_api, env: VENDOR_API_KEY}\n    - {secret: bait, env: BAIT}", 1)

// tripping returns tripCard with trip rules.
func tripping(rules string) string {
	return strings.Replace(tripCard, "maxTime: 60s}", "maxTime: 60s, trip: ["+rules+"]}", 1)
}

// tags returns the tags that hang on a kid.
func tagsOf(box *testenv.Box, kid string) (out []wire.Tag, err error) {
	var all []wire.Tag
	if err := box.Client(instance.Killswitchd).Call(box.T.Context(), http.MethodGet, "/v1/tags", nil, &all); err != nil {
		return nil, err
	}
	for _, t := range all {
		if t.Scope.Kid == kid || t.Scope.All {
			out = append(out, t)
		}
	}
	return out, nil
}

// waitTrip waits until a trip rule has stopped the kid and returns its tag.
func waitTrip(box *testenv.Box, kid string) (tag wire.Tag) {
	box.T.Helper()
	box.Until(soon, "a trip rule stops "+kid, func() error {
		tags, err := tagsOf(box, kid)
		if err != nil || len(tags) == 0 {
			return errors.Join(err, errors.New("no tag"))
		}
		tag = tags[0]
		return nil
	})
	return tag
}

// livesOn fails the test unless the kid runs, under no tag.
func livesOn(box *testenv.Box, kid string) {
	box.T.Helper()
	if tags, err := tagsOf(box, kid); err != nil || len(tags) > 0 {
		box.T.Errorf("%s should live on: %v, tags %+v", kid, err, tags)
	}
	if out := box.Exec(kid, "/bin/true"); out.Exit.Result != "exited" || out.Exit.Code != 0 {
		box.T.Errorf("%s should live on: %+v", kid, out.Exit)
	}
}

// tripCase is something that a kid does and a rule that it trips.
type tripCase struct {
	name, rule string
	do         string // run in the kid by bash
	reason     string // the tag's reason begins with it
	fires      []wire.Layer
	metric     string
}

var tripCases = []tripCase{
	{
		name: "denied by the kernel", rule: "{on: denied, over: 20, within: 1m, fires: [network]}", metric: "denied",
		do:     "for i in $(seq 30); do (exec 3<>/dev/tcp/203.0.113.200/81) 2>/dev/null; done; sleep 1000",
		reason: "trip rule denied over 20 within 1m: ", fires: []wire.Layer{wire.LayerNetwork},
	},
	{
		name: "denied by dnsfilter", rule: "{on: denied, over: 20, within: 1m, fires: [network, credential]}", metric: "denied",
		do:     "for i in $(seq 30); do getent hosts n$i.nowhere.test; done; sleep 1000",
		reason: "trip rule denied over 20 within 1m: ", fires: []wire.Layer{wire.LayerNetwork, wire.LayerCredential},
	},
	{
		name: "denied by the proxy", rule: "{on: denied, over: 20, within: 1m}", metric: "denied",
		do:     `for i in $(seq 30); do (exec 3<>/dev/tcp/files.vendor.test/80; printf "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n" >&3; read -r line <&3); done; sleep 1000`,
		reason: "trip rule denied over 20 within 1m: ",
	},
	{
		name: "bytes out", rule: "{on: bytesOut, over: 1MiB}", metric: "bytesOut",
		do:     "exec 3<>/dev/tcp/ticks.vendor.test/7000; echo bulk trip >&3; head -c 2000000 /dev/zero | tr '\\0' 'x' >&3; sleep 1000",
		reason: "trip rule bytesOut over 1MiB: ",
	},
	{name: "wall time", rule: "{on: wallTime, over: 3s}", do: "sleep 1000", reason: "trip rule wallTime over 3s: 3.", metric: "wallTime"},
	{name: "CPU time", rule: "{on: cpuTime, over: 1s, fires: [session]}", do: "while :; do :; done", reason: "trip rule cpuTime over 1s: 1.", fires: []wire.Layer{wire.LayerSession}, metric: "cpuTime"},
	{
		name: "canary name, looked up", rule: "{on: canary, names: [vault.corp.test], fires: [session, network]}", metric: "canary",
		do: "getent hosts VAULT.corp.test; sleep 1000", reason: "trip rule canary: vault.corp.test", fires: []wire.Layer{wire.LayerSession, wire.LayerNetwork},
	},
	{
		name: "canary name, looked up among a flood", rule: `{on: canary, names: ["**.corp.test"]}`, metric: "canary",
		do:     "for i in $(seq 100); do getent hosts n$i.nowhere.test & done; wait; getent hosts a.b.corp.test; sleep 1000",
		reason: "trip rule canary: a.b.corp.test",
	},
	{
		name: "canary name, asked of the proxy", rule: "{on: canary, names: [vault.corp.test]}", metric: "canary",
		do:     `exec 3<>/dev/tcp/$(sed -n "s/nameserver //p" /etc/resolv.conf)/3128; printf "CONNECT vault.corp.test:443 HTTP/1.1\r\nHost: vault.corp.test:443\r\n\r\n" >&3; sleep 1000`,
		reason: "trip rule canary: vault.corp.test",
	},
	{
		name: "canary credential", rule: "{on: canary}", metric: "canary",
		do:     `exec 3<>/dev/tcp/files.vendor.test/80; printf "GET / HTTP/1.1\r\nHost: files.vendor.test\r\nAuthorization: Bearer $BAIT\r\n\r\n" >&3; sleep 1000`,
		reason: "trip rule canary: files.vendor.test:80: secret bait is a canary",
	},
	{
		name: "token misuse", rule: "{on: tokenMisuse, fires: [credential]}", metric: "tokenMisuse", fires: []wire.Layer{wire.LayerCredential},
		do:     `exec 3<>/dev/tcp/files.vendor.test/80; printf "GET / HTTP/1.1\r\nHost: files.vendor.test\r\nAuthorization: Bearer $VENDOR_API_KEY\r\n\r\n" >&3; sleep 1000`,
		reason: "trip rule tokenMisuse: files.vendor.test:80: ",
	},
	{name: "processes", rule: "{on: processes, over: 40}", do: "for i in $(seq 60); do sleep 1000 & done; wait", reason: "trip rule processes over 40: ", metric: "processes"},
}

// TestTripRules: one rule of each kind stops the kid that breaks it, with the layers that it names and a tag that says
// why; a kid that does the same without the rule lives on.
func TestTripRules(t *testing.T) {
	t.Parallel()
	box := start(t)
	if r := box.TagoutIn(strings.NewReader("a value that nobody gets"), "vault", "set", "bait", "--canary"); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	for _, c := range tripCases {
		t.Run(c.name, func(t *testing.T) { box := box.For(t); runTripCase(t, box, c) })
	}
	text := metricsOf(t, box, instance.Killswitchd)
	for _, c := range tripCases {
		if !strings.Contains(text, fmt.Sprintf("tagout_killswitch_trips_total{rule=%q}", c.metric)) {
			t.Errorf("no metric counts trips of %s", c.metric)
		}
	}
}

func runTripCase(t *testing.T, box *testenv.Box, c tripCase) {
	t.Helper()
	kid, control := box.Spawn(tripping(c.rule), hostile(t, box)), box.Spawn(tripCard, hostile(t, box))
	defer box.Destroy(kid.Name)
	defer box.Destroy(control.Name)
	running(t, box, control.Name, "/bin/bash", "-c", c.do)
	done := running(t, box, kid.Name, "/bin/bash", "-c", c.do)
	tag := waitTrip(box, kid.Name)
	want := c.fires
	if want == nil {
		want = wire.AllLayers()
	}
	if !strings.HasPrefix(tag.Reason, c.reason) || tag.By != "trip rule" || tag.Cause != "trip" || !slices.Equal(tag.Layers, want) {
		t.Errorf("tag %+v, want the reason %q and the layers %v", tag, c.reason, want)
	}
	if slices.Contains(want, wire.LayerSession) {
		if out := wait(t, "the command", done); out.Exit.Result != "stopped" {
			t.Errorf("the command ended with %+v", out.Exit)
		}
	}
	rec := box.WaitRecord("the trip", func(r *audit.Record) bool { return r.Event == audit.EventTripped && r.Kid == kid.Name })
	if rec.Reason != reason.Tripped || rec.Detail != tag.Reason || rec.Fields["stop"] != tag.Stop || rec.Fields["measured"] == "" || rec.Session != kid.Session {
		t.Errorf("record %+v", rec)
	}
	livesOn(box, control.Name)
}

// metricsOf returns what a daemon says of itself.
func metricsOf(t *testing.T, box *testenv.Box, daemon string) string {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", box.Inst.Socket(daemon))
	}}}
	reply, err := c.Get("http://" + daemon + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer reply.Body.Close() // only read
	raw, err := io.ReadAll(reply.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}
