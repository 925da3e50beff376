package sandboxd

import (
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

// EgressFromCard reads the card and takes its egress section; rules that expire do so as of now. The rest of
// the card says what a kid is born with and is not changed any more.
func EgressFromCard(r wire.PolicyRequest) (kids.EgressChange, error) {
	c, egress, err := readCard(cardName(r.CardFile), r.Card)
	if err != nil {
		return kids.EgressChange{}, err
	}
	return kids.EgressChange{Card: c.Name, CardHash: c.Hash, CardText: r.Card, Egress: egress}, nil
}
