package e2e

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"tagout/bpf"
	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// floodLine tries to connect n times to each of ten ports of an address that no name stands for.
func floodLine(to netip.Addr, n int) string {
	return fmt.Sprintf("for i in {1..%d}; do for p in {81..90}; do : 3<>/dev/tcp/%v/$p; done; done 2>/dev/null; true", n, to)
}

// told sums what the records of a session stand for: in all, by port, and without the floods' own records.
func told(box *testenv.Box, session string) (sum, single uint64, byPort map[uint16]uint64) {
	byPort = map[uint16]uint64{}
	for _, r := range box.Records(func(r *audit.Record) bool {
		return r.Session == session && r.Event == audit.EventConnectDenied && r.Reason == reason.RawAddress
	}) {
		n := max(r.Count, 1)
		sum += n
		if r.Count == 0 {
			single++
		}
		if r.Dst != nil {
			byPort[r.Dst.Port] += n
		}
	}
	return sum, single, byPort
}

// waitTold waits until the records stand for exactly want attempts.
func waitTold(box *testenv.Box, kid wire.Kid, want uint64) {
	box.T.Helper()
	box.Until(15*time.Second, fmt.Sprintf("the records stand for %d denials", want), func() error {
		if sum, _, _ := told(box, kid.Session); sum != want {
			return fmt.Errorf("they stand for %d", sum)
		}
		return nil
	})
}

// TestFloodLosesNoNumber: a kid that is denied 20,000 times leaves few records, which stand for exactly what the
// kernel counted, by destination too; also when the kid is destroyed, or sandboxd killed, in the middle of it.
func TestFloodLosesNoNumber(t *testing.T) {
	t.Parallel()
	box := start(t)
	maps, err := bpf.Open(box.Inst.PinDir())
	if err != nil {
		t.Fatal(err)
	}
	defer maps.Close()
	counted := func(kid wire.Kid) uint64 {
		t.Helper()
		c, err := maps.Counters(kid.Mark)
		if err != nil {
			t.Fatal(err)
		}
		return c.Denied[reason.RawAddress]
	}

	kid := box.Spawn(bareCard, nil)
	box.Exec(kid.Name, "/bin/bash", "-c", floodLine(box.Net.EvilAddr(), 2000))
	if n := counted(kid); n != 20_000 {
		t.Fatalf("the kernel counted %d denials, want 20000: the flood was none", n)
	}
	waitTold(box, kid, 20_000)
	_, single, byPort := told(box, kid.Session)
	if single >= 20_000/2 {
		t.Errorf("%d records of single attempts: nothing was summed up", single)
	}
	for port, n := range byPort {
		if n < 1900 || n > 2000 {
			t.Errorf("the records stand for %d attempts to port %d, want 2000", n, port)
		}
	}
	if len(byPort) != 10 {
		t.Errorf("attempts to %d ports are recorded, want 10", len(byPort))
	}

	// sandboxd dies with what it had not written yet.
	box.Exec(kid.Name, "/bin/bash", "-c", floodLine(box.Net.EvilAddr(), 300))
	box.Kill9(instance.Sandboxd)
	box.WaitHealthy(instance.Sandboxd)
	waitTold(box, kid, counted(kid))

	// The kid goes, and with it the kernel's counters.
	gone := box.Spawn(bareCard, nil)
	box.Exec(gone.Name, "/bin/bash", "-c", floodLine(box.Net.EvilAddr(), 300))
	box.Destroy(gone.Name)
	if _, err := maps.Counters(gone.Mark); err == nil {
		t.Error("the kernel still has counters of a destroyed kid")
	}
	waitTold(box, gone, 3000)
}
