package card

import (
	"strings"
	"testing"

	"tagout/internal/policy"
)

// TestWhatACardsChecksHoldBack is the control of E20: the rules that such cards mean, read as they stand and without the
// checks of this package, open what nobody meant to open. The checks are what stands between.
func TestWhatACardsChecksHoldBack(t *testing.T) {
	t.Parallel()
	rule := policy.Rule{Host: "a.test", Ports: []uint16{443}, Protocol: policy.TLS, Inspect: true, Methods: []string{"GET"}}
	with := func(change func(*policy.Rule)) policy.Rule {
		r := rule
		change(&r)
		return r
	}
	for _, c := range []struct {
		card   string
		unread []policy.Rule // what is left where the problem is passed over
		host   string
		method string
	}{
		{`{host: "**.co.uk", ports: [443], protocol: tls, inspect: true, methods: [GET]}`,
			[]policy.Rule{with(func(r *policy.Rule) { r.Host = "**.co.uk" })}, "anybody.co.uk", "GET"},
		{`{host: "*.github.io", ports: [443], protocol: tls, inspect: true, methods: [GET]}`,
			[]policy.Rule{with(func(r *policy.Rule) { r.Host = "*.github.io" })}, "anybody.github.io", "GET"},
		{`{host: a.test, ports: [443], protocol: tls, inspect: true, methds: [GET]}`, // an unknown key
			[]policy.Rule{with(func(r *policy.Rule) { r.Methods = nil })}, "a.test", "DELETE"},
		{`{host: a.test, ports: [443], protocol: tls, inspect: true, methods: []}`, // reads like none
			[]policy.Rule{with(func(r *policy.Rule) { r.Methods = []string{} })}, "a.test", "DELETE"},
		{"{host: a.test, ports: [443], protocol: tls, inspect: true, methods: [GET], methods: [DELETE]}", // one key twice
			[]policy.Rule{with(func(r *policy.Rule) { r.Methods = []string{"DELETE"} })}, "a.test", "DELETE"},
	} {
		if _, err := ParseAt("x.yaml", []byte(allowing(c.card)), testNow); err == nil || !strings.HasPrefix(err.Error(), "x.yaml:") {
			t.Errorf("%s: %v", c.card, err)
		}
		p, err := policy.Compile(policy.Spec{Allow: c.unread})
		if err != nil {
			t.Fatal(err)
		}
		if d := p.Request(c.host, 443, c.method, "/"); d.Verdict != policy.Allow {
			t.Errorf("%s, unread: %v %s: %v: the check shows nothing", c.card, c.method, c.host, d.Reason)
		}
	}
}
