package policy

import (
	"strings"
	"testing"

	"golang.org/x/net/publicsuffix"

	"tagout/internal/reason"
)

// cloud has patterns above public suffixes, as a policy may that was compiled before they were known.
func cloud() Spec {
	return Spec{Allow: []Rule{
		allow("**.amazonaws.com", 443), allow("*.amazonaws.com", 443), allow("mine.s3.amazonaws.com", 443),
		allow("**.core.windows.net", 443), allow("**.yours.s3.amazonaws.com", 443),
	}}
}

func TestNamesUnderAnotherPublicSuffix(t *testing.T) {
	t.Parallel()
	p := compile(t, cloud())
	for name, want := range map[string]reason.Code{
		"evil.s3.amazonaws.com":           reason.PublicSuffix,
		"Evil.S3.AmazonAWS.com.":          reason.PublicSuffix,
		"a.b.evil.s3.amazonaws.com":       reason.PublicSuffix,
		"s3.amazonaws.com":                reason.PublicSuffix, // paths begin with anybody's bucket
		"us-east-1.compute.amazonaws.com": reason.PublicSuffix, // by an entry with a star
		"evil.blob.core.windows.net":      reason.PublicSuffix,
		"mine.s3.amazonaws.com":           reason.OK, // named
		"data.yours.s3.amazonaws.com":     reason.OK, // the pattern is below the suffix itself
		"ec2.amazonaws.com":               reason.OK, // the owner's
		"queue.core.windows.net":          reason.OK,
		"amazonaws.com":                   reason.NameNotAllowed,
		"evil.s3.amazonaws.com.cn":        reason.NameNotAllowed,
	} {
		_, d := p.Lookup(name)
		check(t, "lookup "+name, d, want)
		check(t, "connect "+name, p.Connect(name, 443), want)
		if want != reason.OK { // an opened name is refused for its own reason: the rule does not inspect
			check(t, "request "+name, p.Request(name, 443, "GET", "/"), want)
		}
	}
	if d := p.Connect("evil.s3.amazonaws.com", 443); !strings.Contains(d.Detail, "s3.amazonaws.com") || !strings.Contains(d.Detail, "*.amazonaws.com") {
		t.Errorf("the record says %q", d.Detail)
	}
	// What ran out never stood for the name either.
	spec := Spec{Lapsed: cloud().Allow}
	check(t, "lapsed", compile(t, spec).Connect("evil.s3.amazonaws.com", 443), reason.NameNotAllowed)
	check(t, "lapsed, the owner's", compile(t, spec).Connect("ec2.amazonaws.com", 443), reason.Expired)
	// A deny rule means what it says.
	closed := compile(t, Spec{Allow: cloud().Allow, Deny: []DenyRule{{Host: "**.amazonaws.com"}}})
	check(t, "denied", closed.Connect("evil.s3.amazonaws.com", 443), reason.DenyRule)
	check(t, "denied though named", closed.Connect("mine.s3.amazonaws.com", 443), reason.DenyRule)
}

func TestExplainPublicSuffix(t *testing.T) {
	t.Parallel()
	q, err := ParseQuestion("evil.s3.amazonaws.com:443")
	if err != nil {
		t.Fatal(err)
	}
	e, err := Explain(cloud(), 0, q)
	if err != nil {
		t.Fatal(err)
	}
	change := strings.Join(e.Change, "\n")
	if e.Reason != reason.PublicSuffix || !strings.Contains(change, "anybody can have names there") ||
		!strings.Contains(change, "host: evil.s3.amazonaws.com") || strings.Contains(change, "add 443 to `ports`") {
		t.Errorf("%+v", e)
	}
}

// FuzzPatternOwner: whatever is asked for, an allow rule with stars opens no name whose public suffix is longer
// than what is behind its stars.
func FuzzPatternOwner(f *testing.F) {
	for _, name := range []string{"evil.s3.amazonaws.com", "ec2.amazonaws.com", "a.b.blob.core.windows.net", "a.us-east-1.compute.amazonaws.com", "EVIL.s3.AMAZONAWS.com."} {
		f.Add("amazonaws.com", name)
		f.Add("core.windows.net", name)
	}
	f.Fuzz(func(t *testing.T, base, raw string) {
		if canonical, err := Name(base); err != nil || isShared(canonical) { // no such pattern loads
			return
		}
		p, err := Compile(Spec{Allow: []Rule{allow("**."+base, 443), allow("*."+base, 443)}})
		if err != nil {
			return
		}
		name, d := p.Lookup(raw)
		c := p.Connect(raw, 443)
		if d.Verdict != c.Verdict {
			t.Fatalf("%q: lookup %v, connect %v", raw, d, c)
		}
		if d.Verdict != Allow {
			return
		}
		behind := strings.TrimLeft(d.Rule.Host, "*.")
		if suffix, _ := publicsuffix.PublicSuffix(name); len(suffix) > len(behind) || !strings.HasSuffix(name, "."+behind) {
			t.Fatalf("%s opens %s, which is under the public suffix %s", d.Rule.Host, name, suffix)
		}
	})
}
