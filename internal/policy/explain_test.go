package policy

import (
	"net/netip"
	"strings"
	"testing"

	"tagout/internal/reason"
)

// explained is the policy that TestExplain asks. Lines are as a card would have them.
func explained() Spec {
	return Spec{
		Allow: []Rule{
			{Host: "api.vendor.test", Ports: []uint16{443}, Protocol: TLS, Inspect: true, Methods: []string{"GET"}, Paths: []string{"/v1/*"}, Line: 3},
			{Host: "api.vendor.test", Ports: []uint16{443}, Protocol: TLS, Inspect: true, Methods: []string{"POST"}, Paths: []string{"/v1/jobs"}, Line: 4},
			{Host: "files.vendor.test", Ports: []uint16{80}, Protocol: HTTP, Line: 5},
			{Host: "*.cdn.test", Ports: []uint16{443}, Protocol: TLS, Line: 6},
			{Host: "db.vendor.test", Ports: []uint16{5432}, Protocol: TCP, Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.5/32")}, Line: 7},
			{Host: "old.vendor.test", Ports: []uint16{443}, Protocol: TLS, Expires: 50, Line: 8},
			{Host: "**.deep.test", Ports: []uint16{443}, Protocol: TLS, Line: 9},
		},
		Deny: []DenyRule{{Host: "bad.cdn.test", Line: 11}, {Address: netip.MustParsePrefix("203.0.113.0/28"), Line: 12}},
	}
}

func TestExplain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ask          string
		want         reason.Code
		line         int
		change, note string // part of one of them; "-" for none at all
	}{
		{"GET https://api.vendor.test/v1/x", reason.OK, 3, "-", "a private address is refused"},
		{"POST https://API.vendor.test:443/v1/jobs?x=1#y", reason.OK, 4, "-", "deny rule in line 12"},
		{"POST https://api.vendor.test/v1/x", reason.PathDenied, 4, `add "/v1/x" to ` + "`paths` of the rule in line 4", "-"},
		{"DELETE https://api.vendor.test/v1/x", reason.MethodDenied, 3, "add DELETE to `methods` of the rule in line 3", "-"},
		{"DELETE https://api.vendor.test/v1/x", reason.MethodDenied, 3, `methods: [DELETE], paths: ["/v1/x"]`, "-"},
		{"TRACE https://api.vendor.test/v1/x", reason.MethodDenied, 3, "-", "-"},
		{"GET https://api.vendor.test/v1/../x", reason.PathDenied, 3, "without dot segments", "-"},
		{"GET https://api.vendor.test/v1%2fx", reason.AmbiguousHTTP, 3, "read in one way", "-"},
		{"GET https://api.vendor.test/v1%2fx", reason.AmbiguousHTTP, 3, `add "/v1%2Fx" to ` + "`paths` of the rule in line 3", "-"},
		{"GET https://api.vendor.test/v1%2f../x", reason.AmbiguousHTTP, 3, "hidden dot segment", "-"},
		{"GET http://api.vendor.test:443/v1/x", reason.NotTLS, 3, "use https", "-"},
		{"GET http://api.vendor.test/v1/x", reason.PortNotAllowed, 0, "add 80 to `ports` of the rule in line 3", "-"},
		{"GET https://files.vendor.test:80/", reason.NotHTTP, 5, "protocol: tls", "-"},
		{"PATCH http://files.vendor.test/any/thing", reason.OK, 5, "-", ""},
		{"api.vendor.test:443", reason.OK, 3, "-", ""},
		{"api.vendor.test:22", reason.PortNotAllowed, 0, "tagout grant KID api.vendor.test:22 --for 15m --key FILE --reason WHY", "-"},
		{"GET https://a.cdn.test/x", reason.OK, 6, "-", "method and path are not seen"},
		{"a.b.cdn.test:443", reason.NameNotAllowed, 0, `write "**.cdn.test" in line 6`, "-"},
		{"cdn.test:443", reason.NameNotAllowed, 0, "name cdn.test in a rule of its own", "-"},
		{"deep.test:443", reason.NameNotAllowed, 0, "name deep.test in a rule of its own", "-"},
		{"x.api.vendor.test:443", reason.NameNotAllowed, 0, "the rule in line 3 means api.vendor.test alone", "-"},
		{"bad.cdn.test:443", reason.DenyRule, 11, "take bad.cdn.test:443 out of the deny rule in line 11", "-"},
		{"GET https://db.vendor.test:5432/", reason.OK, 7, "-", "and to 10.0.0.5/32"},
		{"old.vendor.test:443", reason.Expired, 8, "write a later `expires`", "-"},
		{"evil.test:443", reason.NameNotAllowed, 0, "{host: evil.test, ports: [443], protocol: tls}", "-"},
		{"POST http://evil.test/a", reason.NameNotAllowed, 0, `{host: evil.test, ports: [80], protocol: http, methods: [POST], paths: ["/a"]}`, "-"},
		{"evil.test:53", reason.NameNotAllowed, 0, "-", "-"},
		{"metadata.google.internal:80", reason.NameNotAllowed, 0, "-", "-"},
		{"169.254.169.254:80", reason.Metadata, 0, "-", "-"},
		{"203.0.113.7:443", reason.RawAddress, 0, "use a host name", "-"},
		{"GET http://2130706433/", reason.RawAddress, 0, "use a host name", "-"},
		{"[::1]:443", reason.RawAddress, 0, "use a host name", "-"},
		{"bad..name:443", reason.NameInvalid, 0, "-", "-"},
	} {
		q, err := ParseQuestion(strings.Fields(c.ask)...)
		if err != nil {
			t.Errorf("%s: %v", c.ask, err)
			continue
		}
		e, err := Explain(explained(), 60, q)
		if err != nil {
			t.Fatal(err)
		}
		if e.Reason != c.want || e.Allowed != (c.want == reason.OK) || e.Line != c.line || e.Text == "" {
			t.Errorf("%s: %+v, want %v by line %d", c.ask, e, c.want, c.line)
		}
		for what, k := range map[string]struct {
			got  []string
			want string
		}{"change": {e.Change, c.change}, "note": {e.Notes, c.note}} {
			all := strings.Join(k.got, "\n")
			if k.want == "-" && all != "" || k.want != "-" && !strings.Contains(all, k.want) {
				t.Errorf("%s: %s %q, want %q", c.ask, what, k.got, k.want)
			}
		}
		if again, err := ParseQuestion(strings.Fields(e.Question)...); err != nil || again != q {
			t.Errorf("%s: its canonical form %q reads as %+v, %v", c.ask, e.Question, again, err)
		}
	}
	if _, err := Explain(Spec{Allow: []Rule{{}}}, 0, Question{Host: "a.test", Port: 1}); err == nil {
		t.Error("a policy that cannot be enforced was explained")
	}
}

func TestParseQuestionRefuses(t *testing.T) {
	t.Parallel()
	for ask, want := range map[string]string{
		"": "METHOD URL", "a.test": "has no port", "a.test:0": "not a port", "a.test:70000": "not a port", ":443": "host is empty", "a.test:443 b c": "METHOD URL",
		"https://a.test/": "needs a method", "GET a.test": "not a URL", "GET ftp://a.test/": "not a URL", "GET https://a.test:x/": "not a port", "G(T https://a.test/": "not a method", "GET https:///x": "host is empty",
	} {
		if q, err := ParseQuestion(strings.Fields(ask)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v, want %q", ask, q, err, want)
		}
	}
}

func FuzzExplain(f *testing.F) {
	for _, ask := range []string{"GET https://api.vendor.test/v1/x", "a.test:443", "GET http://[::ffff:1.2.3.4]:80/%2e?", "POST https://x@y:1/", "[::1]:1", "a:b:1", "GET https://a.test?x"} {
		f.Add(ask)
	}
	f.Fuzz(func(t *testing.T, ask string) {
		q, err := ParseQuestion(strings.Fields(ask)...)
		if err != nil {
			return
		}
		e, err := Explain(explained(), 60, q)
		if err != nil {
			t.Fatal(err)
		}
		if e.Allowed != (e.Reason == reason.OK) || e.Allowed && (e.Rule == nil || len(e.Change) > 0) {
			t.Fatalf("%q: %+v", ask, e)
		}
	})
}
