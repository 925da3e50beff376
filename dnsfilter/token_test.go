package dnsfilter

import (
	"strings"
	"testing"

	"github.com/miekg/dns"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// TestATokenInAName: a name that holds a token is refused as what it is, whatever the card allows and whatever the case in
// which it is asked for. One character less, and it is a name like any other.
func TestATokenInAName(t *testing.T) {
	const token = "tgo_abcdefghijklmnopqrstuvwxyz234567"
	spec := vendorRules()
	spec.Allow = append(spec.Allow, policy.Rule{Host: "**.wide.test", Ports: []uint16{443}, Protocol: policy.TLS, Line: 13})
	b := newBed(t).start(one(spec))
	asked := 0
	for _, name := range []string{token + ".wide.test.", strings.ToUpper(token) + ".wide.test.", "a." + token + "b.nowhere.test.", token + "."} {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeTXT} {
			r := b.ask(name, qtype)
			if code, text := ede(r); r.Rcode != dns.RcodeRefused || code != dns.ExtendedErrorCodeBlocked || !strings.HasPrefix(text, "token-scope") {
				t.Errorf("%s: %s %q %v", name, dns.RcodeToString[r.Rcode], text, r.Answer)
			}
			asked++
		}
	}
	if r := b.ask("tgo-abc.wide.test.", dns.TypeA); r.Rcode != dns.RcodeSuccess {
		t.Errorf("another name: %v", r)
	}
	b.stop()
	recs, events := b.rec.lookups(reason.TokenScope)
	if events != uint64(asked) || len(recs) == 0 || recs[0].Outcome != "deny" || recs[0].Kid != "kid1" {
		t.Errorf("%d refusals recorded of %d: %+v", events, asked, recs)
	}
}
