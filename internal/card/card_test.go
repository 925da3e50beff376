package card

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/trip"
	"tagout/internal/wire"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// minimal has everything that is required and nothing else.
const minimal = `apiVersion: tagout/v1
kind: Card
name: small
task: Do nothing.
image: host
stop: {authority: "Ada Operator", maxTime: 10s}
`

func TestMinimal(t *testing.T) {
	t.Parallel()
	c, err := Parse("small.yaml", []byte(minimal))
	if err != nil {
		t.Fatal(err)
	}
	want := &Card{
		Name: "small", Task: "Do nothing.", Owner: "Ada Operator", Image: "host", Env: map[string]string{},
		Filesystem: Filesystem{Workspace: 64 << 20, Tmp: 16 << 20},
		Limits:     Limits{PIDs: 128, Memory: 256 << 20, CPUs: 1, OpenFiles: 1024, DiskRate: 256 << 20, Idle: time.Hour, Lifetime: 24 * time.Hour},
		Stop:       session.Stop{Authority: "Ada Operator", MaxTime: 10 * time.Second},
		Hash:       c.Hash,
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got  %+v\nwant %+v", c, want)
	}
	if len(c.Hash) != 64 {
		t.Errorf("hash %q", c.Hash)
	}
	p, err := policy.Compile(c.Egress)
	if err != nil {
		t.Fatal(err)
	}
	if _, d := p.Lookup("api.vendor.test"); d.Verdict != policy.Deny {
		t.Error("a card without egress allows something (invariant 1)")
	}
}

func TestExamples(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../deploy/cards/*.yaml")
	if err != nil || len(files) < 2 {
		t.Fatalf("cards %v, %v", files, err)
	}
	for _, file := range files {
		c := readCard(t, file)
		if want := strings.TrimSuffix(filepath.Base(file), ".yaml"); c.Name != want {
			t.Errorf("%s: the card is called %s", file, c.Name)
		}
	}
}

func TestPractice(t *testing.T) {
	t.Parallel()
	c := readCard(t, "../../deploy/cards/practice.yaml")
	p, err := policy.Compile(c.Egress)
	if err != nil {
		t.Fatal(err)
	}
	d := p.Connect("api.vendor.test", 443)
	if d.Verdict != policy.Allow || !d.Rule.Inspect || d.Rule.Credential != "vendor_api" || d.Rule.Line == 0 {
		t.Errorf("api.vendor.test:443: %+v", d)
	}
	if d := p.Connect("files.vendor.test", 80); d.Verdict != policy.Allow || d.Rule.Protocol != policy.HTTP {
		t.Errorf("files.vendor.test:80: %+v", d)
	}
	if want := []session.Secret{{Name: "vendor_api", Env: "VENDOR_API_KEY"}}; !reflect.DeepEqual(c.Identity.Scope, want) {
		t.Errorf("scope %v", c.Identity.Scope)
	}
	if in := c.Filesystem.Inputs; len(in) != 2 || in[0] != (Input{"escape.sh", "/workspace/escape.sh", 0o755}) {
		t.Errorf("inputs %v", in)
	}
	if c.Limits != (Limits{128, 256 << 20, 1, 1024, 256 << 20, time.Hour, 24 * time.Hour}) || c.Env["LANG"] != "C.UTF-8" {
		t.Errorf("limits %v, env %v", c.Limits, c.Env)
	}
}

func readCard(t *testing.T, file string) *Card {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Parse(file, data)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestManyProblems: one card with everything wrong, all of it reported at once (E20 among it).
func TestManyProblems(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("testdata/many.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c, err := Parse("many.yaml", data)
	var problems Errors
	if c != nil || !errors.As(err, &problems) {
		t.Fatalf("got %v, %v", c, err)
	}
	got := []byte(problems.Error() + "\n")
	if *update {
		if err := os.WriteFile("testdata/many.golden", got, 0o644); err != nil { // a golden file
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("testdata/many.golden")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("run the test with -update and read the difference; got\n%s", got)
	}
	lines := strings.Count(string(data), "\n")
	for _, p := range problems {
		if p.Line < 1 || p.Line > lines || p.Col < 1 || p.What == "" || p.Fix == "" {
			t.Errorf("incomplete problem %+v", p)
		}
	}
	if strings.Contains(string(got), "0123456789abcdefghij") {
		t.Error("a message quotes a secret (invariant 3)")
	}
}

// variant is minimal with lines added or replaced.
func variant(extra string) string {
	key, _, _ := strings.Cut(extra, ":")
	var kept []string
	for line := range strings.Lines(minimal) {
		if !strings.HasPrefix(line, key+":") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "") + extra + "\n"
}

func allowing(rule string) string { return variant("egress: {allow: [" + rule + "]}") }

// cases are cards with one thing each that is right or wrong. They are judged by Parse and by the published
// schema: inSchema says that the schema can express the problem.
var cases = []struct {
	name, card string
	want       string // part of the only problem; "" where the card is right
	inSchema   bool
}{
	{"E20 link-local range", allowing(`{host: 169.254.0.0/16, ports: [443], protocol: tls}`), "can never be allowed", true},
	{"E20 metadata address", allowing(`{host: 169.254.169.254, ports: [80], protocol: http}`), "can never be allowed", false},
	{"private address", allowing(`{host: 10.0.0.5, ports: [80], protocol: http}`), "under its `addresses`", false},
	{"public address", allowing(`{host: 203.0.113.7, ports: [80], protocol: http}`), "write the host's name", false},
	{"E20 star", allowing(`{host: "*", ports: [443], protocol: tls}`), "every host", true},
	{"E20 *.com", allowing(`{host: "*.com", ports: [443], protocol: tls}`), "everybody's names under com", false},
	{"*.co.uk", allowing(`{host: "*.co.uk", ports: [443], protocol: tls}`), "everybody's names under co.uk", false},
	{"*.github.io", allowing(`{host: "*.github.io", ports: [443], protocol: tls}`), "everybody's names", false},
	{"*.test", allowing(`{host: "*.test", ports: [443], protocol: tls}`), "everybody's names under test", false},
	{"wildcard", allowing(`{host: "*.vendor.test", ports: [443], protocol: tls}`), "", false},
	{"star inside", allowing(`{host: "a.*.vendor.test", ports: [443], protocol: tls}`), "stars may only", false},
	{"single label", allowing(`{host: kubernetes, ports: [443], protocol: tls}`), "", false},
	{"U-label", allowing(`{host: bücher.test, ports: [443], protocol: tls}`), "", false},
	{"E20 port 0", allowing(`{host: a.test, ports: [0], protocol: tls}`), "0 is not a port", true},
	{"E20 port 70000", allowing(`{host: a.test, ports: [70000], protocol: tls}`), "70000 is not a port", true},
	{"huge port", allowing(`{host: a.test, ports: [99999999999999999999], protocol: tls}`), "ports", true},
	{"hex port", allowing(`{host: a.test, ports: [0x1bb], protocol: tls}`), "plain decimal", false},
	{"port twice", allowing(`{host: a.test, ports: [443, 443], protocol: tls}`), "in this list already", true},
	{"no ports", allowing(`{host: a.test, protocol: tls}`), "ports is missing", true},
	{"empty ports", allowing(`{host: a.test, ports: [], protocol: tls}`), "empty", true},
	{"DNS port", allowing(`{host: a.test, ports: [53], protocol: tcp}`), "name servers", false},
	{"E20 empty host", allowing(`{host: "", ports: [443], protocol: tls}`), "host is empty", true},
	{"blank host", allowing(`{host: " ", ports: [443], protocol: tls}`), "host is empty", true},
	{"URL", allowing(`{host: "https://a.test/", ports: [443], protocol: tls}`), "without scheme", true},
	{"NUL", allowing(`{host: "evil\0.a.test", ports: [443], protocol: tls}`), "control byte", true},
	{"metadata name", allowing(`{host: metadata.google.internal, ports: [80], protocol: http}`), "never be allowed", false},
	{"E20 duplicate rule", allowing(`{host: a.test, ports: [443], protocol: tls}, {host: A.test., ports: [80, 443], protocol: tls}`), "has a rule already, in line 7", false},
	{"E20 unknown key", allowing(`{host: a.test, ports: [443], protocol: tls, methds: [GET]}`), "write `methods:` instead", true},
	{"unknown protocol", allowing(`{host: a.test, ports: [443], protocol: https}`), "write `protocol: tls` instead", true},
	{"no protocol", allowing(`{host: a.test, ports: [443]}`), "protocol is missing", true},
	{"inspected http", allowing(`{host: a.test, ports: [80], protocol: http, inspect: true}`), "only TLS", true},
	{"methods on tls", allowing(`{host: a.test, ports: [443], protocol: tls, methods: [GET]}`), "add `inspect: true`", true},
	{"paths on tcp", allowing(`{host: a.test, ports: [1], protocol: tcp, paths: ["/"]}`), "needs requests", true},
	{"methods, inspected", allowing(`{host: a.test, ports: [443], protocol: tls, inspect: true, methods: [GET], paths: ["/v1/*"]}`), "", false},
	{"no methods at all", allowing(`{host: a.test, ports: [80], protocol: http, methods: []}`), "the list is empty", true},
	{"small method", allowing(`{host: a.test, ports: [80], protocol: http, methods: [get]}`), "capital letters", true},
	{"TRACE", allowing(`{host: a.test, ports: [80], protocol: http, methods: [TRACE]}`), "never be allowed", true},
	{"path with query", allowing(`{host: a.test, ports: [80], protocol: http, paths: ["/a?b"]}`), "contains ?", true},
	{"path with dots", allowing(`{host: a.test, ports: [80], protocol: http, paths: ["/a/../b"]}`), "never match", false},
	{"grant", allowing(`{host: a.test, ports: [80], protocol: http, addresses: [10.0.0.5, "fd12::/64"]}`), "", false},
	{"grant of metadata", allowing(`{host: a.test, ports: [80], protocol: http, addresses: [169.254.169.254]}`), "cannot be granted", false},
	{"grant of link-local", allowing(`{host: a.test, ports: [80], protocol: http, addresses: [169.254.0.0/16]}`), "cannot be granted", false},
	{"grant of too much", allowing(`{host: a.test, ports: [80], protocol: http, addresses: ["0.0.0.0/0"]}`), "cannot be granted", false},
	{"grant of Tagout's own", allowing(`{host: a.test, ports: [80], protocol: http, addresses: [198.18.0.0/24]}`), "cannot be granted", false},
	{"grant of a name", allowing(`{host: a.test, ports: [80], protocol: http, addresses: [b.test]}`), "not an address", true},
	{"credential out of scope", allowing(`{host: a.test, ports: [80], protocol: http, credential: other}`), "not in identity.scope", false},
	{"credential on tls", variant("identity: {scope: [{secret: s, env: S}]}\negress: {allow: [{host: a.test, ports: [443], protocol: tls, credential: s}]}"), "needs requests", true},
	{"credential", variant("identity: {scope: [{secret: s, env: S}]}\negress: {allow: [{host: a.test, ports: [443], protocol: tls, inspect: true, credential: s}]}"), "", false},
	{"contradiction", variant("egress:\n  allow: [{host: a.test, ports: [443], protocol: tls}]\n  deny: [{host: A.test, ports: [443]}]"), "allowed in line 8", false},
	{"contradiction on all ports", variant("egress:\n  allow: [{host: a.test, ports: [443], protocol: tls}]\n  deny: [{host: A.test}]"), "allowed in line 8", false},
	{"deny inside a wildcard", variant("egress:\n  allow: [{host: \"*.vendor.test\", ports: [443], protocol: tls}]\n  deny: [{host: a.vendor.test}, {address: 203.0.113.0/28, ports: [443]}]"), "", false},
	{"deny of a suffix", variant(`egress: {deny: [{host: "*.test"}]}`), "", false},
	{"deny of all", variant(`egress: {deny: [{host: "*"}]}`), "every host", true},
	{"deny twice", variant(`egress: {deny: [{host: a.test}, {host: A.test}]}`), "denied already", false},
	{"deny of nothing", variant(`egress: {deny: [{ports: [25]}]}`), "neither", true},
	{"deny of two", variant(`egress: {deny: [{host: a.test, address: 10.0.0.0/8}]}`), "two rules", true},
	{"empty egress", variant(`egress: {}`), "", false},
	{"deny of a suffix of any depth", variant(`egress: {deny: [{host: "**.test"}]}`), "", false},
	{"deny of all, doubly", variant(`egress: {deny: [{host: "**"}]}`), "every host", true},
	{"contradiction by a wildcard", variant("egress:\n  allow: [{host: a.vendor.test, ports: [443], protocol: tls}]\n  deny: [{host: \"*.vendor.test\"}]"), "denied here by *.vendor.test and allowed in line 8", false},
	{"contradiction of wildcards", variant("egress:\n  allow: [{host: \"*.a.vendor.test\", ports: [443], protocol: tls}]\n  deny: [{host: \"**.vendor.test\", ports: [443]}]"), "denied here by **.vendor.test", false},
	{"deny one label under any", variant("egress:\n  allow: [{host: \"**.vendor.test\", ports: [443], protocol: tls}]\n  deny: [{host: \"*.vendor.test\"}]"), "", false},
	{"deny deeper than allowed", variant("egress:\n  allow: [{host: a.b.vendor.test, ports: [443], protocol: tls}]\n  deny: [{host: \"*.vendor.test\"}]"), "", false},
	{"deny of another port", variant("egress:\n  allow: [{host: a.vendor.test, ports: [443], protocol: tls}]\n  deny: [{host: \"**.vendor.test\", ports: [80]}]"), "", false},
	{"deny of a granted address", variant("egress:\n  allow: [{host: a.test, ports: [80], protocol: http, addresses: [10.0.0.5]}]\n  deny: [{address: 10.0.0.0/8}]"), "granted to a.test in line 8", false},
	{"deny inside a granted range", variant("egress:\n  allow: [{host: a.test, ports: [80], protocol: http, addresses: [10.0.0.0/24]}]\n  deny: [{address: 10.0.0.5}]"), "", false},

	{"E20 **", allowing(`{host: "**", ports: [443], protocol: tls}`), "every host", true},
	{"E20 **.com", allowing(`{host: "**.com", ports: [443], protocol: tls}`), "such as \"**.example.com\"", false},
	{"**.co.uk", allowing(`{host: "**.co.uk", ports: [443], protocol: tls}`), "everybody's names under co.uk", false},
	{"any number of labels", allowing(`{host: "**.vendor.test", ports: [443], protocol: tls}`), "", false},
	{"three stars", allowing(`{host: "***.vendor.test", ports: [443], protocol: tls}`), "stars may only", false},
	{"wildcard over metadata", allowing(`{host: "*.google.internal", ports: [443], protocol: tls}`), "would allow metadata.google.internal", false},

	{"trip rules of every kind", tripping(`{on: denied, over: 20, within: 1m, fires: [network]}, {on: bytesOut, over: 1GiB}, {on: wallTime, over: 2h}, {on: cpuTime, over: 10m},
  {on: processes, over: 200}, {on: canary}, {on: canary, names: [vault.corp.test, "**.canary.test"]}, {on: tokenMisuse}, {on: exec, paths: [/usr/bin/nmap]},
  {on: writeOutside}, {on: writeOutside, except: [/dev/shm]}, {on: auditGap, fires: [session, credential]}`), "", false},
	{"trip on an unknown thing", tripping(`{on: denials, over: 1, within: 1m}`), "no trip rule is about", true},
	{"trip on nearly a thing", tripping(`{on: cputime, over: 1m}`), "write `cpuTime` instead", true},
	{"trip on nothing", tripping(`{over: 1}`), "on is missing", true},
	{"trip without a limit", tripping(`{on: bytesOut}`), "over is missing", true},
	{"trip without a window", tripping(`{on: denied, over: 1}`), "within is missing", true},
	{"trip with a window too many", tripping(`{on: processes, over: 1, within: 1m}`), "a rule on processes has no within", true},
	{"trip with a number of bytes", tripping(`{on: bytesOut, over: 1000}`), "in quotes", true},
	{"trip in GB", tripping(`{on: bytesOut, over: 1GB}`), "write `1GiB` instead", true},
	{"trip with a time as a size", tripping(`{on: cpuTime, over: 1GiB}`), "not a duration", true},
	{"trip at once", tripping(`{on: wallTime, over: 1ms}`), "from 1s to 87600h", false},
	{"trip on events with a limit", tripping(`{on: canary, over: 1}`), "a rule on canary has no over", true},
	{"trip that fires nothing", tripping(`{on: canary, fires: []}`), "fire nothing", true},
	{"trip that fires something else", tripping(`{on: canary, fires: [packets]}`), "no layer is called", true},
	{"trip that fires twice", tripping(`{on: canary, fires: [network, network]}`), "in this list already", true},
	{"trip twice", tripping(`{on: canary}, {on: canary, fires: [credential, session, network]}`), "in the list already", false},
	{"trip on no program", tripping(`{on: exec, paths: []}`), "the list is empty", true},
	{"trip on a program's name", tripping(`{on: exec, paths: [nmap]}`), "not an absolute path", true},
	{"trip on a crooked path", tripping(`{on: exec, paths: [/usr/../bin/nmap]}`), "write `/bin/nmap` instead", false},
	{"trip on a URL", tripping(`{on: canary, names: ["https://vault.test/"]}`), "without scheme", true},
	{"trip on everything", tripping(`{on: canary, names: ["*"]}`), "every host", true},
	{"canary that is allowed", tripping(`{on: canary, names: ["*.corp.test"]}`, `{host: a.corp.test, ports: [443], protocol: tls}`), "a.corp.test is a canary here by *.corp.test and allowed in line 7", false},
	{"canary under an allowed wildcard", tripping(`{on: canary, names: [a.corp.test]}`, `{host: "*.corp.test", ports: [443], protocol: tls}`), "", false},

	{"lease", leased(`{fires: [network, credential]}`), "", false},
	{"lease of defaults", leased(`{}`), "", false},
	{"lease that fires nothing", leased(`{fires: []}`), "fire nothing", true},
	{"lease that fires something else", leased(`{fires: [packets]}`), "no layer is called", true},
	{"lease for a time", leased(`30s`), "not a set of keys", true},
	{"lease with a time", leased(`{kids: 30s}`), "unknown key", true},

	{"limits", allowing(`{host: a.test, ports: [443], protocol: tls, max_bytes: {up: 10MiB, down: 1GiB}, rate: 50, expires: 2h}`), "", false},
	{"one limit", allowing(`{host: a.test, ports: [443], protocol: tls, max_bytes: {up: 1KiB}}`), "", false},
	{"no limit in max_bytes", allowing(`{host: a.test, ports: [443], protocol: tls, max_bytes: {}}`), "neither up nor down", true},
	{"max_bytes as a size", allowing(`{host: a.test, ports: [443], protocol: tls, max_bytes: 10MiB}`), "write `max_bytes: {up: 10MiB, down: 1GiB}` instead", true},
	{"max_bytes of nothing", allowing(`{host: a.test, ports: [443], protocol: tls, max_bytes: {up: 0KiB}}`), "from 1KiB to 1024GiB", false},
	{"max_bytes below nothing", allowing(`{host: a.test, ports: [443], protocol: tls, max_bytes: {up: -1MiB}}`), "not a size", true},
	{"max_bytes in MB", allowing(`{host: a.test, ports: [443], protocol: tls, max_bytes: {down: 5MB}}`), "write `5MiB` instead", true},
	{"max_bytes of too much", allowing(`{host: a.test, ports: [443], protocol: tls, max_bytes: {up: 1025GiB}}`), "out of range", false},
	{"max_bytes both ways", allowing(`{host: a.test, ports: [443], protocol: tls, max_bytes: {both: 5MiB}}`), "unknown key", true},
	{"rate of nothing", allowing(`{host: a.test, ports: [443], protocol: tls, rate: 0}`), "let nothing pass", true},
	{"negative rate", allowing(`{host: a.test, ports: [443], protocol: tls, rate: -5}`), "let nothing pass", true},
	{"rate as a fraction", allowing(`{host: a.test, ports: [443], protocol: tls, rate: 0.5}`), "whole number", true},
	{"rate with a unit", allowing(`{host: a.test, ports: [443], protocol: tls, rate: 50/s}`), "write `rate: 50` instead", true},
	{"rate beyond counting", allowing(`{host: a.test, ports: [443], protocol: tls, rate: 100001}`), "smaller number", true},
	{"expires at a time", allowing(`{host: a.test, ports: [443], protocol: tls, expires: 2027-01-31T12:00:00Z}`), "", false},
	{"expires in another zone", allowing(`{host: a.test, ports: [443], protocol: tls, expires: "2027-01-31T12:00:00.5+02:00"}`), "", false},
	{"expires in the past", allowing(`{host: a.test, ports: [443], protocol: tls, expires: 2026-10-31T12:00:00Z}`), "is past", false},
	{"expires now", allowing(`{host: a.test, ports: [443], protocol: tls, expires: 2026-11-01T00:00:00Z}`), "is past", false},
	{"expires far away", allowing(`{host: a.test, ports: [443], protocol: tls, expires: 2040-01-01T00:00:00Z}`), "ten years", false},
	{"expires on a day", allowing(`{host: a.test, ports: [443], protocol: tls, expires: 2027-01-31}`), "neither a time nor a duration", true},
	{"expires without a zone", allowing(`{host: a.test, ports: [443], protocol: tls, expires: "2027-01-31T12:00:00"}`), "with its zone", true},
	{"expires at once", allowing(`{host: a.test, ports: [443], protocol: tls, expires: 0s}`), "from 1s", false},
	{"expires before the spawn", allowing(`{host: a.test, ports: [443], protocol: tls, expires: -2h}`), "from 1s", true},
	{"expires as a number", allowing(`{host: a.test, ports: [443], protocol: tls, expires: 3600}`), "in quotes", true},

	{"GET here, POST there", allowing(`{host: a.test, ports: [80], protocol: http, methods: [GET]}, {host: a.test, ports: [80], protocol: http, methods: [POST], paths: ["/jobs"]}`), "", false},
	{"a rule that is never reached", allowing(`{host: a.test, ports: [80], protocol: http}, {host: a.test, ports: [80], protocol: http, methods: [POST]}`), "takes every request", false},
	{"one host, two protocols", allowing(`{host: a.test, ports: [80], protocol: http}, {host: a.test, ports: [80], protocol: tcp}`), "same protocol", false},
	{"one host, two address lists", allowing(`{host: a.test, ports: [80], protocol: http, methods: [GET], addresses: [10.0.0.5]}, {host: a.test, ports: [80], protocol: http, methods: [POST]}`), "same addresses", false},
	{"after an expiry", allowing(`{host: a.test, ports: [80], protocol: tcp, expires: 1h}, {host: a.test, ports: [80], protocol: tcp}`), "", false},
	{"before an expiry", allowing(`{host: a.test, ports: [80], protocol: tcp}, {host: a.test, ports: [80], protocol: tcp, expires: 1h}`), "has a rule already", false},
	{"the same expiry twice", allowing(`{host: a.test, ports: [80], protocol: tcp, expires: 1h}, {host: a.test, ports: [80], protocol: tcp, expires: 1h}`), "has a rule already", false},
	{"egress as a list", variant(`egress: []`), "not a set of keys", true},
	{"null egress", variant(`egress:`), "has no value", true},

	{"input", variant(`filesystem: {inputs: [{from: a/b, to: /workspace/c/d, mode: "0755"}]}`), "", false},
	{"input from above", variant(`filesystem: {inputs: [{from: ../a, to: /workspace/a}]}`), "contains ..", true},
	{"input from inside above", variant(`filesystem: {inputs: [{from: a/../../b, to: /workspace/a}]}`), "contains ..", true},
	{"input from absolute", variant(`filesystem: {inputs: [{from: /etc/shadow, to: /workspace/a}]}`), "absolute", true},
	{"input to elsewhere", variant(`filesystem: {inputs: [{from: a, to: /etc/passwd}]}`), "not below /workspace", true},
	{"input to above", variant(`filesystem: {inputs: [{from: a, to: /workspace/../etc/passwd}]}`), "not below /workspace", true},
	{"input to the directory", variant(`filesystem: {inputs: [{from: a, to: /workspace}]}`), "not below /workspace", true},
	{"input beside", variant(`filesystem: {inputs: [{from: a, to: /workspacex/a}]}`), "not below /workspace", true},
	{"setuid", variant(`filesystem: {inputs: [{from: a, to: /workspace/a, mode: "4755"}]}`), "not a file mode", true},
	{"mode as a number", variant(`filesystem: {inputs: [{from: a, to: /workspace/a, mode: 0755}]}`), "in quotes", true},
	{"same target", variant(`filesystem: {inputs: [{from: a, to: /workspace/a}, {from: b, to: /workspace/a}]}`), "already", false},
	{"file and directory", variant(`filesystem: {inputs: [{from: a, to: /workspace/a/b}, {from: b, to: /workspace/a}]}`), "cannot both be files", false},
	{"MB", variant(`filesystem: {workspace: 64MB}`), "write `64MiB` instead", true},
	{"bare bytes", variant(`filesystem: {workspace: 64}`), "not a text", true},
	{"too small", variant(`filesystem: {tmp: 1KiB}`), "out of range", false},
	{"too big", variant(`filesystem: {tmp: 999999999GiB}`), "out of range", false},

	{"payment", variant(`identity: {scope: [{secret: payment_card, env: CARD}]}`), "never be granted", true},
	{"PAYMENT", variant(`identity: {scope: [{secret: PAYMENT_CARD, env: CARD}]}`), "never be granted", true},
	{"secret twice", variant(`identity: {scope: [{secret: a, env: A}, {secret: a, env: B}]}`), "already", false},
	{"variable twice", variant(`identity: {scope: [{secret: a, env: A}, {secret: b, env: A}]}`), "taken already", false},
	{"lifetime", variant(`identity: {scope: [{secret: a, env: A}], lifetime: 90m}`), "", false},
	{"lifetime 0", variant(`identity: {lifetime: 0s}`), "out of range", false},
	{"lifetime of a year", variant(`identity: {lifetime: 8760h}`), "out of range", false},
	{"no key in a file", variant(`identity: {notKeys: [{file: /workspace/a/*.pem, rule: private-key, reason: opens nothing}]}`), "", false},
	{"no key in a variable", variant(`identity: {notKeys: [{env: FIXTURE, rule: generic-api-key, reason: opens nothing}]}`), "", false},
	{"no key in both", variant(`identity: {notKeys: [{file: /a, env: A, rule: private-key, reason: x}]}`), "one file or one variable", true},
	{"no key anywhere", variant(`identity: {notKeys: [{rule: private-key, reason: x}]}`), "one file or one variable", true},
	{"no key without a reason", variant(`identity: {notKeys: [{file: /a, rule: private-key}]}`), "reason is missing", true},
	{"no key by any rule", variant(`identity: {notKeys: [{file: /a, rule: "*", reason: x}]}`), "no rule", true},
	{"no key in a relative path", variant(`identity: {notKeys: [{file: a, rule: private-key, reason: x}]}`), "is not a file", true},
	{"no key in a bad pattern", variant(`identity: {notKeys: [{file: "/a[", rule: private-key, reason: x}]}`), "is not a file", false},
	{"bad variable", variant(`identity: {scope: [{secret: a, env: "A=B"}]}`), "cannot name a variable", true},
	{"variable in both", variant("identity: {scope: [{secret: a, env: A}]}\nenv: {A: x}"), "carries the token", false},
	{"value instead of a name", variant(`identity: {scope: [{secret: sk_live_0123456789, env: A}]}`), "never its value", false},

	{"mint", variant(`identity: {mint: [{name: books, audience: "https://books.test", scope: ["books:read"], lifetime: 5m, env: BOOKS, hosts: ["books.test:443"]}]}`), "", false},
	{"mint into a file", variant(`identity: {mint: [{name: books, audience: books, file: /workspace/books.jwt}]}`), "", false},
	{"mint as credential", variant("identity: {mint: [{name: books, audience: books, env: B, hosts: [\"a.test:443\"]}]}\negress: {allow: [{host: a.test, ports: [443], protocol: tls, inspect: true, credential: books}]}"), "", false},
	{"mint's file as credential", variant("identity: {mint: [{name: books, audience: books, file: /workspace/b}]}\negress: {allow: [{host: a.test, ports: [443], protocol: tls, inspect: true, credential: books}]}"), "not in identity.scope", false},
	{"mint payment", variant(`identity: {mint: [{name: payment_x, audience: a, env: A, hosts: ["a.test:443"]}]}`), "never be granted", true},
	{"mint scope payment", variant(`identity: {mint: [{name: x, audience: a, scope: ["Payment_refund"], env: A, hosts: ["a.test:443"]}]}`), "never be granted", true},
	{"mint scope with a space", variant(`identity: {mint: [{name: x, audience: a, scope: ["a b"], env: A, hosts: ["a.test:443"]}]}`), "is not a scope", true},
	{"mint scope twice", variant(`identity: {mint: [{name: x, audience: a, scope: [b, b], env: A, hosts: ["a.test:443"]}]}`), "already", false},
	{"mint for years", variant(`identity: {mint: [{name: x, audience: a, lifetime: 100h, env: A, hosts: ["a.test:443"]}]}`), "out of range", false},
	{"mint without audience", variant(`identity: {mint: [{name: x, env: A, hosts: ["a.test:443"]}]}`), "audience is missing", true},
	{"mint audience", variant(`identity: {mint: [{name: x, audience: "a b", env: A, hosts: ["a.test:443"]}]}`), "cannot be an audience", true},
	{"mint nowhere", variant(`identity: {mint: [{name: x, audience: a}]}`), "nothing says where", true},
	{"mint both", variant(`identity: {mint: [{name: x, audience: a, env: A, hosts: ["a.test:443"], file: /workspace/x}]}`), "either in a variable", true},
	{"mint without hosts", variant(`identity: {mint: [{name: x, audience: a, env: A}]}`), "hosts is missing", true},
	{"mint no hosts", variant(`identity: {mint: [{name: x, audience: a, env: A, hosts: []}]}`), "the list is empty", true},
	{"mint pattern", variant(`identity: {mint: [{name: x, audience: a, env: A, hosts: ["*.a.test:443"]}]}`), "not a host with a port", true},
	{"mint port", variant(`identity: {mint: [{name: x, audience: a, env: A, hosts: ["a.test:0"]}]}`), "not a host with a port", false},
	{"mint host twice", variant(`identity: {mint: [{name: x, audience: a, env: A, hosts: ["a.test:443", "A.test.:443"]}]}`), "already", false},
	{"mint and secret of one name", variant(`identity: {scope: [{secret: x, env: X}], mint: [{name: x, audience: a, env: A, hosts: ["a.test:443"]}]}`), "name of a secret", false},
	{"mint and secret in one variable", variant(`identity: {scope: [{secret: y, env: A}], mint: [{name: x, audience: a, env: A, hosts: ["a.test:443"]}]}`), "taken already", false},
	{"mint and env", variant("identity: {mint: [{name: x, audience: a, env: A, hosts: [\"a.test:443\"]}]}\nenv: {A: x}"), "carries the token", false},
	{"mint file elsewhere", variant(`identity: {mint: [{name: x, audience: a, file: /etc/x}]}`), "not below /workspace", true},
	{"mint file over an input", variant("identity: {mint: [{name: x, audience: a, file: /workspace/a/b}]}\nfilesystem: {inputs: [{from: a, to: /workspace/a}]}"), "cannot both be files", false},
	{"mint files in each other", variant(`identity: {mint: [{name: x, audience: a, file: /workspace/a}, {name: y, audience: a, file: /workspace/a}]}`), "cannot both be files", false},
	{"mint on the host's network", variant("network: host\nidentity: {mint: [{name: x, audience: a, env: A, hosts: [\"a.test:443\"]}]}"), "exchanged by the proxy", true},
	{"mint file on the host's network", variant("network: host\nreach: [{addresses: [\"10.0.0.5\"], ports: [443]}]\nidentity: {mint: [{name: x, audience: a, file: /workspace/x}]}"), "", false},

	{"env", variant(`env: {LANG: C.UTF-8, EMPTY: "", RISK: "task-sk-short"}`), "", false},
	{"env twice", variant(`env: {A: x, A: y}`), "there already", false},
	{"env number", variant(`env: {PORT: 8080}`), `"8080"`, true},
	{"env secret", variant(`env: {KEY: sk-0123456789abcdefghij}`), "looks like a secret", false},
	{"env GitHub", variant(`env: {KEY: "token ghp_0123456789abcdefghij"}`), "looks like a secret", false},
	{"env AWS", variant(`env: {KEY: AKIA0123456789ABCDEF}`), "looks like a secret", false},
	{"env private key", variant(`env: {KEY: "-----BEGIN OPENSSH PRIVATE KEY-----"}`), "looks like a secret", false},
	{"env URL with password", variant(`env: {DB: "postgres://user:pass@db.test/x"}`), "looks like a secret", false},

	{"no network", variant(`network: none`), "", false},
	{"the usual network", variant(`network: outbound-only`), "", false},
	{"some network", variant(`network: bridge`), "write outbound-only, none or host", true},
	{"the host's network", variant(`network: host`), "", false},
	{"reach", variant("network: host\nreach: [{addresses: [\"10.0.0.5\", \"203.0.113.0/24\", \"127.0.0.1\"], ports: [80, 443]}]"), "", false},
	{"reach without the host's network", variant(`reach: [{addresses: ["10.0.0.5"], ports: [80]}]`), "is for kids on the machine's network", true},
	{"reach of metadata", variant("network: host\nreach: [{addresses: [\"169.254.169.254\"], ports: [80]}]"), "cannot be reached", false},
	{"reach around metadata", variant("network: host\nreach: [{addresses: [\"100.100.0.0/16\"], ports: [80]}]"), "metadata", false},
	{"reach of Tagout's own", variant("network: host\nreach: [{addresses: [\"198.19.0.1\"], ports: [3128]}]"), "Tagout's own", false},
	{"reach of everything", variant("network: host\nreach: [{addresses: [\"0.0.0.0/0\"], ports: [80]}]"), "cannot be reached", false},
	{"reach of much", variant("network: host\nreach: [{addresses: [\"10.0.0.0/15\"], ports: [80]}]"), "more than 65,536", false},
	{"reach by IPv6", variant("network: host\nreach: [{addresses: [\"2600::1\"], ports: [80]}]"), "IPv6", false},
	{"reach in disguise", variant("network: host\nreach: [{addresses: [\"::ffff:10.0.0.5\"], ports: [80]}]"), "clothes", false},
	{"reach by name", variant("network: host\nreach: [{addresses: [a.test], ports: [80]}]"), "not an address", true},
	{"reach of a name server", variant("network: host\nreach: [{addresses: [\"10.0.0.5\"], ports: [53]}]"), "name servers", false},
	{"reach twice", variant("network: host\nreach: [{addresses: [\"10.0.0.5\", \"10.0.0.5\"], ports: [80]}]"), "already", true},
	{"reach of nothing", variant("network: host\nreach: [{addresses: [], ports: [80]}]"), "is empty", true},
	{"reach without ports", variant("network: host\nreach: [{addresses: [\"10.0.0.5\"]}]"), "ports is missing", true},
	{"names on the host's network", allowing(`{host: a.test, ports: [443], protocol: tls}`) + "network: host\n", "egress means nothing", true},
	{"secrets on the host's network", variant("network: host\nidentity: {scope: [{secret: a, env: A}]}"), "swapped in by the proxy", true},
	{"root on the host's network", variant("image: host+writable\nnetwork: host"), "write another image", true},
	{"rules without a network", allowing(`{host: a.test, ports: [443], protocol: tls}`) + "network: none\n", "can reach nothing", true},

	{"pids", variant(`limits: {pids: 15}`), "from 16 to", true},
	{"many pids", variant(`limits: {pids: 40000}`), "from 16 to", true},
	{"memory", variant(`limits: {memory: 15MiB}`), "from 16MiB", false},
	{"half a core", variant(`limits: {cpus: 0.5}`), "", false},
	{"idle of nothing", variant(`limits: {idle: 0s}`), "out of range", false},
	{"immortal", variant(`limits: {lifetime: 721h}`), "out of range", false},
	{"never idle", variant(`limits: {idle: never}`), "is not a duration", true},
	{"a day of life", variant(`limits: {idle: 90s, lifetime: 1h30m}`), "", false},
	{"owner", variant(`owner: Pricing Team`), "", false},
	{"blank owner", variant(`owner: " "`), "blank", true},
	{"no core", variant(`limits: {cpus: 0}`), "out of range", true},
	{"infinite cores", variant(`limits: {cpus: .inf}`), "cpus", true},
	{"files", variant(`limits: {openFiles: 1}`), "from 64", true},
	{"a slow disk", variant(`limits: {diskRate: 4MiB}`), "", false},
	{"no disk", variant(`limits: {diskRate: 0KiB}`), "from 1MiB", false},
	{"disk without a unit", variant(`limits: {diskRate: 4}`), "diskRate", true},
	{"nothing to execute", variant(`filesystem: {noexec: true}`), "", false},
	{"noexec as a text", variant(`filesystem: {noexec: "yes"}`), "noexec", true},

	{"no stop", strings.Replace(minimal, "stop:", "env:", 1), "stop is missing", true},
	{"no authority", variant(`stop: {maxTime: 10s}`), "authority is missing", true},
	{"blank authority", variant(`stop: {authority: " ", maxTime: 10s}`), "blank", true},
	{"no time", variant(`stop: {authority: Ada}`), "maxTime is missing", true},
	{"too long", variant(`stop: {authority: Ada, maxTime: 61s}`), "from 100ms to 60s", false},
	{"a minute", variant(`stop: {authority: Ada, maxTime: 1m}`), "", false},
	{"too short", variant(`stop: {authority: Ada, maxTime: 0s}`), "from 100ms", false},
	{"negative", variant(`stop: {authority: Ada, maxTime: -5s}`), "from 100ms", true},
	{"no unit", variant(`stop: {authority: Ada, maxTime: "10"}`), "not a duration", true},

	{"other version", variant(`apiVersion: tagout/v2`), "write `tagout/v1` instead", true},
	{"no image", variant(`image: Alpine`), "cannot name an image", true},
	{"path of an image", variant(`image: ../x`), "cannot name an image", true},
	{"writable image", variant("image: host+writable\nfilesystem: {root: 1GiB}"), "", false},
	{"size of a root that is not writable", variant(`filesystem: {root: 1GiB}`), "with the image \"host\" nothing", false},
	{"imported image", variant(`image: debian-12.tools`), "", false},
	{"bad name", variant(`name: Small`), "cannot name a card", true},
	{"no task", variant(`task: ""`), "blank", true},
	{"two lines", variant("task: |\n  a\n  b"), "line breaks", false},
	{"long task", variant("task: " + strings.Repeat("a", 201)), "more than 200", true},
	{"unknown key", variant(`egres: {}`), "write `egress:` instead", true},
}

// testNow is when the cases are read.
var testNow = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

func TestCases(t *testing.T) {
	t.Parallel()
	for _, c := range cases {
		got, err := ParseAt("x.yaml", []byte(c.card), testNow)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		var problems Errors
		if got != nil || !errors.As(err, &problems) {
			t.Errorf("%s: loaded: %+v", c.name, got)
			continue
		}
		if !strings.Contains(problems.Error(), c.want) || !strings.HasPrefix(problems.Error(), "x.yaml:") {
			t.Errorf("%s: got %q, want %q in it", c.name, problems, c.want)
		}
		// Only what is wrong is reported, not what follows from it. A missing or renamed key costs two.
		if len(problems) > 2 {
			t.Errorf("%s: %d problems:\n%v", c.name, len(problems), problems)
		}
	}
}

// TestPosition: line and column point at the value, or at the key where the key is the problem.
func TestPosition(t *testing.T) {
	t.Parallel()
	card := minimal + `egress:
  allow:
    - host: a.test
      ports:
        - 443
        - 70000
      protocol: tls
      colour: red
`
	_, err := Parse("dir/x.yaml", []byte(card))
	const want = "dir/x.yaml:12:11: 70000 is not a port: write a port from 1 to 65535\n" +
		"dir/x.yaml:14:7: unknown key \"colour\" in entry 1 of allow: write one of host, ports, protocol, inspect, credential, methods, paths, addresses, max_bytes, rate, expires instead"
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
}

func FuzzCardParse(f *testing.F) {
	for _, c := range cases {
		f.Add([]byte(c.card))
	}
	for _, file := range []string{"../../deploy/cards/practice.yaml", "../../deploy/cards/drill.yaml", "testdata/many.yaml"} {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := ParseAt("x.yaml", data, testNow)
		if err != nil {
			var problems Errors
			if c != nil || !errors.As(err, &problems) || len(problems) == 0 {
				t.Fatalf("Parse = %v, %#v", c, err)
			}
			lines := bytes.Count(data, []byte("\n")) + bytes.Count(data, []byte("\r")) + 1
			for _, p := range problems {
				if p.Line < 1 || p.Line > lines+1 || p.Col < 1 || p.What == "" || p.Fix == "" {
					t.Fatalf("problem %+v in %d lines", p, lines)
				}
			}
			return
		}
		checkLoaded(t, c)
	})
}

// checkLoaded checks what every card that loads must keep, whatever bytes it came from.
func checkLoaded(t *testing.T, c *Card) {
	t.Helper()
	checkEgress(t, c)
	if c.Stop.Authority == "" || c.Stop.MaxTime <= 0 || c.Stop.MaxTime > time.Minute {
		t.Fatalf("stop %+v", c.Stop)
	}
	for _, s := range c.Identity.Scope {
		if NeverGranted(s.Name) || !secretRE.MatchString(s.Name) || !envRE.MatchString(s.Env) {
			t.Fatalf("scope %+v", s)
		}
	}
	for _, in := range c.Filesystem.Inputs {
		if !filepath.IsLocal(in.From) || !strings.HasPrefix(in.To, "/workspace/") || filepath.Clean(in.To) != in.To || in.Mode&^0o777 != 0 {
			t.Fatalf("input %+v", in)
		}
	}
	if c.Limits.PIDs < minPIDs || c.Limits.Memory < minMemory || c.Limits.CPUs <= 0 || c.Limits.OpenFiles < minOpenFiles ||
		c.Limits.Idle < minLife || c.Limits.Lifetime > maxLife || c.Owner == "" {
		t.Fatalf("limits %+v", c.Limits)
	}
}

// tripping is the minimal card with trip rules, and allow rules.
func tripping(rules string, allow ...string) string {
	return strings.Replace(allowing(strings.Join(allow, ", ")), "maxTime: 10s}", "maxTime: 10s, trip: ["+rules+"]}", 1)
}

// TestTripRules: what a card says arrives in the session's document, and its canaries in the policy.
func TestTripRules(t *testing.T) {
	t.Parallel()
	c, err := Parse("x.yaml", []byte(tripping(`{on: denied, over: 20, within: 1m, fires: [network]}, {on: canary, names: [Vault.Corp.test]}`, `{host: "*.corp.test", ports: [443], protocol: tls}`)))
	if err != nil {
		t.Fatal(err)
	}
	want := []trip.Rule{
		{On: trip.Denied, Over: 20, Within: time.Minute, Fires: []wire.Layer{wire.LayerNetwork}},
		{On: trip.Canary, Names: []string{"vault.corp.test"}, Fires: wire.AllLayers()},
	}
	if !reflect.DeepEqual(c.Stop.Trip, want) {
		t.Errorf("got %+v", c.Stop.Trip)
	}
	p, err := policy.Compile(c.EgressAt(time.Now(), 1))
	if err != nil {
		t.Fatal(err)
	}
	if _, d := p.Lookup("vault.corp.test"); d.Reason != reason.Canary {
		t.Errorf("a canary is looked up: %+v", d)
	}
	if d := p.Connect("VAULT.corp.test.", 443); d.Reason != reason.Canary {
		t.Errorf("a canary is connected to: %+v", d)
	}
	if d := p.Connect("api.corp.test", 443); d.Verdict != policy.Allow {
		t.Errorf("its neighbour: %+v", d)
	}
}
