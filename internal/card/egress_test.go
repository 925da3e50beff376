package card

import (
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"tagout/internal/policy"
)

// TestEgressAt: wall time and durations become boot time, for ever or never.
func TestEgressAt(t *testing.T) {
	t.Parallel()
	c, err := ParseAt("x.yaml", []byte(allowing(`{host: a.test, ports: [1], protocol: tcp, expires: 2026-11-01T02:00:00+01:00},
    {host: b.test, ports: [1], protocol: tcp, expires: 90m}, {host: c.test, ports: [1], protocol: tcp}`)), testNow)
	if err != nil {
		t.Fatal(err)
	}
	const hour = int64(time.Hour)
	for _, k := range []struct {
		wall time.Time
		boot time.Duration
		want [3]int64
	}{
		{testNow, 0, [3]int64{hour, hour * 3 / 2, 0}},
		{testNow, 24 * time.Hour, [3]int64{25 * hour, 24*hour + hour*3/2, 0}},
		{testNow.Add(30 * time.Minute), 24 * time.Hour, [3]int64{24*hour + hour/2, 24*hour + hour*3/2, 0}},
		{testNow.Add(2 * time.Hour), 24 * time.Hour, [3]int64{23 * hour, 24*hour + hour*3/2, 0}}, // past already
		{testNow.Add(2 * time.Hour), time.Minute, [3]int64{1, int64(time.Minute) + hour*3/2, 0}}, // past, and never 0, which is for ever
	} {
		spec := c.EgressAt(k.wall, k.boot)
		for i, want := range k.want {
			if got := spec.Allow[i].Expires; got != want {
				t.Errorf("at %v and %v: %s expires at %d, want %d", k.wall, k.boot, spec.Allow[i].Host, got, want)
			}
		}
		if gone := spec.At(int64(k.boot)); k.wall.After(testNow.Add(time.Hour)) && (len(gone.Lapsed) != 1 || gone.Lapsed[0].Host != "a.test") {
			t.Errorf("at %v: lapsed %v", k.wall, gone.Lapsed)
		}
	}
	// Whoever forgets EgressAt gets rules that are gone, not rules that stay.
	if raw := c.Egress.At(2); len(raw.Allow) != 1 || raw.Allow[0].Host != "c.test" {
		t.Errorf("unconverted: %v", raw.Allow)
	}
}

func TestRuleLimits(t *testing.T) {
	t.Parallel()
	c, err := ParseAt("x.yaml", []byte(allowing(`{host: "**.a.test", ports: [443], protocol: tls, max_bytes: {up: 10MiB, down: 1GiB}, rate: 50, expires: 2h}`)), testNow)
	if err != nil {
		t.Fatal(err)
	}
	want := policy.Rule{Host: "**.a.test", Ports: []uint16{443}, Protocol: policy.TLS, MaxUp: 10 << 20, MaxDown: 1 << 30, Rate: 50, Expires: int64(3 * time.Hour), Line: 7}
	if got := c.EgressAt(testNow, time.Hour).Allow; len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// checkEgress checks what the egress of every card that loads must keep.
func checkEgress(t *testing.T, c *Card) {
	t.Helper()
	if len(c.Expiries) != len(c.Egress.Allow) {
		t.Fatalf("%d rules, %d expiries", len(c.Egress.Allow), len(c.Expiries))
	}
	spec := c.EgressAt(testNow, time.Hour)
	p, err := policy.Compile(spec)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range spec.Allow {
		if (r.Expires == 0) != (c.Expiries[i] == Expiry{}) || r.Expires < 0 || r.Expires != 0 && r.Expires <= int64(time.Hour) {
			t.Fatalf("rule %+v expires %+v", r, c.Expiries[i])
		}
		if r.MaxUp < 0 || r.MaxDown < 0 || r.Rate < 0 || r.Line < 1 {
			t.Fatalf("rule %+v", r)
		}
		base := strings.TrimLeft(r.Host, "*.")
		if base != r.Host && isPublicSuffix(base) {
			t.Fatalf("rule %+v allows everybody's names", r)
		}
		if name := policy.MetadataUnder(r.Host); name != "" {
			t.Fatalf("rule %+v allows %s", r, name)
		}
		for _, a := range r.Addresses {
			if policy.CheckGrant(a) != nil {
				t.Fatalf("rule %+v grants %s", r, a)
			}
		}
		// No deny rule takes an exact rule back: that is a contradiction.
		if base == r.Host {
			for _, port := range r.Ports {
				if d := p.Connect(r.Host, port); d.Verdict != policy.Allow {
					t.Fatalf("rule %+v opens nothing on port %d: %+v", r, port, d)
				}
			}
		}
	}
	checkRendered(t, c)
	if gone := spec.At(1 << 62); len(gone.Allow)+len(gone.Lapsed) != len(spec.Allow) {
		t.Fatalf("At lost rules of %+v", spec)
	}
}

// checkRendered reads what Render writes.
func checkRendered(t *testing.T, c *Card) {
	t.Helper()
	text := "egress:\n  allow:\n"
	if len(c.Egress.Allow) == 0 {
		text = "egress:\n  allow: []\n"
	}
	for i, r := range c.Egress.Allow {
		text += "    " + strings.Join(RenderAllow(r, c.Expiries[i]), "\n    ") + "\n"
	}
	if len(c.Egress.Deny) > 0 {
		text += "  deny:\n"
	}
	for _, r := range c.Egress.Deny {
		text += "    " + strings.Join(RenderDeny(r), "\n    ") + "\n"
	}
	scope := "identity: {scope: ["
	for i, s := range c.Identity.carried() {
		if i > 0 {
			scope += ", "
		}
		scope += "{secret: \"" + s.Name + "\", env: \"" + s.Env + "\"}"
	}
	again, err := ParseAt("rendered.yaml", []byte(minimal+scope+"]}\n"+text), testNow)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if len(again.Expiries) != len(c.Expiries) {
		t.Fatalf("%d rules became %d in\n%s", len(c.Expiries), len(again.Expiries), text)
	}
	for i, r := range c.Egress.Allow {
		r.Line = again.Egress.Allow[i].Line
		if !reflect.DeepEqual(r, again.Egress.Allow[i]) || !c.Expiries[i].At.Equal(again.Expiries[i].At) || c.Expiries[i].After != again.Expiries[i].After {
			t.Fatalf("%+v became %+v in\n%s", r, again.Egress.Allow[i], text)
		}
	}
	for i, r := range c.Egress.Deny {
		r.Line = again.Egress.Deny[i].Line
		if !reflect.DeepEqual(r, again.Egress.Deny[i]) {
			t.Fatalf("%+v became %+v in\n%s", r, again.Egress.Deny[i], text)
		}
	}
}

func TestRender(t *testing.T) {
	t.Parallel()
	for _, k := range cases {
		if c, err := ParseAt("x.yaml", []byte(k.card), testNow); err == nil {
			checkRendered(t, c)
		}
	}
	for _, file := range []string{"../../deploy/cards/practice.yaml", "../../deploy/cards/drill.yaml"} {
		checkRendered(t, readCard(t, file))
	}
	c, err := ParseAt("x.yaml", []byte(allowing(`{host: "null", ports: [1, 2], protocol: http, methods: [GET, "NULL", "NO"], paths: ["/ab/ü*", '/"x']}, {host: 1.a-b, ports: [443], protocol: tls,
     expires: "2027-01-31T12:00:00.5+02:00", max_bytes: {up: 1KiB}, rate: 3, addresses: ["fd12::/64", 10.0.0.5]}, {host: "true.no", ports: [1], protocol: tcp, expires: 1.5h}`)), testNow)
	if err != nil {
		t.Fatal(err)
	}
	checkRendered(t, c)
}

// TestDocs: the cards in the documentation load.
func TestDocs(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../../docs/egress.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, block := range strings.Split(string(raw), "```yaml\n")[1:] {
		text, _, _ := strings.Cut(block, "```")
		if !strings.HasPrefix(text, "egress:") {
			continue
		}
		found++
		c, err := ParseAt("docs/egress.md", []byte(minimal+text), testNow)
		if err != nil {
			t.Error(err)
			continue
		}
		checkEgress(t, c)
	}
	if found == 0 {
		t.Error("docs/egress.md shows no egress section")
	}
	for _, k := range slices.Concat(allowKeys, denyKeys) {
		if !strings.Contains(string(raw), "`"+k.Name+"`") {
			t.Errorf("docs/egress.md does not say what `%s` is", k.Name)
		}
	}
}

// TestExplainGivesRulesThatWork: what `policy explain` says to add can be put into the card as it stands, and
// then the answer is allow.
func TestExplainGivesRulesThatWork(t *testing.T) {
	t.Parallel()
	const has = `{host: api.vendor.test, ports: [443], protocol: tls, inspect: true, methods: [GET]}`
	for _, ask := range []string{
		"evil.test:443", "evil.test:80", "evil.test:8443", "POST http://evil.test/a", "GET https://evil.test/a/b?c", "GET https://evil.test/a%20%22b", "PUT https://evil.test/..",
		"DELETE https://api.vendor.test/v1/x", "GET http://api.vendor.test/",
	} {
		q, err := policy.ParseQuestion(strings.Fields(ask)...)
		if err != nil {
			t.Fatal(err)
		}
		explain := func(rules string) policy.Explanation {
			c, err := ParseAt("x.yaml", []byte(allowing(rules)), testNow)
			if err != nil {
				t.Fatalf("%s: %v", ask, err)
			}
			e, err := policy.Explain(c.EgressAt(testNow, time.Hour), int64(time.Hour), q)
			if err != nil {
				t.Fatal(err)
			}
			return e
		}
		advice := strings.Join(explain(has).Change, "\n")
		_, rule, found := strings.Cut(advice, "add a rule to egress.allow: ")
		if end := strings.LastIndexByte(rule, '}'); found && end > 0 {
			rule = rule[:end+1]
		}
		if e := explain(has + ", " + rule); !found || !e.Allowed {
			t.Errorf("%s: %s does not help: %+v", ask, advice, e)
		}
	}
}

// FuzzEgressSection puts hostile bytes where a card's egress section stands.
func FuzzEgressSection(f *testing.F) {
	for _, c := range cases {
		if _, section, ok := strings.Cut(c.card, "egress:"); ok {
			f.Add(section)
		}
	}
	f.Add(" {allow: [{host: \"**.a.b\", ports: [1,65535], protocol: tls, inspect: true, max_bytes: {up: 999999999GiB}, rate: 9223372036854775807, expires: 87600h}]}")
	f.Add("\n  allow:\n    - host: xn--\n      ports: [443]\n      protocol: tls\n      expires: 9999-12-31T23:59:59Z\n  deny:\n    - {host: \"**.a\"}\n    - {address: \"::ffff:0:0/96\"}")
	f.Add("\n  allow:\n    - {host: a.b, ports: [80], protocol: http, methods: [GET], paths: [\"/*/x\"]}\n    - {host: A.b., ports: [80], protocol: http, methods: [GET, POST], paths: [\"/*\"]}")
	f.Fuzz(func(t *testing.T, section string) {
		c, err := ParseAt("x.yaml", []byte(minimal+"egress:"+section+"\n"), testNow)
		if err != nil {
			return
		}
		checkEgress(t, c)
	})
}
