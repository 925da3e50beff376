package dnsfilter

import (
	"encoding/base32"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// wideRules has a wildcard of each kind.
func wideRules() policy.Spec {
	spec := vendorRules()
	spec.Allow = append(spec.Allow,
		policy.Rule{Host: "**.wide.test", Ports: []uint16{443}, Protocol: policy.TLS, Line: 13},
		policy.Rule{Host: "0123456789abcdef0123456789abcdef.cdn.test", Ports: []uint16{443}, Protocol: policy.TLS, Line: 15})
	return spec
}

// ordinary are names that services really use under wildcards.
var ordinary = []string{
	"www.cdn.test", "d111111abcdef8.cdn.test", "my-bucket.cdn.test", "my-load-balancer-1234567890.cdn.test", "eu-west-1.cdn.test",
	"us-east-1a.cdn.test", "lh3.cdn.test", "a1b2c3d4e5.cdn.test", "mystorageaccountname1234.cdn.test", "123456789012.cdn.test",
	"release-assets.cdn.test", "pkg-containers.cdn.test", "xn--bcher-kva.cdn.test", "_dmarc.cdn.test",
	"bucket.s3.eu-west-1.wide.test", "my-load-balancer-1234567890.us-east-1.elb.wide.test",
	// A rule that spells a name out is not limited.
	"0123456789abcdef0123456789abcdef.cdn.test",
}

// stolen returns names as exfiltration tools make them of random bytes.
func stolen() []string {
	r := rand.New(rand.NewPCG(1, 2))
	data := func(n int) []byte {
		out := make([]byte, n)
		for i := range out {
			out[i] = byte(r.Uint32())
		}
		return out
	}
	b32 := func(n int) string {
		return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(data(n)))
	}
	h := hex.EncodeToString
	return []string{
		h(data(8)) + ".cdn.test", h(data(30)) + ".cdn.test", h(data(20)) + ".cdn.test", b32(25) + ".cdn.test", b32(24) + ".cdn.test",
		b32(35) + ".cdn.test", h(data(4)) + "-" + h(data(4)) + ".cdn.test", "550e8400-e29b-41d4-a716-446655440000.cdn.test",
		strings.Repeat("a", 41) + ".cdn.test", b32(20) + "-" + b32(4) + ".cdn.test", "1234567890-1234567890-1234567890.cdn.test",
		"a.b.c.d.e.wide.test", strings.Repeat("abcdefghijklmnop.", 4) + "abcdefghijklmnop.wide.test",
		strings.Repeat("nmlkjihgzyxwvutsrqpo.", 4) + "wide.test", "ok." + h(data(12)) + ".wide.test",
	}
}

func TestWildcardNamesHaveAShape(t *testing.T) {
	b := newBed(t).start(one(wideRules()))
	for _, name := range ordinary {
		if r := b.ask(name+".", dns.TypeA); r.Rcode != dns.RcodeSuccess {
			_, text := ede(r)
			t.Errorf("%s was refused: %s", name, text)
		}
	}
	for i, name := range stolen() {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeTXT, dns.TypeNULL, dns.TypeAAAA} {
			r := b.ask(name+".", qtype)
			if code, text := ede(r); r.Rcode != dns.RcodeRefused || code != dns.ExtendedErrorCodeBlocked || !strings.HasPrefix(text, "wildcard-limit") {
				t.Errorf("name %d, %s, type %s: %s %q", i, name, dns.Type(qtype), dns.RcodeToString[r.Rcode], text)
			}
		}
	}
	b.stop()
	recs, events := b.rec.lookups(reason.WildcardLimit)
	if want := 4 * len(stolen()); events != uint64(want) {
		t.Errorf("%d refusals recorded, want %d", events, want)
	}
	if r := recs[0]; r.Outcome != "deny" || r.Kid != "kid1" || r.Rule != 11 || !strings.Contains(r.Detail, "*.cdn.test") || r.Process == nil {
		t.Errorf("the record does not say what happened: %+v", r)
	}
}

// TestWildcardNamesAreLimitedInNumber: over lookups and claims, across restarts; names given out go on working.
func TestWildcardNamesAreLimitedInNumber(t *testing.T) {
	b := newBed(t).start(one(wideRules()))
	mark := testSession(1, policy.Spec{}).Mark
	claim := func(name string) error {
		return b.call("POST", "/v1/claims", wire.NameClaim{Mark: mark, Name: name}, nil)
	}
	addrs := map[string]netip.Addr{}
	for i := range maxWildcardNames {
		name := fmt.Sprintf("n%d.cdn.test", i)
		switch {
		case i%3 == 1:
			name = fmt.Sprintf("n%d.more.wide.test", i)
			fallthrough
		case i%3 == 0:
			addrs[name] = addrOf(t, b.ask(name+".", dns.TypeA))
		default:
			if err := claim(name); err != nil {
				t.Fatalf("claim %d: %v", i, err)
			}
		}
	}
	full := func() {
		t.Helper()
		for _, name := range []string{"one-more.cdn.test", "one-more.wide.test"} {
			if _, text := ede(b.ask(name+".", dns.TypeA)); !strings.HasPrefix(text, "wildcard-limit") {
				t.Errorf("lookup of %s: %q", name, text)
			}
			var refused *control.Error
			if err := claim(name); !errors.As(err, &refused) || refused.Problem.Reason != reason.WildcardLimit {
				t.Errorf("claim of %s: %v", name, err)
			}
		}
		for name, addr := range addrs {
			if got := addrOf(t, b.ask(name+".", dns.TypeA)); got != addr {
				t.Errorf("%s moved from %s to %s", name, addr, got)
			}
		}
		addrOf(t, b.ask("api.vendor.test.", dns.TypeA))
		if err := claim("n0.cdn.test"); err != nil {
			t.Errorf("claiming a name that was given out: %v", err)
		}
	}
	full()
	b.stop()
	b.start(one(wideRules()))
	full()
}

func TestClaimsThatAreRefused(t *testing.T) {
	b := newBed(t).start(one(wideRules()))
	mark := testSession(1, policy.Spec{}).Mark
	for name, want := range map[string]reason.Code{
		"evil.test": reason.NameNotAllowed, "no name": reason.NameInvalid, stolen()[0]: reason.WildcardLimit,
	} {
		err := b.call("POST", "/v1/claims", wire.NameClaim{Mark: mark, Name: name}, nil)
		var refused *control.Error
		if !errors.As(err, &refused) || refused.Problem.Reason != want || refused.Problem.Status != 403 {
			t.Errorf("claim of %q: %v, want %v", name, err, want)
		}
	}
	if err := b.call("POST", "/v1/claims", wire.NameClaim{Mark: mark + 9, Name: "a.cdn.test"}, nil); control.Status(err) != 404 {
		t.Errorf("a claim for an unknown session: %v", err)
	}
}

// TestReverseLookups: only addresses that were given out to this session have a name, in whatever form they
// are asked for, and asking gives nothing out.
func TestReverseLookups(t *testing.T) {
	b := newBed(t).start(append(one(wideRules()), testSession(2, wideRules())))
	www := addrOf(t, b.ask("www.cdn.test.", dns.TypeA))
	r := b.ask(strings.ToUpper(reverse(www.String())), dns.TypePTR)
	if len(r.Answer) != 1 || r.Answer[0].(*dns.PTR).Ptr != "www.cdn.test." {
		t.Errorf("a wildcard's address: %v", r)
	}
	if r := b.exchange(question(reverse(www.String()), dns.TypePTR), "127.0.5.12", "udp"); r.Rcode != dns.RcodeRefused {
		t.Errorf("another kid learned what was given out: %v", r)
	}
	for _, name := range []string{
		reverse(www.Next().String()), reverse("198.18.15.255"), reverse("198.19.0.1"), reverse("203.0.113.3"), reverse("::1"),
		"77.0.18.198.in-addr.arpa.extra.", "0" + reverse(www.String()), "stolen." + reverse(www.String()), "1.18.198.in-addr.arpa.",
	} {
		if r := b.ask(name, dns.TypePTR); r.Rcode != dns.RcodeRefused || len(r.Answer) != 0 {
			t.Errorf("%s: %v", name, r)
		}
	}
}
