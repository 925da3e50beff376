package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"tagout/internal/reason"
)

func compile(t testing.TB, spec Spec) *Policy {
	t.Helper()
	p, err := Compile(spec)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func allow(host string, ports ...uint16) Rule {
	return Rule{Host: host, Ports: ports, Protocol: TLS}
}

// vendor is the card that the egress cases assume.
func vendor() Spec {
	return Spec{Allow: []Rule{
		{Host: "api.vendor.test", Ports: []uint16{443}, Protocol: TLS, Inspect: true, Methods: []string{"GET"}, Paths: []string{"/v1/*"}},
		{Host: "files.vendor.test", Ports: []uint16{80}, Protocol: HTTP, Methods: []string{"GET"}, Paths: []string{"/v1/*"}},
	}}
}

func check(t *testing.T, what string, d Decision, want reason.Code) {
	t.Helper()
	if d.Reason != want || (d.Verdict == Allow) != (want == reason.OK) {
		t.Errorf("%s: %v %v (%s), want %v", what, d.Verdict, d.Reason, d.Detail, want)
	}
	if d.Verdict == Allow && d.Rule == nil {
		t.Errorf("%s: allowed by no rule", what)
	}
}

func TestZeroDenies(t *testing.T) {
	t.Parallel()
	for what, p := range map[string]*Policy{"nil": nil, "empty": compile(t, Spec{})} {
		want := reason.NameNotAllowed
		if p == nil {
			want = reason.PolicyNotLoaded
		}
		_, d := p.Lookup("api.vendor.test")
		check(t, what+" lookup", d, want)
		check(t, what+" connect", p.Connect("api.vendor.test", 443), want)
		check(t, what+" request", p.Request("api.vendor.test", 443, "GET", "/"), want)
		check(t, what+" upstream", p.Upstream(nil, netip.MustParseAddr("203.0.113.7"), 443), reason.PolicyNotLoaded)
		if p.ExactHosts() != nil || p.Ports() != nil {
			t.Errorf("%s policy has hosts or ports", what)
		}
	}
	var zero Decision
	if zero.Verdict != Deny {
		t.Error("the zero decision is not deny")
	}
}

func TestLookup(t *testing.T) {
	t.Parallel()
	p := compile(t, vendor())
	for _, c := range []struct {
		raw, canonical string
		want           reason.Code
	}{
		{"api.vendor.test", "api.vendor.test", reason.OK},
		{"API.Vendor.Test.", "api.vendor.test", reason.OK}, // E07
		{"api.vendor.test..", "", reason.NameInvalid},      // E07
		{"xapi.vendor.test", "xapi.vendor.test", reason.NameNotAllowed},
		{"api.vendor.test.evil.test", "api.vendor.test.evil.test", reason.NameNotAllowed}, // E16
		{"evil\x00.api.vendor.test", "", reason.NameInvalid},                              // E16
		{"a.api.vendor.test", "a.api.vendor.test", reason.NameNotAllowed},
		{"vendor.test", "vendor.test", reason.NameNotAllowed},
		{"metadata", "metadata", reason.NameNotAllowed},     // E08
		{"localhost", "localhost", reason.NameNotAllowed},   // E08
		{"kubernetes", "kubernetes", reason.NameNotAllowed}, // E08
		{"0x7f.1", "", reason.RawAddress},                   // E17
		{"2130706433", "", reason.RawAddress},               // E17
		{"[::ffff:c0a8:101]", "", reason.RawAddress},        // E17
		{"[64:ff9b::7f00:1]", "", reason.RawAddress},        // E17
		{"169.254.169.254", "", reason.Metadata},
	} {
		canonical, d := p.Lookup(c.raw)
		check(t, c.raw, d, c.want)
		if canonical != c.canonical {
			t.Errorf("Lookup(%q) canonical %q, want %q", c.raw, canonical, c.canonical)
		}
	}
	// E08 the other way round: the card names it.
	named := compile(t, Spec{Allow: []Rule{allow("kubernetes", 443)}})
	_, d := named.Lookup("Kubernetes.")
	check(t, "named single label", d, reason.OK)
	// E07: the rule may be written as a U-label too.
	idn := compile(t, Spec{Allow: []Rule{allow("bücher.test", 443)}})
	for _, raw := range []string{"xn--bcher-kva.test", "BÜCHER.test", "bücher.test."} {
		canonical, d := idn.Lookup(raw)
		check(t, raw, d, reason.OK)
		if canonical != "xn--bcher-kva.test" {
			t.Errorf("Lookup(%q) canonical %q", raw, canonical)
		}
	}
}

func TestWildcard(t *testing.T) {
	t.Parallel()
	p := compile(t, Spec{Allow: []Rule{allow("*.vendor.test", 443)}})
	for raw, want := range map[string]reason.Code{
		"xapi.vendor.test":          reason.OK, // E16: allowed by the wildcard, though not by api.vendor.test
		"api.vendor.test":           reason.OK,
		"vendor.test":               reason.NameNotAllowed,
		"a.b.vendor.test":           reason.NameNotAllowed, // one label exactly
		"api.vendor.test.evil.test": reason.NameNotAllowed, // E16
		"evil\x00.vendor.test":      reason.NameInvalid,    // E16
		"xvendor.test":              reason.NameNotAllowed,
		"*.vendor.test":             reason.NameInvalid,
	} {
		_, d := p.Lookup(raw)
		check(t, "lookup "+raw, d, want)
		check(t, "connect "+raw, p.Connect(raw, 443), want)
	}
	if got := p.ExactHosts(); len(got) != 0 {
		t.Errorf("exact hosts %v of a wildcard", got)
	}
}

func TestExactBeforeWildcard(t *testing.T) {
	t.Parallel()
	exact := Rule{Host: "api.vendor.test", Ports: []uint16{443}, Protocol: TLS, Inspect: true}
	for _, rules := range [][]Rule{
		{exact, allow("*.vendor.test", 443, 8443)},
		{allow("*.vendor.test", 443, 8443), exact},
	} {
		p := compile(t, Spec{Allow: rules})
		if d := p.Connect("api.vendor.test", 443); d.Verdict != Allow || !d.Rule.Inspect {
			t.Errorf("the exact rule did not win: %+v", d)
		}
		if d := p.Connect("api.vendor.test", 8443); d.Verdict != Allow || d.Rule.Inspect {
			t.Errorf("the wildcard's other port: %+v", d)
		}
	}
}

func TestConnect(t *testing.T) {
	t.Parallel()
	p := compile(t, vendor())
	check(t, "right", p.Connect("api.vendor.test", 443), reason.OK)
	check(t, "right, other spelling", p.Connect("API.vendor.test.", 443), reason.OK)
	check(t, "other port", p.Connect("api.vendor.test", 22), reason.PortNotAllowed) // E15
	check(t, "port 0", p.Connect("api.vendor.test", 0), reason.PortNotAllowed)
	check(t, "other name", p.Connect("evil.test", 443), reason.NameNotAllowed) // E15
	check(t, "address", p.Connect("203.0.113.7", 443), reason.RawAddress)      // E15
	if got := p.ExactHosts(); !slices.Equal(got, []string{"api.vendor.test", "files.vendor.test"}) {
		t.Errorf("exact hosts %v", got)
	}
	if got := p.Ports(); !slices.Equal(got, []uint16{80, 443}) {
		t.Errorf("ports %v", got)
	}
}

// TestDenyWins is E19: a deny rule inside a broader allow wins, whatever the order (invariant 2). Without the
// deny rules the same questions are allowed.
func TestDenyWins(t *testing.T) {
	t.Parallel()
	rules := []Rule{allow("*.vendor.test", 80, 443), allow("api.vendor.test", 443, 8443)}
	denies := []DenyRule{
		{Host: "bad.vendor.test", Line: 9},
		{Host: "api.vendor.test", Ports: []uint16{8443}},
		{Host: "**.deep.vendor.test"},
		{Address: netip.MustParsePrefix("203.0.113.64/26")},
		{Address: netip.MustParsePrefix("::ffff:203.0.113.8/128"), Ports: []uint16{443}},
	}
	open := compile(t, Spec{Allow: rules})
	rng := rand.New(rand.NewPCG(3, 4)) // a test wants the same numbers each time
	for range 50 {
		rng.Shuffle(len(rules), func(i, j int) { rules[i], rules[j] = rules[j], rules[i] })
		rng.Shuffle(len(denies), func(i, j int) { denies[i], denies[j] = denies[j], denies[i] })
		p := compile(t, Spec{Allow: rules, Deny: denies})
		for _, c := range []struct {
			host string
			port uint16
			want reason.Code
		}{
			{"bad.vendor.test", 443, reason.DenyRule},
			{"BAD.vendor.test.", 80, reason.DenyRule},
			{"api.vendor.test", 8443, reason.DenyRule},
			{"api.vendor.test", 443, reason.OK},
			{"good.vendor.test", 443, reason.OK},
		} {
			check(t, fmt.Sprintf("%s:%d", c.host, c.port), p.Connect(c.host, c.port), c.want)
			check(t, fmt.Sprintf("%s:%d without deny rules", c.host, c.port), open.Connect(c.host, c.port), reason.OK)
		}
		_, d := p.Lookup("bad.vendor.test")
		check(t, "lookup of a denied name", d, reason.DenyRule)
		_, d = p.Lookup("api.vendor.test")
		check(t, "lookup of a name with one port denied", d, reason.OK)
		_, d = p.Lookup("a.b.deep.vendor.test")
		check(t, "lookup of a name that only a deny rule names", d, reason.DenyRule)
		rule := p.Connect("api.vendor.test", 443).Rule
		check(t, "denied range", p.Upstream(rule, netip.MustParseAddr("203.0.113.70"), 443), reason.DenyRule)
		check(t, "denied range, mapped", p.Upstream(rule, netip.MustParseAddr("::ffff:203.0.113.70"), 443), reason.DenyRule)
		check(t, "denied range, NAT64", p.Upstream(rule, netip.MustParseAddr("64:ff9b::cb00:7146"), 443), reason.DenyRule)
		check(t, "denied address and port", p.Upstream(rule, netip.MustParseAddr("203.0.113.8"), 443), reason.DenyRule)
		check(t, "its other port", p.Upstream(rule, netip.MustParseAddr("203.0.113.8"), 8443), reason.OK)
		check(t, "beside the range", p.Upstream(rule, netip.MustParseAddr("203.0.113.7"), 443), reason.OK)
		check(t, "request to a denied host", p.Request("bad.vendor.test", 80, "GET", "/"), reason.DenyRule)
	}
}

func TestCompileRefuses(t *testing.T) {
	t.Parallel()
	for what, spec := range map[string]Spec{
		"empty host":            {Allow: []Rule{allow("", 443)}},
		"star":                  {Allow: []Rule{allow("*", 443)}},
		"star and one label":    {Allow: []Rule{allow("*.com", 443)}},
		"star in the middle":    {Allow: []Rule{allow("a.*.test", 443)}},
		"half a star":           {Allow: []Rule{allow("a*.vendor.test", 443)}},
		"address":               {Allow: []Rule{allow("203.0.113.7", 443)}},
		"range":                 {Allow: []Rule{allow("169.254.0.0/16", 443)}},
		"no ports":              {Allow: []Rule{allow("a.test")}},
		"port 0":                {Allow: []Rule{allow("a.test", 0)}},
		"port twice":            {Allow: []Rule{allow("a.test", 1, 1)}},
		"rule twice":            {Allow: []Rule{allow("a.test", 1), allow("A.test.", 1)}},
		"protocol":              {Allow: []Rule{{Host: "a.test", Ports: []uint16{1}, Protocol: "udp"}}},
		"no protocol":           {Allow: []Rule{{Host: "a.test", Ports: []uint16{1}}}},
		"inspected TCP":         {Allow: []Rule{{Host: "a.test", Ports: []uint16{1}, Protocol: TCP, Inspect: true}}},
		"paths on TLS":          {Allow: []Rule{{Host: "a.test", Ports: []uint16{1}, Protocol: TLS, Paths: []string{"/"}}}},
		"credential on TLS":     {Allow: []Rule{{Host: "a.test", Ports: []uint16{1}, Protocol: TLS, Credential: "x"}}},
		"method":                {Allow: []Rule{{Host: "a.test", Ports: []uint16{1}, Protocol: HTTP, Methods: []string{"get"}}}},
		"TRACE":                 {Allow: []Rule{{Host: "a.test", Ports: []uint16{1}, Protocol: HTTP, Methods: []string{"TRACE"}}}},
		"path":                  {Allow: []Rule{{Host: "a.test", Ports: []uint16{1}, Protocol: HTTP, Paths: []string{"v1"}}}},
		"grant of link-local":   {Allow: []Rule{{Host: "a.test", Ports: []uint16{1}, Protocol: TCP, Addresses: []netip.Prefix{netip.MustParsePrefix("169.254.0.0/16")}}}},
		"deny of nothing":       {Deny: []DenyRule{{Ports: []uint16{25}}}},
		"deny of both":          {Deny: []DenyRule{{Host: "a.test", Address: netip.MustParsePrefix("10.0.0.0/8")}}},
		"deny of port 0":        {Deny: []DenyRule{{Host: "a.test", Ports: []uint16{0}}}},
		"deny of half a mapped": {Deny: []DenyRule{{Address: netip.MustParsePrefix("::ffff:0:0/90")}}},
	} {
		if p, err := Compile(spec); err == nil || p != nil {
			t.Errorf("%s compiled", what)
		}
	}
}

// TestCompileCopies: a caller that goes on using its Spec changes nothing in the Policy.
func TestCompileCopies(t *testing.T) {
	t.Parallel()
	spec := vendor()
	p := compile(t, spec)
	spec.Allow[0].Ports[0], spec.Allow[0].Methods[0], spec.Allow[0].Paths[0] = 1, "DELETE", "/*"
	d := p.Connect("api.vendor.test", 443)
	check(t, "connect", d, reason.OK)
	check(t, "request", p.Request("api.vendor.test", 443, "DELETE", "/x"), reason.MethodDenied)
}

// TestOrderIsNothing: the order of rules changes no answer.
func TestOrderIsNothing(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(5, 6)) // a test wants the same numbers each time
	labels := []string{"a", "b", "c"}
	pick := func() string {
		name := labels[rng.IntN(3)] + "." + labels[rng.IntN(3)] + ".test"
		if rng.IntN(3) == 0 {
			name = "*." + name
		}
		return name
	}
	for range 300 {
		var spec Spec
		taken := map[string]bool{}
		for range rng.IntN(6) {
			if host := pick(); !taken[host] {
				taken[host] = true
				spec.Allow = append(spec.Allow, allow(host, uint16(1+rng.IntN(2)))) // small
			}
		}
		for range rng.IntN(4) {
			r := DenyRule{Host: pick()}
			if rng.IntN(2) == 0 {
				r.Ports = []uint16{uint16(1 + rng.IntN(2))} // small
			}
			spec.Deny = append(spec.Deny, r)
		}
		p := compile(t, spec)
		slices.Reverse(spec.Allow)
		slices.Reverse(spec.Deny)
		q := compile(t, spec)
		for range 30 {
			name := strings.TrimPrefix(pick(), "*.")
			if rng.IntN(2) == 0 {
				name = "a." + name
			}
			_, d := p.Lookup(name)
			_, e := q.Lookup(name)
			if d.Verdict != e.Verdict || d.Reason != e.Reason {
				t.Fatalf("%+v\nlookup %s: %v one way, %v the other", spec, name, d, e)
			}
			opened := false
			for port := range uint16(3) {
				c, e := p.Connect(name, port), q.Connect(name, port)
				if c.Verdict != e.Verdict || c.Reason != e.Reason || (c.Verdict == Allow && c.Rule.Host != e.Rule.Host) {
					t.Fatalf("%+v\nconnect %s:%d: %v one way, %v the other", spec, name, port, c, e)
				}
				opened = opened || c.Verdict == Allow
			}
			if opened != (d.Verdict == Allow) {
				t.Fatalf("%+v\nlookup of %s says %v, but a port is open: %v", spec, name, d.Verdict, opened)
			}
		}
	}
}

func BenchmarkLookup(b *testing.B) {
	var spec Spec
	for i := range 1000 {
		spec.Allow = append(spec.Allow, allow(fmt.Sprintf("h%d.vendor.test", i), 443))
	}
	spec.Deny = []DenyRule{{Host: "**.evil.test"}}
	p := compile(b, spec)
	for name, raw := range map[string]string{"exact": "h500.vendor.test", "case": "H500.Vendor.Test.", "unknown": "nobody.evil.example"} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p.Lookup(raw)
			}
		})
	}
	b.Run("connect", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p.Connect("h500.vendor.test", 443)
		}
	})
}
