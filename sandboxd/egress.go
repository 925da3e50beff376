package sandboxd

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"tagout/internal/config"
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

// mayGrant returns the check of who may open something: a person whom the box's configuration gives the role, and
// whose time is not over.
func mayGrant(people []config.Authority) func(name string) error {
	return func(name string) error {
		var names []string
		for _, p := range people {
			if p.May(config.RoleGrant, time.Now()) {
				names = append(names, p.Name)
			}
		}
		switch {
		case slices.Contains(names, name):
			return nil
		case len(names) == 0:
			return fmt.Errorf("nobody may grant on this box: give somebody the role grant under authorities in its configuration")
		}
		return fmt.Errorf("%q may not grant on this box: %s may", name, strings.Join(names, ", "))
	}
}
