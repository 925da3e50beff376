package e2e

import (
	"fmt"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/testenv"
)

// TestWhatAKidDoesIsRecorded walks through one kid's life: programs, files, connections. The log has each, in order,
// with names.
func TestWhatAKidDoesIsRecorded(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	kid := box.Spawn(bareCard, nil)
	box.Sh(kid.Name, `/bin/echo one "two three" $'\x01\xff'; cd /workspace; echo a >a; mv a b; rm b; mkdir d; echo x>/tmp/t`)
	box.Destroy(kid.Name)
	for _, r := range box.Records(func(r *audit.Record) bool { return r.Kid == kid.Name }) {
		fmt.Printf("%s %s %+v %v %s %v\n", r.Daemon, r.Event, r.Process, r.Count, r.Detail, r.Fields)
	}
}
