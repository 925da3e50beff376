package dnsfilter

import (
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"tagout/internal/bootclock"
	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// wait asks until the condition holds.
func wait(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !cond(); {
		if time.Now().After(deadline) {
			t.Fatalf("waiting until %s took too long", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// A rule that runs out takes its names along, on both ways in which questions are answered, by itself. Its
// control: the same rules without a deadline go on answering.
func TestRulesRunOut(t *testing.T) {
	const exact, wild, kept = "api.vendor.test.", "a.cdn.test.", "files.vendor.test."
	for _, expires := range []bool{true, false} {
		b := newBed(t).start(nil)
		spec := vendorRules()
		deadline := bootclock.Now()
		if expires {
			deadline += 2 * time.Second
			spec.Allow[0].Expires, spec.Allow[2].Expires = int64(deadline), int64(deadline)
		}
		doc := testSession(1, spec)
		if err := b.call("PUT", "/v1/sessions/kid1", doc, nil); err != nil {
			t.Fatal(err)
		}
		virtual, made := addrOf(t, b.ask(exact, dns.TypeA)), addrOf(t, b.ask(wild, dns.TypeA))
		stays := addrOf(t, b.ask(kept, dns.TypeA))
		wait(t, "the deadline is over", func() bool { return bootclock.Now() > deadline })
		for _, network := range []string{"udp", "tcp"} {
			for _, name := range []string{exact, wild} {
				r := b.exchange(question(name, dns.TypeA), kidAddr, network)
				_, text := ede(r)
				if got := r.Rcode == dns.RcodeRefused && strings.HasPrefix(text, reason.Expired.String()); got != expires {
					t.Errorf("expires %v: %s over %s: %v", expires, name, network, r)
				}
			}
		}
		if got := addrOf(t, b.ask(kept, dns.TypeA)); got != stays {
			t.Errorf("%s moved from %s to %s", kept, stays, got)
		}
		if _, err := b.name(doc.Mark, made); (control.Status(err) == 404) != expires {
			t.Errorf("expires %v: the name of %s: %v", expires, made, err)
		}
		if _, err := b.name(doc.Mark, virtual); (control.Status(err) == 404) != expires {
			t.Errorf("expires %v: the name of %s: %v", expires, virtual, err)
		}
		b.stop()
		if _, refusals := b.rec.lookups(reason.Expired); (refusals == 4) != expires {
			t.Errorf("expires %v: %d refusals recorded", expires, refusals)
		}
	}
}

// A session that is loaded after a rule's deadline never has the rule; its name keeps its place among the
// addresses, as it does in the proxy.
func TestRuleThatRanOutBeforeLoading(t *testing.T) {
	spec := vendorRules()
	whole := newBed(t).start(one(spec))
	want := addrOf(t, whole.ask("files.vendor.test.", dns.TypeA))
	lapsed := vendorRules()
	lapsed.Allow[0].Expires = 1
	b := newBed(t).start(one(lapsed))
	if r := b.ask("api.vendor.test.", dns.TypeA); r.Rcode != dns.RcodeRefused {
		t.Errorf("answered: %v", r)
	}
	if got := addrOf(t, b.ask("files.vendor.test.", dns.TypeA)); got != want {
		t.Errorf("files.vendor.test is at %s, without the deadline at %s", got, want)
	}
}

// Deadlines pass one after the other, each by itself, and a policy that came meanwhile is not undone.
func TestDeadlinesOneAfterTheOther(t *testing.T) {
	b := newBed(t).start(nil)
	doc := testSession(1, policy.Spec{Allow: vendorRules().Allow})
	now := bootclock.Now()
	doc.Egress.Allow[0].Expires, doc.Egress.Allow[1].Expires = int64(now+time.Hour), int64(now+2*time.Hour)
	if err := b.call("PUT", "/v1/sessions/kid1", doc, nil); err != nil {
		t.Fatal(err)
	}
	old := b.filter.sessions.byKid("kid1")
	if old.until != now+time.Hour {
		t.Fatalf("the first deadline is %v", old.until)
	}
	second, err := old.at(old.until)
	if err != nil || second.until != now+2*time.Hour || second.ready["api.vendor.test"] != nil || second.ready["files.vendor.test"] == nil {
		t.Fatalf("after the first deadline: %+v, %v", second, err)
	}
	if third, err := second.at(second.until); err != nil || third.until != 0 || len(third.ready) != 0 {
		t.Errorf("after the second deadline: %+v, %v", third, err)
	}
	newer := testSession(1, vendorRules())
	newer.Generation = 2
	if err := b.call("PUT", "/v1/sessions/kid1", newer, nil); err != nil {
		t.Fatal(err)
	}
	if got := b.filter.sessions.lapse(old); got == nil || got.doc.Generation != 2 || got != b.filter.sessions.byKid("kid1") {
		t.Errorf("in force after a late look at the old policy: %+v", got)
	}
	if err := b.call("DELETE", "/v1/sessions/kid1", nil, nil); err != nil {
		t.Fatal(err)
	}
	if got := b.filter.sessions.lapse(old); got != nil {
		t.Errorf("in force after the session was removed: %+v", got)
	}
}
