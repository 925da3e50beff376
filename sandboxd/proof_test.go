package sandboxd

import (
	"testing"

	"tagout/internal/wire"
)

// TestProofPlan: the built-in card is whole, killswitchd knows it by its name, and it opens nothing.
func TestProofPlan(t *testing.T) {
	plan, err := proofPlan("198.19.0.1")
	if err != nil {
		t.Fatal(err)
	}
	if plan.Card != wire.ProofCard || !plan.Proof || len(plan.Hosts) != 1 || plan.Hosts[0] != "proof.tagout.invalid" || len(plan.Secrets)+len(plan.Inputs) != 0 {
		t.Errorf("plan %+v", plan)
	}
	if plan.Stop.Authority == "" || plan.Stop.MaxTime <= 0 {
		t.Errorf("stop section %+v", plan.Stop)
	}
	if got := plan.InitArgs; len(got) != 3 || got[1] != "198.19.0.1" || got[2] != plan.Hosts[0] {
		t.Errorf("kid-init is told %v", got)
	}
}
