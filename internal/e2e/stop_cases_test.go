package e2e

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

var (
	// heavy runs S07 with 10,000 sleepers, 12 GiB and a fork bomb at 6,000 processes.
	heavy = flag.Bool("stop.heavy", false, "run the stop cases at full size (needs 16 GiB)")
	// wallClock runs S14, which sets the clock of the whole machine.
	wallClock = flag.Bool("stop.wallclock", false, "step this machine's clock by an hour and back in the stop cases")
)

// TestMain lets the test binary be what runs inside a kid.
func TestMain(m *testing.M) {
	flag.Parse()
	if role := os.Getenv("STOP_CASE_ROLE"); role != "" {
		playStopRole(role)
		return
	}
	os.Exit(m.Run())
}

// stopCard is the card of the kids that the cases stop.
const stopCard = `apiVersion: tagout/v1
kind: Card
name: NAME
task: Be stopped.
image: host
egress:
  allow:
    - {host: api.vendor.test, ports: [443], protocol: tls, inspect: true, credential: vendor_api}
    - {host: svc.own.test, ports: [443], protocol: tls}
    - {host: files.vendor.test, ports: [80], protocol: http}
    - {host: ticks.vendor.test, ports: [7000], protocol: tcp}
    - {host: echo.vendor.test, ports: [7100], protocol: tcp}
    - {host: cut.vendor.test, ports: [7200], protocol: tcp}
filesystem:
  inputs:
    - {from: hostile, to: /workspace/hostile, mode: "0755"}
    - {from: self, to: /workspace/self, mode: "0755"}
  workspace: 256MiB
identity:
  scope:
    - {secret: vendor_api, env: VENDOR_API_KEY}
limits: {pids: PIDS, memory: MEMORY, cpus: 2, openFiles: 1024}
stop: {authority: "Ada Operator", maxTime: 60s}
`

// stopCases is what the stop cases share: the box of the egress cases, with its servers.
type stopCases struct {
	*cases
	id string
}

// TestStopCases walks the field cases S01 to S16 with real daemons and kids. Where a part of a case is tested
// elsewhere, the comment on its test says where. S13's killswitchd that is dead at rest: TestAKillswitchdThatStaysAway,
// TestAFrozenKillswitchdClosesTheNetwork. S14 without setting anybody's clock: TestASleepStopsNobody here,
// TestWallClockDoesNotMatter and TestASuspendedMachine in killswitch. S17 is about the audit log: TestAuditCases.
func TestStopCases(t *testing.T) {
	t.Parallel()
	c := startCases(t)
	c.box.SetSecret(secret, c.box.Net.Secret(), "api.vendor.test:443")
	c.box.Net.DNS.SetHost("cut.vendor.test", c.box.Net.FilesAddr())
	list := []stopCase{
		{"S01", (*stopCases).successThatIsNone}, {"S02", (*stopCases).everyDescendant}, {"S03", (*stopCases).theCallerIsTold},
		{"S04", (*stopCases).whateverStateTheKidIsIn}, {"S05", (*stopCases).initIsDead}, {"S06", (*stopCases).heldByTheKernel},
		{"S07", (*stopCases).many}, {"S08", (*stopCases).queuedToASlowReader}, {"S09", (*stopCases).everyRoad},
		{"S10", (*stopCases).policyTightened}, {"S11", (*stopCases).aThousandUses}, {"S12", (*stopCases).everythingElseBroken},
		{"S13", (*stopCases).killedInItsMiddle}, {"S15", (*stopCases).aDenialHitsOneConnection}, {"S16", (*stopCases).whoMayRelease},
	}
	if *wallClock {
		list = append(list, stopCase{"S14", (*stopCases).theClockJumps})
	}
	for _, tc := range list {
		t.Run(tc.id, func(t *testing.T) {
			tc.run(&stopCases{cases: c.on(t), id: strings.ToLower(tc.id)})
		})
	}
}

type stopCase struct {
	id  string
	run func(*stopCases)
}

// spawn makes a kid with a name of its own under a card of its own, so that no tag of another case covers it.
func (s *stopCases) spawn(name string) wire.Kid { return s.spawnSized(name, 256, "512MiB") }

func (s *stopCases) spawnSized(name string, pids int, memory string) wire.Kid {
	s.t.Helper()
	kid, err := s.box.TrySpawn(s.id+"-"+name, s.stopCard(name, pids, memory), s.inputs())
	if err != nil {
		s.t.Fatal(err)
	}
	return kid
}

func (s *stopCases) stopCard(name string, pids int, memory string) string {
	return strings.NewReplacer("NAME", s.id+name, "PIDS", fmt.Sprint(pids), "MEMORY", memory).Replace(stopCard)
}

// inputs are the hostile agent and this test binary.
func (s *stopCases) inputs() map[string][]byte {
	s.t.Helper()
	in := hostile(s.t, s.box)
	raw, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		s.t.Fatal(err)
	}
	in["self"] = raw
	return in
}

// run starts a command in the kid and returns when it has made the file /workspace/up.
func (s *stopCases) run(kid string, argv ...string) <-chan testenv.Output {
	s.t.Helper()
	return s.runWithin(soon, kid, argv...)
}

func (s *stopCases) runWithin(limit time.Duration, kid string, argv ...string) <-chan testenv.Output {
	s.t.Helper()
	done := running(s.t, s.box, kid, argv...)
	s.box.Until(limit, "the command is up", func() error {
		select {
		case out := <-done:
			s.t.Fatalf("%v ended: %+v", argv, out)
		default:
		}
		_, err := os.Stat(filepath.Join(s.box.Inst.KidDir(kid), "workspace", "up"))
		return err
	})
	return done
}

// play runs this test binary in the kid in a role, until it is up.
func (s *stopCases) play(kid, role string, args ...string) <-chan testenv.Output {
	s.t.Helper()
	return s.run(kid, asRole(role, args...)...)
}

func asRole(role string, args ...string) []string {
	return append([]string{"/usr/bin/env", "STOP_CASE_ROLE=" + role, "/workspace/self"}, args...)
}

func (s *stopCases) until(what string, check func() error) {
	s.t.Helper()
	s.box.Until(soon, what, check)
}

// pids are the processes of the kid, as the host numbers them.
func (s *stopCases) pids(kid wire.Kid) []int {
	s.t.Helper()
	pids, err := cgroup.Procs(kid.Cgroup)
	if err != nil {
		s.t.Fatal(err)
	}
	return pids
}

// pidOf waits for a process of the kid with that name.
func (s *stopCases) pidOf(kid wire.Kid, comm string) (pid int) {
	s.t.Helper()
	s.until("process "+comm+" runs", func() error {
		for _, p := range s.pids(kid) {
			raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p))
			if err == nil && strings.TrimSpace(string(raw)) == comm {
				pid = p
				return nil
			}
		}
		return fmt.Errorf("not among %v", s.pids(kid))
	})
	return pid
}

// stop stops one kid and logs what the report says.
func (s *stopCases) stop(kid string, layers ...wire.Layer) wire.StopReport {
	s.t.Helper()
	rep := s.box.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid}, Layers: layers})
	for _, l := range wire.AllLayers() {
		if lr, ok := rep.Layers[l]; ok {
			s.t.Logf("%s %-10s %-18s fired %v observed %v %s", kid, l, lr.State, lr.Fired, lr.Observed, lr.Detail)
		}
	}
	if len(rep.Degraded) > 0 {
		s.t.Logf("%s without: %s", kid, strings.Join(rep.Degraded, "; "))
	}
	return rep
}

// observed fails the test where the stop is anything else.
func (s *stopCases) observed(rep wire.StopReport) {
	s.t.Helper()
	if rep.State != wire.StateObserved {
		s.t.Fatalf("the stop is %s: %+v", rep.State, rep)
	}
}

// tag returns the hanging tag of a stop.
func (s *stopCases) tag(stop string) (wire.Tag, error) {
	s.t.Helper()
	var tags []wire.Tag
	ctx, cancel := context.WithTimeout(s.t.Context(), soon)
	defer cancel()
	if err := s.box.Client(instance.Killswitchd).Call(ctx, http.MethodGet, "/v1/tags", nil, &tags); err != nil {
		return wire.Tag{}, err
	}
	if i := slices.IndexFunc(tags, func(t wire.Tag) bool { return t.Stop == stop }); i >= 0 {
		return tags[i], nil
	}
	return wire.Tag{}, fmt.Errorf("no tag %s among %+v", stop, tags)
}

// waitState waits until the stop has come to a state, as its tag and its newest record tell.
func (s *stopCases) waitState(stop string, want wire.State) {
	s.t.Helper()
	s.until("the stop is "+string(want), func() error {
		tag, err := s.tag(stop)
		if err == nil && tag.State != want {
			err = fmt.Errorf("it is %q", tag.State)
		}
		return err
	})
	s.box.WaitRecord("the stop being "+string(want), func(r *audit.Record) bool {
		return r.Event == audit.EventStopCompleted && r.Fields["stop"] == stop && r.Fields["state"] == string(want)
	})
}
