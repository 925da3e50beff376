package kids

import (
	"testing"

	"tagout/internal/policy"
)

// TestThePolicyChangeSaysWhatHasChanged, and nothing of rules that only moved in the card.
func TestThePolicyChangeSaysWhatHasChanged(t *testing.T) {
	rule := func(host string, line int) policy.Rule {
		return policy.Rule{Host: host, Ports: []uint16{443}, Protocol: policy.TLS, Line: line}
	}
	fields := map[string]string{}
	difference(policy.Spec{Allow: []policy.Rule{rule("a.test", 3), rule("b.test", 4)}},
		policy.Spec{Allow: []policy.Rule{rule("b.test", 9)}, Deny: []policy.DenyRule{{Host: "c.test", Line: 2}}}, fields)
	if fields["before"] != `allow {"host":"a.test","ports":[443],"protocol":"tls"}` || fields["after"] != `deny {"host":"c.test"}` {
		t.Errorf("got %q", fields)
	}
	same := map[string]string{}
	difference(policy.Spec{Allow: []policy.Rule{rule("a.test", 1)}}, policy.Spec{Allow: []policy.Rule{rule("a.test", 2)}}, same)
	if len(same) != 0 {
		t.Errorf("of the same rules: %q", same)
	}
}
