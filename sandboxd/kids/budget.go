package kids

import (
	"slices"

	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Budget bounds how many kids there are at once, whatever state they are in. 0 is no bound but instance.MaxKids.
// Kids of proofs do not count: a box that is full has to prove its layers all the same.
type Budget struct {
	Box   int
	Owner int // of kids with one owner in their cards
}

// withinBudget says whether there may be one more. Call it with mu held.
func (m *Manager) withinBudget(p Plan) error {
	if p.Proof {
		return nil
	}
	all, own := 0, 0
	for _, k := range m.kids {
		if k.rec.Plan.Proof {
			continue
		}
		all++
		if k.rec.Plan.Owner == p.Owner {
			own++
		}
	}
	switch b := m.cfg.Budget; {
	case b.Box > 0 && all >= b.Box:
		return refuse(Capacity, reason.Capacity, "there are %d kids, as many as this box may have: destroy one (`tagout list`), or raise kidLimits.kids in its configuration (at most %d)", all, instance.MaxKids)
	case b.Owner > 0 && own >= b.Owner:
		return refuse(Capacity, reason.Capacity, "%s has %d kids, as many as one owner may have: destroy one (`tagout list`), or raise kidLimits.kidsPerOwner in the box's configuration", p.Owner, own)
	}
	return nil
}

// twins returns the names of the kids of that card that are there or being made. Call it with mu held.
func (m *Manager) twins(card string) []string {
	var out []string
	for _, k := range m.kids {
		if k.rec.Session.Card == card && (k.state.Alive() || k.state.Is(wire.KidSpawning)) {
			out = append(out, k.name)
		}
	}
	slices.Sort(out)
	return out
}
