package killswitch

import (
	"fmt"
	"slices"
	"strings"

	"tagout/internal/wire"
)

// worst orders the states: a report carries the worst of what it sums up.
var worst = []wire.State{wire.StateObserved, wire.StateFired, wire.StateContained, wire.StatePartial, wire.StateFailed}

func worse(a, b wire.State) wire.State {
	if slices.Index(worst, a) >= slices.Index(worst, b) {
		return a
	}
	return b
}

// maxDetails bounds how many points a layer's summary quotes.
const maxDetails = 8

// summarise sums the points up. contained says that network and credential layer hold every kid of the scope,
// in this stop or through another tag: only then is a kid whose processes remain called contained. r.mu is
// held.
func (r *run) summarise(contained bool) wire.StopReport {
	rep := wire.StopReport{Stop: r.id, State: wire.StateObserved, Kids: r.kids, Layers: map[wire.Layer]wire.LayerReport{}, Received: r.at, Degraded: r.degraded}
	for _, l := range r.layers {
		lr := r.layer(l)
		if lr.State == wire.StateContained && !contained {
			lr.State = wire.StatePartial
			lr.Detail = joinDetail(lr.Detail, "and nothing contains them: network and credential layer are not both done")
		}
		rep.Layers[l] = lr
		rep.State = worse(rep.State, lr.State)
	}
	if p := r.points[pointKey{point: pointTag}]; p != nil {
		rep.State = worse(rep.State, p.state)
	}
	if rep.Kids == nil {
		rep.Kids = []string{}
	}
	t := r.tag
	t.Marks = slices.Clone(t.Marks)
	t.State = rep.State
	rep.Tag = &t
	return rep
}

// layer sums one layer up. r.mu is held.
func (r *run) layer(l wire.Layer) wire.LayerReport {
	lr := wire.LayerReport{State: wire.StateObserved}
	var details []string
	for _, key := range r.order {
		if key.layer != l {
			continue
		}
		p := r.points[key]
		lr.State = worse(lr.State, p.state)
		lr.Fired, lr.Observed = max(lr.Fired, p.fired), max(lr.Observed, p.observed)
		if p.state != wire.StateObserved {
			details = append(details, strings.TrimPrefix(fmt.Sprintf("%s %s: %s", key.kid, key.point, p.detail), " "))
		} else if p.detail != "" && len(r.kids) <= 1 {
			details = append(details, p.detail)
		}
	}
	if lr.State != wire.StateObserved {
		lr.Observed = 0 // not all of the effect was seen
	}
	if n := len(details) - maxDetails; n > 0 {
		details = append(details[:maxDetails], fmt.Sprintf("and %d more", n))
	}
	lr.Detail = strings.Join(details, "; ")
	return lr
}

func joinDetail(a, b string) string {
	if a == "" {
		return b
	}
	return a + ", " + b
}
