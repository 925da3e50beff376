package sandboxd

import (
	"fmt"

	"tagout/deploy"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

// proofPlan is what the built-in card asks for. Its kid's first process looks the card's one name up at the gateway.
func proofPlan(gateway string) (kids.Plan, error) {
	const file = "cards/tagout-proof.yaml"
	raw, err := deploy.Cards.ReadFile(file)
	if err != nil {
		return kids.Plan{}, fmt.Errorf("reading the built-in card: %w", err)
	}
	plan, err := PlanFromCard(wire.SpawnRequest{Card: string(raw), CardFile: file})
	if err != nil {
		return kids.Plan{}, fmt.Errorf("reading the built-in card: %w", err)
	}
	plan.Proof = true
	plan.InitArgs = []string{"proof", gateway, plan.Hosts[0]}
	return plan, nil
}
