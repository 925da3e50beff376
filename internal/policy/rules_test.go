package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"tagout/internal/reason"
)

func TestPatterns(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern string
		yes, no []string
	}{
		{"vendor.test", []string{"vendor.test"}, []string{"a.vendor.test", "xvendor.test"}},
		{"*.vendor.test", []string{"a.vendor.test"}, []string{"vendor.test", "a.b.vendor.test", "xvendor.test"}},
		{"**.vendor.test", []string{"a.vendor.test", "a.b.vendor.test", "a.b.c.vendor.test"}, []string{"vendor.test", "xvendor.test", "a.vendor.test.evil.test"}},
	} {
		allowed := compile(t, Spec{Allow: []Rule{allow(c.pattern, 443)}})
		// The same pattern as a deny rule closes exactly what it opens as an allow rule.
		wide := []Rule{allow("**.vendor.test", 443), allow("vendor.test", 443), allow("xvendor.test", 443), allow("a.vendor.test.evil.test", 443)}
		denied := compile(t, Spec{Allow: wide, Deny: []DenyRule{{Host: c.pattern, Line: 7}}})
		for _, name := range c.yes {
			check(t, c.pattern+" allows "+name, allowed.Connect(name, 443), reason.OK)
			check(t, c.pattern+" denies "+name, denied.Connect(name, 443), reason.DenyRule)
			if d := denied.Connect(name, 443); d.DenyLine != 7 || !strings.Contains(d.Detail, "line 7") {
				t.Errorf("%s: the deny rule's line is not told: %+v", name, d)
			}
		}
		for _, name := range c.no {
			check(t, c.pattern+" leaves out "+name, allowed.Connect(name, 443), reason.NameNotAllowed)
			check(t, c.pattern+" does not deny "+name, denied.Connect(name, 443), reason.OK)
		}
	}
	for _, bad := range []string{"***.vendor.test", "*.*.vendor.test", "**.**.vendor.test", "a.**.vendor.test", "**vendor.test", "*", "**", "**.", "*.", "**.com"} {
		if _, err := Compile(Spec{Allow: []Rule{allow(bad, 443)}}); err == nil {
			t.Errorf("%s compiles", bad)
		}
	}
}

// TestCovers compares Covers with asking for names one by one.
func TestCovers(t *testing.T) {
	t.Parallel()
	var names []string
	for _, a := range []string{"", "a.", "b.", "a.b.", "b.a.", "a.a.", "a.b.a."} {
		for _, base := range []string{"x.test", "y.test", "a.x.test", "b.a.x.test"} {
			names = append(names, a+base)
		}
	}
	patterns := slices.Clone(names)
	for _, n := range names {
		patterns = append(patterns, "*."+n, "**."+n)
	}
	for _, wide := range patterns {
		for _, narrow := range patterns {
			// The names hold a witness for each pair whose base is short; longer ones would need more names.
			want, base := true, strings.TrimLeft(narrow, "*.")
			if strings.Count(base, ".") > 4 {
				continue
			}
			for _, n := range append(names, "q."+base, "q.r."+base, "a."+base) {
				if Covers(narrow, n) && !Covers(wide, n) {
					want = false
				}
			}
			if got := Covers(wide, narrow); got != want {
				t.Fatalf("Covers(%s, %s) = %v, want %v", wide, narrow, got, want)
			}
		}
	}
	p := compile(t, Spec{Allow: []Rule{allow("**.x.test", 443)}})
	for _, n := range names {
		if got := p.Connect(n, 443).Verdict == Allow; got != Covers("**.x.test", n) {
			t.Errorf("Connect and Covers differ about %s", n)
		}
	}
}

func TestMostExactPatternFirst(t *testing.T) {
	t.Parallel()
	rules := []Rule{allow("api.eu.vendor.test", 443), allow("*.eu.vendor.test", 443, 1), allow("**.eu.vendor.test", 443, 2), allow("**.vendor.test", 443, 2, 3)}
	for i := range rules {
		rules[i].Line = i + 1
	}
	for range len(rules) {
		rules = append(rules[1:], rules[0])
		p := compile(t, Spec{Allow: rules})
		for at, want := range map[string]int{
			"api.eu.vendor.test:443": 1, "api.eu.vendor.test:1": 2, "api.eu.vendor.test:2": 3, "api.eu.vendor.test:3": 4,
			"b.eu.vendor.test:443": 2, "a.b.eu.vendor.test:443": 3, "a.b.eu.vendor.test:3": 4, "eu.vendor.test:443": 4,
		} {
			host, port, err := Authority(at)
			if err != nil {
				t.Fatal(err)
			}
			if d := p.Connect(host, port); d.Verdict != Allow || d.Rule.Line != want {
				t.Errorf("%s: %+v, want rule %d", at, d, want)
			}
		}
	}
}

// getHerePostThere is what several rules for one host and port are for.
func getHerePostThere() Spec {
	return Spec{Allow: []Rule{
		{Host: "api.vendor.test", Ports: []uint16{443}, Protocol: TLS, Inspect: true, Methods: []string{"GET"}, Paths: []string{"/v1/*"}, Line: 1},
		{Host: "api.vendor.test", Ports: []uint16{443, 8443}, Protocol: TLS, Inspect: true, Methods: []string{"POST"}, Paths: []string{"/v1/jobs"}, Credential: "key", Line: 2},
		{Host: "api.vendor.test", Ports: []uint16{443}, Protocol: TLS, Inspect: true, Paths: []string{"/v1/*", "/open/*"}, Rate: 1, Line: 3},
	}}
}

func TestSeveralRules(t *testing.T) {
	t.Parallel()
	p := compile(t, getHerePostThere())
	if d := p.Connect("api.vendor.test", 443); d.Verdict != Allow || d.Rule.Line != 1 {
		t.Errorf("the representative is %+v, want the first rule", d)
	}
	for _, c := range []struct {
		port         uint16
		method, path string
		want         reason.Code
		line         int
	}{
		{443, "GET", "/v1/x", reason.OK, 1},
		{443, "POST", "/v1/jobs", reason.OK, 2},
		{443, "POST", "/v1/x", reason.OK, 3},
		{443, "GET", "/open/x", reason.OK, 3},
		{443, "DELETE", "/v1/jobs", reason.OK, 3},
		{443, "GET", "/admin", reason.PathDenied, 1},
		{443, "POST", "/admin", reason.PathDenied, 2},
		{443, "PUT", "/admin", reason.PathDenied, 3},
		{443, "GET", "/v1/%2e%2e/x", reason.AmbiguousHTTP, 1},
		{443, "TRACE", "/v1/x", reason.MethodDenied, 1},
		{8443, "POST", "/v1/jobs", reason.OK, 2},
		{8443, "GET", "/v1/jobs", reason.MethodDenied, 2}, // the other rules do not list the port
	} {
		d := p.Request("api.vendor.test", c.port, c.method, c.path)
		check(t, fmt.Sprint(c.port, " ", c.method, " ", c.path), d, c.want)
		if d.Rule == nil || d.Rule.Line != c.line {
			t.Errorf("%d %s %s: rule %+v, want %d", c.port, c.method, c.path, d.Rule, c.line)
		}
	}
	// An exact rule is not widened by a wildcard's.
	spec := getHerePostThere()
	spec.Allow = append(spec.Allow, Rule{Host: "*.vendor.test", Ports: []uint16{443}, Protocol: TLS, Inspect: true})
	check(t, "wildcard beside an exact host", compile(t, spec).Request("api.vendor.test", 443, "DELETE", "/admin"), reason.PathDenied)
	// A deny rule wins over all of them.
	spec.Deny = []DenyRule{{Host: "api.vendor.test", Ports: []uint16{443}}}
	check(t, "denied", compile(t, spec).Request("api.vendor.test", 443, "GET", "/v1/x"), reason.DenyRule)
}

// TestRequestIsAnyRule: a request passes several rules if and only if it passes one of them alone, and the
// rule that decides is the first of those.
func TestRequestIsAnyRule(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(11, 12))
	some := func(from ...string) []string {
		var out []string
		for _, s := range from {
			if rng.IntN(2) == 0 {
				out = append(out, s)
			}
		}
		return out
	}
	compiled := 0
	for range 1200 {
		var spec Spec
		for i := range 1 + rng.IntN(3) {
			spec.Allow = append(spec.Allow, Rule{Host: "a.test", Ports: []uint16{80}, Protocol: HTTP, Line: i + 1,
				Methods: some("GET", "POST", "PUT"), Paths: some("/a", "/a/*", "/b/*/c", "/b/*")})
		}
		p, err := Compile(spec)
		if err != nil {
			continue // one takes all that another names
		}
		compiled++
		for _, method := range []string{"GET", "POST", "PUT", "DELETE"} {
			for _, path := range []string{"/a", "/a/x", "/b/x/c", "/b/x/y/c", "/c"} {
				want := 0
				for i := range spec.Allow {
					alone := compile(t, Spec{Allow: spec.Allow[i : i+1]})
					if want == 0 && alone.Request("a.test", 80, method, path).Verdict == Allow {
						want = i + 1
					}
				}
				d := p.Request("a.test", 80, method, path)
				if (d.Verdict == Allow) != (want != 0) || want != 0 && d.Rule.Line != want {
					t.Fatalf("%+v\n%s %s: %+v, want rule %d", spec, method, path, d, want)
				}
			}
		}
	}
	if compiled < 200 {
		t.Fatalf("only %d policies compiled: the test shows little", compiled)
	}
}

func TestConflict(t *testing.T) {
	t.Parallel()
	web := Rule{Host: "a.test", Ports: []uint16{80}, Protocol: HTTP, Methods: []string{"GET"}, Paths: []string{"/v1/*"}}
	with := func(change func(*Rule)) Rule {
		r := web
		change(&r)
		return r
	}
	raw := allow("a.test", 443)
	granted := raw
	granted.Grant = "01J"
	ending := web
	ending.Expires = 5
	private := with(func(r *Rule) {
		r.Methods = []string{"PUT"}
		r.Addresses = []netip.Prefix{netip.MustParsePrefix("10.0.0.5/32")}
	})
	for what, c := range map[string]struct {
		earlier, later Rule
		want           string
	}{
		"the same":              {web, web, "takes every request"},
		"the same, unreadable":  {raw, raw, "only rules that see requests"},
		"a grant beside a rule": {raw, granted, ""},
		"after an expiry":       {ending, web, ""},
		"both expire":           {ending, ending, "takes every request"},
		"other method":          {web, with(func(r *Rule) { r.Methods = []string{"POST"} }), ""},
		"one more method":       {web, with(func(r *Rule) { r.Methods = []string{"GET", "POST"} }), ""},
		"any method":            {web, with(func(r *Rule) { r.Methods = nil }), ""},
		"any method first":      {with(func(r *Rule) { r.Methods = nil }), web, "takes every request"},
		"path below":            {web, with(func(r *Rule) { r.Paths = []string{"/v1/a/*"} }), "takes every request"},
		"one path":              {web, with(func(r *Rule) { r.Paths = []string{"/v1/a"} }), "takes every request"},
		"other path":            {web, with(func(r *Rule) { r.Paths = []string{"/v2/*"} }), ""},
		"any path":              {web, with(func(r *Rule) { r.Paths = nil }), ""},
		"other protocol":        {web, raw, "same protocol"},
		"other addresses":       {web, private, "same addresses"},
	} {
		err := Conflict(c.earlier, c.later)
		if got := fmt.Sprint(err); (c.want == "") != (err == nil) || c.want != "" && !strings.Contains(got, c.want) {
			t.Errorf("%s: %v, want %q", what, err, c.want)
		}
		c.later.Ports = c.earlier.Ports
		if _, err := Compile(Spec{Allow: []Rule{c.earlier, c.later}}); (err == nil) != (c.want == "") {
			t.Errorf("%s: Compile says %v", what, err)
		}
	}
}

func TestAt(t *testing.T) {
	t.Parallel()
	spec := Spec{
		Allow: []Rule{allow("never.test", 1), {Host: "ten.test", Ports: []uint16{2}, Protocol: TCP, Expires: 10}, {Host: "twenty.test", Ports: []uint16{3}, Protocol: TCP, Expires: 20}},
		Deny:  []DenyRule{{Host: "evil.test"}},
	}
	before := Spec{Allow: slices.Clone(spec.Allow), Deny: slices.Clone(spec.Deny)}
	for _, c := range []struct {
		now   int64
		alive int
		next  int64
	}{{0, 3, 10}, {9, 3, 10}, {10, 2, 20}, {19, 2, 20}, {20, 1, 0}, {1 << 60, 1, 0}} {
		at := spec.At(c.now)
		if len(at.Allow) != c.alive || at.NextExpiry() != c.next || len(at.Lapsed) != 3-c.alive || len(at.Deny) != 1 {
			t.Errorf("at %d: %+v, next %d", c.now, at, at.NextExpiry())
		}
		if again := at.At(c.now); !reflect.DeepEqual(again, at) {
			t.Errorf("at %d, asked twice: %+v", c.now, again)
		}
		p := compile(t, at)
		_, d := p.Lookup("ten.test")
		want := reason.OK
		if c.now >= 10 {
			want = reason.Expired
		}
		check(t, fmt.Sprint("lookup at ", c.now), d, want)
		check(t, fmt.Sprint("connect at ", c.now), p.Connect("ten.test", 2), want)
		check(t, fmt.Sprint("request at ", c.now), p.Request("ten.test", 2, "GET", "/"), map[bool]reason.Code{true: reason.NotHTTP, false: reason.Expired}[want == reason.OK])
		check(t, "never", p.Connect("never.test", 1), reason.OK)
	}
	if !reflect.DeepEqual(spec, before) {
		t.Errorf("At changed the policy: %+v", spec)
	}
	// Another rule for the same host and port takes over, and a deny rule is told before an expiry.
	both := Spec{Allow: []Rule{{Host: "a.test", Ports: []uint16{1}, Protocol: TCP, Expires: 5}, {Host: "a.test", Ports: []uint16{1}, Protocol: TCP, Grant: "g", Expires: 9}}}
	check(t, "renewed", compile(t, both.At(6)).Connect("a.test", 1), reason.OK)
	both.Deny = []DenyRule{{Host: "a.test"}}
	check(t, "denied and expired", compile(t, both.At(10)).Connect("a.test", 1), reason.DenyRule)
	// Without At nothing runs out: Compile has no clock.
	check(t, "not asked", compile(t, spec).Connect("ten.test", 2), reason.OK)
}

func TestLimitsMustMakeSense(t *testing.T) {
	t.Parallel()
	for _, r := range []Rule{{MaxUp: -1}, {MaxDown: -1}, {Rate: -1}, {Expires: -1}} {
		r.Host, r.Ports, r.Protocol = "a.test", []uint16{1}, TCP
		if _, err := Compile(Spec{Allow: []Rule{r}}); err == nil {
			t.Errorf("%+v compiles", r)
		}
	}
}

// TestDenyLinePerPort: each port names the deny rule that closes it.
func TestDenyLinePerPort(t *testing.T) {
	t.Parallel()
	p := compile(t, Spec{Allow: []Rule{allow("a.test", 1, 2, 3, 4)}, Deny: []DenyRule{
		{Host: "a.test", Ports: []uint16{1}, Line: 5}, {Host: "a.test", Ports: []uint16{2, 1}, Line: 6}, {Host: "**.test", Ports: []uint16{3}, Line: 7},
	}})
	for port, want := range map[uint16]int{1: 5, 2: 6, 3: 7, 4: 0} {
		if d := p.Connect("a.test", port); d.DenyLine != want {
			t.Errorf("port %d: line %d, want %d", port, d.DenyLine, want)
		}
	}
}
