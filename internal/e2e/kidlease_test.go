package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/lease"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// short are terms that a test can sit out.
var short = lease.Terms{Kids: 5 * time.Second, Kernel: 3 * time.Second, Watchdog: 2 * time.Second, Absent: 5 * time.Second}

// tags returns the tags that hang on the box.
func tags(t *testing.T, box *testenv.Box) []wire.Tag {
	t.Helper()
	var out []wire.Tag
	if err := box.Client(instance.Killswitchd).Call(t.Context(), "GET", "/v1/tags", nil, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// sleeper spawns a kid with a process that does nothing, and returns that process's cgroup.
func sleeper(t *testing.T, box *testenv.Box, card string) wire.Kid {
	t.Helper()
	kid := box.Spawn(card, nil)
	running(t, box, kid.Name, "/bin/sleep", "3600")
	return kid
}

// alive says whether processes of the kid run.
func alive(t *testing.T, kid wire.Kid) bool {
	t.Helper()
	some, err := cgroup.Populated(kid.Cgroup)
	if err != nil {
		t.Fatal(err)
	}
	return some
}

// gone waits until no process of the kid is left.
func gone(t *testing.T, box *testenv.Box, kid wire.Kid) {
	t.Helper()
	box.Until(2*soon, kid.Name+" is dead", func() error {
		if alive(t, kid) {
			return errors.New("it lives")
		}
		return nil
	})
}

// TestKidsLoseTheirLeaseWithTheProxy: while all is well they live on for longer than a lease; with the proxy dead they
// are stopped as their cards say, and the tags name it.
func TestKidsLoseTheirLeaseWithTheProxy(t *testing.T) {
	t.Parallel()
	box := startLeased(t, short)
	whole := sleeper(t, box, bareCard)
	cut := sleeper(t, box, strings.Replace(bareCard, "maxTime: 60s}", "maxTime: 60s, lease: {fires: [network]}}", 1))
	until(bootclock.Now() + 2*short.Kids)
	if got := tags(t, box); len(got) > 0 || !alive(t, whole) {
		t.Fatalf("everything is well, and tags hang: %+v", got)
	}
	box.StopSupervisor(unix.SIGKILL) // nobody starts the proxy again
	box.Kill9(instance.Proxy)
	begun := bootclock.Now()
	gone(t, box, whole)
	t.Logf("dead %v after the proxy", bootclock.Now()-begun)
	box.Until(soon, "both kids are tagged", func() error {
		if n := len(tags(t, box)); n != 2 {
			return fmt.Errorf("%d tags", n)
		}
		return nil
	})
	for _, tag := range tags(t, box) {
		layers := map[string]int{whole.Name: 3, cut.Name: 1}[tag.Scope.Kid]
		if tag.Cause != "lease" || len(tag.Layers) != layers || !strings.Contains(tag.Reason, "proxy: ") || strings.Contains(tag.Reason, "dnsfilter") {
			t.Errorf("tag %+v", tag)
		}
	}
	if !alive(t, cut) {
		t.Error("a kid whose card has the network layer fire alone was killed")
	}
	box.WaitRecord("the lease that ran out", func(r *audit.Record) bool {
		return r.Event == audit.EventLeaseExpired && strings.Contains(r.Detail, "proxy: ")
	})
}

// TestKidsLoseTheirLeaseWithEachGuard: the same with each of the others that a lease needs, dead, deaf or unable to keep a
// record.
func TestKidsLoseTheirLeaseWithEachGuard(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		breaks func(*testing.T, *testenv.Box, wire.Kid)
		names  string // in the tag
	}{
		"dnsfilter is dead": {func(_ *testing.T, box *testenv.Box, _ wire.Kid) {
			box.StopSupervisor(unix.SIGKILL)
			box.Kill9(instance.DNSFilter)
		}, "dnsfilter: "},
		"dnsfilter hangs": {func(t *testing.T, box *testenv.Box, _ wire.Kid) {
			box.Freeze(instance.DNSFilter)
			t.Cleanup(func() { box.Thaw(instance.DNSFilter) })
		}, "dnsfilter: "},
		"credd is dead": {func(_ *testing.T, box *testenv.Box, _ wire.Kid) {
			box.StopSupervisor(unix.SIGKILL)
			box.Kill9(instance.Credd)
		}, "credd: "},
		"the audit disk is full": {fullAudit, "audit log: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			box := startLeased(t, short)
			kid := sleeper(t, box, bareCard)
			c.breaks(t, box, kid)
			gone(t, box, kid)
			box.Until(soon, "the kid is tagged", func() error {
				if n := len(tags(t, box)); n != 1 {
					return fmt.Errorf("%d tags", n)
				}
				return nil
			})
			if tag := tags(t, box)[0]; tag.Cause != "lease" || !strings.Contains(tag.Reason, c.names) || strings.Contains(tag.Reason, "proxy") {
				t.Errorf("tag %+v, want one that names %q", tag, c.names)
			}
		})
	}
}

// fullAudit has sandboxd write its log to a disk of its own, and fills that.
func fullAudit(t *testing.T, box *testenv.Box, kid wire.Kid) {
	t.Helper()
	s := &stopCases{cases: &cases{t: t, box: box}}
	d := s.newDisk(2, filepath.Dir(box.Inst.AuditFile(instance.Sandboxd)))
	box.Kill9(instance.Sandboxd) // it opens its log at its start
	box.WaitHealthy(instance.Sandboxd)
	d.fill()
	box.Until(soon, "sandboxd knows of its log", func() error {
		// On record, where the log's last block has room for some; refused, once sandboxd knows.
		if _, err := box.TryExec(t.Context(), kid.Name, wire.ExecRequest{Argv: []string{"/bin/true"}}); err != nil && !strings.Contains(err.Error(), "takes no records") {
			return err
		}
		var health wire.Health
		if err := box.Client(instance.Sandboxd).Call(t.Context(), "GET", "/healthz", nil, &health); err != nil || health.Warning == "" {
			return fmt.Errorf("%v: %+v", err, health)
		}
		return nil
	})
}

// TestAKilledSandboxdHurtsNobody: it is back before the lease runs out; one that stands still is not, and is named.
func TestAKilledSandboxdHurtsNobody(t *testing.T) {
	t.Parallel()
	box := startLeased(t, short)
	kid := sleeper(t, box, bareCard)
	box.Kill9(instance.Sandboxd)
	box.WaitHealthy(instance.Sandboxd)
	until(bootclock.Now() + short.Kids + time.Second)
	if got := tags(t, box); len(got) > 0 || !alive(t, kid) {
		t.Fatalf("after sandboxd was killed and came back: tags %+v", got)
	}
	box.Freeze(instance.Sandboxd)
	defer box.Thaw(instance.Sandboxd)
	gone(t, box, kid)
	if got := tags(t, box); len(got) != 1 || !strings.Contains(got[0].Reason, "sandboxd stands still") {
		t.Errorf("tags %+v", got)
	}
}

// TestAKilledKillswitchdIsBackAtOnce (S13): in less than a second, and no kid feels it.
func TestAKilledKillswitchdIsBackAtOnce(t *testing.T) {
	t.Parallel()
	box := startLeased(t, short)
	kid, arrived := uploading(t, box, "back")
	for range 3 {
		begun := bootclock.Now()
		box.Kill9(instance.Killswitchd)
		box.WaitHealthy(instance.Killswitchd)
		took := bootclock.Now() - begun
		t.Logf("back after %v", took)
		if took > time.Second {
			t.Errorf("killswitchd was away for %v", took)
		}
		n := arrived()
		box.Until(soon, "bytes go on arriving", func() error {
			if arrived() < n+1<<20 {
				return fmt.Errorf("%d bytes after %d", arrived(), n)
			}
			return nil
		})
	}
	if got := tags(t, box); len(got) > 0 || !alive(t, kid) {
		t.Errorf("tags %+v", got)
	}
}

// TestAHungKillswitchdIsReplaced: its watchdog kills it, and a kid's upload goes on.
func TestAHungKillswitchdIsReplaced(t *testing.T) {
	t.Parallel()
	terms := short
	terms.Kernel, terms.Absent = 10*time.Second, time.Minute
	box := startLeased(t, terms)
	_, arrived := uploading(t, box, "hung")
	pid := func() string {
		raw, err := os.ReadFile(box.Inst.PidFile(instance.Killswitchd))
		if err != nil {
			return "" // being replaced
		}
		return string(raw)
	}
	before, begun := pid(), bootclock.Now()
	box.Freeze(instance.Killswitchd)
	box.Until(soon, "it is replaced", func() error {
		if now := pid(); now == "" || now == before {
			return fmt.Errorf("pid %q", now)
		}
		return nil
	})
	box.WaitHealthy(instance.Killswitchd)
	t.Logf("a new one serves %v after the old one stopped", bootclock.Now()-begun)
	n := arrived()
	box.Until(soon, "bytes go on arriving", func() error {
		if arrived() < n+1<<20 {
			return fmt.Errorf("%d bytes after %d", arrived(), n)
		}
		return nil
	})
	if got := tags(t, box); len(got) > 0 {
		t.Errorf("tags %+v", got)
	}
}

// TestAKillswitchdThatStaysAway (S13): nobody starts it again, so sandboxd kills the kids and records it.
func TestAKillswitchdThatStaysAway(t *testing.T) {
	t.Parallel()
	box := startLeased(t, short)
	kid, arrived := uploading(t, box, "away")
	box.StopSupervisor(unix.SIGKILL)
	begun := bootclock.Now()
	box.Kill9(instance.Killswitchd)
	gone(t, box, kid)
	if took := bootclock.Now() - begun; took < short.Absent-short.Kids/6-time.Second {
		t.Errorf("killed after %v, the term is %v", took, short.Absent)
	} else {
		t.Logf("killed after %v", took)
	}
	rec := box.WaitRecord("the kid that was killed", func(r *audit.Record) bool { return r.Event == audit.EventKidKilled && r.Kid == kid.Name })
	if rec.Outcome != audit.OutcomeOK || !strings.Contains(rec.Detail, "killswitchd has not answered") {
		t.Errorf("record %+v", rec)
	}
	n := arrived()
	box.Up() // a new killswitchd renews the kernel's leases: what the dead kid had queued must not follow
	time.Sleep(2 * time.Second)
	if more := arrived() - n; more > 0 {
		t.Errorf("%d bytes arrived of a kid that was killed", more)
	}
}

// TestASleepStopsNobody (S14): the boot clock goes on and nothing runs, for longer than every lease, as in a suspension.
func TestASleepStopsNobody(t *testing.T) {
	t.Parallel()
	box := startLeased(t, short)
	kid, arrived := uploading(t, box, "sleep")
	box.StopSupervisor(unix.SIGKILL)
	freezer := kidFreezer(t, kid)
	box.Freeze(instance.Daemons()...)
	freezer("1", "FROZEN")
	until(bootclock.Now() + 2*short.Kids)
	freezer("0", "THAWED")
	box.Thaw(instance.Daemons()...)
	n := arrived()
	box.Until(2*soon, "bytes arrive again", func() error {
		if arrived() < n+1<<20 {
			return fmt.Errorf("%d bytes after %d", arrived(), n)
		}
		return nil
	})
	until(bootclock.Now() + short.Kids + time.Second)
	if got := tags(t, box); len(got) > 0 || !alive(t, kid) {
		t.Errorf("after a sleep: tags %+v", got)
	}
	if recs := box.Records(func(r *audit.Record) bool {
		return r.Event == audit.EventKidKilled || r.Event == audit.EventLeaseExpired
	}); len(recs) > 0 {
		t.Errorf("recorded %+v", recs)
	}
}

// kidFreezer returns what sets the kid's freezer, in whichever hierarchy it is.
func kidFreezer(t *testing.T, kid wire.Kid) func(v2, v1 string) {
	t.Helper()
	layout, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	rel := "/" + filepath.Join(filepath.Base(filepath.Dir(filepath.Dir(kid.Cgroup))), "kids", kid.Name)
	file, old := filepath.Join(kid.Cgroup, "cgroup.freeze"), false
	if dir := layout.Freezer(rel); dir != "" {
		file, old = filepath.Join(dir, "freezer.state"), true
	}
	return func(v2, v1 string) {
		t.Helper()
		state := v2
		if old {
			state = v1
		}
		if err := os.WriteFile(file, []byte(state), 0); err != nil {
			t.Fatal(err)
		}
	}
}
