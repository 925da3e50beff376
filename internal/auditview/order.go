package auditview

import (
	"cmp"
	"slices"
	"time"
)

// Order puts records into the order in which they happened: boots by their earliest wall time, and within a boot by the
// boot clock, which no change of the wall clock disturbs.
func Order(lines []Line) {
	began := map[string]time.Time{}
	for i := range lines {
		r := &lines[i].Record
		if t, ok := began[r.BootID]; !ok || r.Time.Before(t) {
			began[r.BootID] = r.Time
		}
	}
	slices.SortStableFunc(lines, func(a, b Line) int {
		if a.BootID != b.BootID {
			if c := began[a.BootID].Compare(began[b.BootID]); c != 0 {
				return c
			}
			return cmp.Compare(a.BootID, b.BootID)
		}
		if c := cmp.Compare(a.Boot, b.Boot); c != 0 {
			return c
		}
		return cmp.Compare(a.ID, b.ID)
	})
}
