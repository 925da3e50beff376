package card

import (
	"tagout/internal/session"
	"tagout/internal/yamlx"
)

// readStopLease reads what fires when the kid's lease runs out. Nothing said is left empty, which means all layers.
func readStopLease(v yamlx.Value) session.Lease {
	m, _ := v.Map(leaseKeys...)
	if !m.Has("fires") {
		return session.Lease{}
	}
	return session.Lease{Fires: readFires(m.Get("fires"))}
}
