package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/trip"
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
	{name: "CPU time", rule: "{on: cpuTime, over: 1s, fires: [session]}", do: "while :; do :; done", reason: "trip rule cpuTime over 1s: 1", fires: []wire.Layer{wire.LayerSession}, metric: "cpuTime"},
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
	{
		name: "a forbidden program", rule: "{on: exec, paths: [/usr/bin/tac]}", metric: "exec",
		do: "cat /usr/bin/tac >/dev/null; echo | tac; sleep 1000", reason: "trip rule exec of /usr/bin/tac: /usr/bin/tac was started",
	},
	{
		name: "a copy of it under another name", rule: "{on: exec, paths: [/usr/bin/nosuch, /usr/bin/tac]}", metric: "exec",
		do:     "cp /usr/bin/tac /workspace/cat; echo | /workspace/cat; rm /workspace/cat; sleep 1000",
		reason: "trip rule exec of /usr/bin/nosuch, /usr/bin/tac: /workspace/cat was started, which is /usr/bin/tac by its content",
	},
	{
		name: "it by its loader", rule: "{on: exec, paths: [/usr/bin/tac]}", metric: "exec",
		do:     "sleep 1000 | /lib64/ld-linux-x86-64.so.2 /usr/bin/tac",
		reason: "trip rule exec of /usr/bin/tac: /usr/bin/tac was started through its loader",
	},
	{
		name: "a program that a rule names before it is there", rule: "{on: exec, paths: [/workspace/miner]}", metric: "exec",
		do: "cp /usr/bin/true /workspace/miner; /workspace/miner; sleep 1000", reason: "trip rule exec of /workspace/miner: /workspace/miner was started",
	},
	{
		name: "a write outside the scratch places", rule: "{on: writeOutside, fires: [session]}", metric: "writeOutside", fires: []wire.Layer{wire.LayerSession},
		do:     "echo a >/workspace/a; echo a >/tmp/a; exec 5>/dev/shm/x; echo b >&5; sleep 1000",
		reason: "trip rule writeOutside: /dev/shm/x was written",
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

// TestWhatTripRulesLetBe: a rule on programs or files leaves alone what is not forbidden, what is excepted, and what the
// kernel refuses anyway.
func TestWhatTripRulesLetBe(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(strings.Replace(card, "maxTime: 60s}", "maxTime: 60s, trip: [{on: exec, paths: [/usr/bin/tac]}, {on: writeOutside, except: [/dev/shm]}, {on: auditGap}]}", 1), hostile(t, box))
	witness := box.Spawn(strings.Replace(card, "maxTime: 60s}", "maxTime: 60s, trip: [{on: exec, paths: [/usr/bin/tac]}]}", 1), hostile(t, box))
	box.Sh(kid.Name, "cat /usr/bin/tac | md5sum; cp /usr/bin/tac /tmp/t; echo x >>/tmp/t; /tmp/t --version; echo >/dev/shm/x; echo >/workspace/x; echo >/tmp/x; echo >/etc/x; echo >/dev/null; true")
	// What the witness does comes after all of that, through the same hands.
	box.Sh(witness.Name, "tac </dev/null; true")
	waitTrip(box, witness.Name)
	livesOn(box, kid.Name)
}

// TestAnAuditGapTrips: a log that is cut or removed stops the kids with a rule on gaps, and no others.
func TestAnAuditGapTrips(t *testing.T) {
	t.Parallel()
	for what, tamper := range map[string]func(log string) error{
		"was cut":     func(log string) error { return os.Truncate(log, 0) },
		"was removed": os.Remove,
		"was replaced by another file": func(log string) error {
			raw, err := os.ReadFile(log)
			if err == nil {
				err = os.WriteFile(log+".new", raw, 0o644)
			}
			return errors.Join(err, os.Rename(log+".new", log))
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			box := start(t)
			ruled := strings.Replace(bareCard, "maxTime: 60s}", "maxTime: 60s, trip: [{on: auditGap, fires: [network]}]}", 1)
			kid, control := box.Spawn(ruled, nil), box.Spawn(bareCard, nil)
			livesOn(box, kid.Name)
			if err := tamper(box.Inst.AuditFile(instance.DNSFilter)); err != nil {
				t.Fatal(err)
			}
			if tag := waitTrip(box, kid.Name); tag.Reason != "trip rule auditGap: the audit log dnsfilter.jsonl "+what {
				t.Errorf("tag %+v", tag)
			}
			livesOn(box, control.Name)
			livesOn(box, box.Spawn(ruled, nil).Name) // it began after the gap
		})
	}
}

// TestWhatCannotBeSeenTrips: while sandboxd stands still nobody watches programs; ten seconds of that stop a kid with a
// rule on them. A rule on something else sees what it needs.
func TestWhatCannotBeSeenTrips(t *testing.T) {
	t.Parallel()
	box := start(t)
	rule := func(r string) string {
		return strings.Replace(bareCard, "maxTime: 60s}", "maxTime: 60s, trip: ["+r+"]}", 1)
	}
	kid, control := box.Spawn(rule("{on: exec, paths: [/usr/bin/tac]}"), nil), box.Spawn(rule("{on: cpuTime, over: 1h}"), nil)
	livesOn(box, kid.Name)
	box.Freeze(instance.Sandboxd)
	defer box.Thaw(instance.Sandboxd)
	tag := waitTrip(box, kid.Name)
	if !strings.HasPrefix(tag.Reason, "trip rule exec of /usr/bin/tac: unknown for more than 10s: sandboxd last said") {
		t.Errorf("tag %+v", tag)
	}
	if tags, err := tagsOf(box, control.Name); err != nil || len(tags) > 0 {
		t.Errorf("%v, %+v", err, tags)
	}
}

// TestTripsOutliveKillswitchd: what happens while killswitchd is dead trips when it is back, once, and a released trip
// does not come again.
func TestTripsOutliveKillswitchd(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(strings.Replace(card, "maxTime: 60s}", "maxTime: 60s, trip: [{on: canary, names: [vault.corp.test], fires: [network]}]}", 1), hostile(t, box))
	running(t, box, kid.Name, "/bin/sh", "-c", "echo >up; until test -e go; do sleep 0.02; done; getent hosts vault.corp.test; sleep 1000")
	at := func(name string) string { return filepath.Join(box.Inst.KidDir(kid.Name), "workspace", name) }
	box.Until(soon, "the command runs", func() error { _, err := os.Stat(at("up")); return err })
	box.Freeze(instance.Killswitchd)
	if err := os.WriteFile(at("go"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	box.WaitRecord("the lookup", func(r *audit.Record) bool { return r.Reason == reason.Canary && r.Kid == kid.Name })
	box.Kill9(instance.Killswitchd)
	tag := waitTrip(box, kid.Name)
	box.Kill9(instance.Killswitchd)
	box.WaitHealthy(instance.Killswitchd)
	// A trip that came after the restart would come with the first look; the second kid's shows that it has been.
	witness := box.Spawn(strings.Replace(bareCard, "maxTime: 60s}", "maxTime: 60s, trip: [{on: wallTime, over: 1s}]}", 1), nil)
	waitTrip(box, witness.Name)
	tags, err := tagsOf(box, kid.Name)
	if err != nil || len(tags) != 1 || tags[0].Stop != tag.Stop {
		t.Errorf("%v, tags %+v", err, tags)
	}
}

// TestAFloodOfProgramsHoldsNobodyUp: a kid that starts programs as fast as it can is not slowed down by being watched, and
// is stopped where it outruns the watch or starts what is forbidden.
func TestAFloodOfProgramsHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(strings.Replace(card, "maxTime: 60s}", "maxTime: 60s, trip: [{on: exec, paths: [/usr/bin/tac], fires: [network]}]}", 1), hostile(t, box))
	running(t, box, kid.Name, "/bin/bash", "-c", "for p in 1 2 3 4; do while :; do /usr/bin/true; done & done; sleep 2; tac </dev/null; wait")
	if tag := waitTrip(box, kid.Name); !strings.HasPrefix(tag.Reason, "trip rule exec of /usr/bin/tac: ") || strings.Contains(tag.Reason, "unknown") {
		t.Errorf("tag %+v", tag)
	}
}

// TestTheBoxsTripRules: rules of the box's configuration hold for every kid, whatever its card says.
func TestTheBoxsTripRules(t *testing.T) {
	t.Parallel()
	box := testenv.StartWith(t, func(b *config.Box) {
		b.Trip = []trip.Rule{
			{On: trip.Canary, Names: []string{"vault.corp.test"}, Fires: []wire.Layer{wire.LayerNetwork}},
			{On: trip.Exec, Paths: []string{"/usr/bin/tac"}, Fires: wire.AllLayers()},
			{On: trip.Processes, Over: 40, Fires: wire.AllLayers()},
		}
	})
	for line, reason := range map[string]string{
		"getent hosts vault.corp.test; sleep 1000":       "trip rule canary: vault.corp.test",
		"tac </dev/null; sleep 1000":                     "trip rule exec of /usr/bin/tac: ",
		"for i in $(seq 60); do sleep 1000 & done; wait": "trip rule processes over 40: ",
	} {
		kid := box.Spawn(bareCard, nil)
		running(t, box, kid.Name, "/bin/sh", "-c", line)
		if tag := waitTrip(box, kid.Name); !strings.HasPrefix(tag.Reason, reason) {
			t.Errorf("%s: tag %+v", line, tag)
		}
	}
	livesOn(box, box.Spawn(bareCard, nil).Name)
}
