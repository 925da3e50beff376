package dnsfilter

import (
	"strings"
	"testing"

	"github.com/miekg/dns"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// TestNamesUnderAnotherPublicSuffixAreRefused: a session whose policy has a pattern above public suffixes, as one of an
// older Tagout may, gets no address for names that anybody can have. The owner's own names are given out: it is the
// suffix that makes the difference.
func TestNamesUnderAnotherPublicSuffixAreRefused(t *testing.T) {
	spec := vendorRules()
	spec.Allow = append(spec.Allow, policy.Rule{Host: "**.amazonaws.com", Ports: []uint16{443}, Protocol: policy.TLS, Line: 13})
	b := newBed(t).start(one(spec))
	for _, name := range []string{"evil.s3.amazonaws.com.", "EVIL.s3.AmazonAWS.com.", "a.us-east-1.compute.amazonaws.com."} {
		r := b.ask(name, dns.TypeA)
		if code, text := ede(r); r.Rcode != dns.RcodeRefused || len(r.Answer) != 0 || code != dns.ExtendedErrorCodeBlocked || !strings.HasPrefix(text, "public-suffix") {
			t.Errorf("%s: %s %q %v", name, dns.RcodeToString[r.Rcode], text, r.Answer)
		}
	}
	if r := b.ask("ec2.amazonaws.com.", dns.TypeA); r.Rcode != dns.RcodeSuccess || len(r.Answer) != 1 {
		t.Errorf("the owner's own name: %v", r)
	}
	b.stop()
	recs, events := b.rec.lookups(reason.PublicSuffix)
	if events != 3 {
		t.Fatalf("%d refusals recorded, want 3", events)
	}
	if r := recs[0]; r.Outcome != "deny" || r.Kid != "kid1" || !strings.Contains(r.Detail, "**.amazonaws.com") {
		t.Errorf("the record does not say what happened: %+v", r)
	}
}
