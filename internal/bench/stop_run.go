package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// StopConfig says what to measure stops with. All fields must be set, except Short.
type StopConfig struct {
	Inst     instance.Instance  // set up and running
	Internet *practice.Internet // the box is configured for it and its secret is in the vault as vendor_api
	Tagout   string             // path of the command line's binary
	InputDir string             // holds the hostile binary
	Dir      string             // where stop.json is written
	Out      io.Writer
	Runs     int  // of each stop of one layer; a third of it of what takes long
	Short    bool // figures of no meaning, to see that all of them can be taken
	// LastPass is when the kernel last let a packet of a session pass, CLOCK_BOOTTIME.
	LastPass func(mark uint32) (time.Duration, error)
}

// stops is one run of the benchmark.
type stops struct {
	StopConfig
	box    drill.Box
	layout cgroup.Layout
	kids   int
}

// stopBy is who orders the stops.
const stopBy = practice.Authority

// hostileProcesses is how many processes the hostile agent has before it is stopped.
const hostileProcesses = 512

// processLimit leaves the agent room beside them: its storm runs into the limit, and threads of its other parts must
// not be the ones that are refused.
const processLimit = hostileProcesses + 64

// RunStop measures and writes how long stops take: each layer, all three from the command line, and what docker and
// podman do with the same agent. A peer that is not installed is left out; a missed target is no error and stands
// in the table.
func RunStop(ctx context.Context, c StopConfig) ([]Metric, error) {
	layout, err := cgroup.Detect()
	if err != nil {
		return nil, fmt.Errorf("measuring stops: %w", err)
	}
	s := &stops{StopConfig: c, box: drill.Sockets(c.Inst, c.Internet), layout: layout}
	before, err := s.rss()
	if err != nil {
		return nil, fmt.Errorf("measuring stops: %w", err)
	}
	return measure(ctx, c.Out, c.Dir, "stop", []part{
		{"the session layer", s.trees}, {"the network layer", s.uploads}, {"the credential layer", s.tokens},
		{"the hostile agent", s.agents}, {"the memory of killswitchd", func(context.Context) ([]Metric, error) { return s.memory(before) }},
	})
}

// stopCard is the card of the kids that are stopped.
const stopCard = `apiVersion: tagout/v1
kind: Card
name: NAME
task: Be stopped, and be timed.
image: host
egress:
  allow:
    - {host: api.vendor.test, ports: [443], protocol: tls, inspect: true, credential: vendor_api}
    - {host: ticks.vendor.test, ports: [7000], protocol: tcp}
filesystem:
  inputs:
    - {from: hostile, to: /workspace/hostile, mode: "0755"}
  workspace: 64MiB
identity:
  scope:
    - {secret: vendor_api, env: VENDOR_API_KEY}
limits: {pids: PIDS, memory: MEMORY, cpus: 2, openFiles: 1024}
stop: {authority: "Ada Operator", maxTime: 60s}
`

// spawn makes the next kid, with room for so many processes.
func (s *stops) spawn(ctx context.Context, pids int) (wire.Kid, error) {
	s.kids++
	name := fmt.Sprintf("stop-%d", s.kids)
	// A bare fork costs some 100 KiB of the kernel's memory, and a shell's some 400.
	memory := fmt.Sprintf("%dMiB", 512+pids/2)
	card := strings.NewReplacer("NAME", "bench", "PIDS", fmt.Sprint(pids), "MEMORY", memory).Replace(stopCard)
	return s.box.Spawn(ctx, wire.SpawnRequest{Name: name, Purpose: "measure a stop", Card: card, InputDir: s.InputDir})
}

// run starts a command in the kid that ends with the kid, and returns at once. Its end is of no interest: what the
// observers see decides.
func (s *stops) run(ctx context.Context, kid string, argv ...string) {
	go s.box.Exec(ctx, kid, wire.ExecRequest{Argv: argv}, func(wire.ExecFrame) {}) // see above
}

// order stops a kid and returns the report; anything but a complete stop is an error, since its time means nothing.
func (s *stops) order(ctx context.Context, kid string, layers ...wire.Layer) (*wire.StopReport, error) {
	rep, err := s.box.Stop(ctx, wire.StopRequest{Scope: wire.Scope{Kid: kid}, Layers: layers, By: stopBy, Reason: "measured"}, func(wire.StopEvent) {})
	if err == nil && rep.State != wire.StateObserved {
		err = fmt.Errorf("stop %s of %s is %s: %+v", rep.Stop, kid, rep.State, rep.Layers)
	}
	return rep, err
}

// done removes the kid and takes the tag off, where there is one. A tag on a kid that is gone does no harm where it
// may not be taken off.
func (s *stops) done(ctx context.Context, kid wire.Kid, rep *wire.StopReport) error {
	if err := s.box.Destroy(ctx, kid.Name, "measured"); err != nil {
		return err
	}
	if rep != nil {
		s.box.Release(ctx, wire.ReleaseRequest{Stop: rep.Stop, By: stopBy, Reason: "measured"}) // see above
	}
	return nil
}

// untilLimit bounds the wait for what must be seen before or after an order.
const untilLimit = time.Minute

// until looks again and again until ok says yes.
func until(ctx context.Context, what string, ok func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, untilLimit)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("not seen: %s: %w", what, ctx.Err())
		case <-time.After(2 * time.Millisecond): // between looks at a condition
		}
	}
	return nil
}

// processes counts what lives in the kid.
func (s *stops) processes(kid wire.Kid) int {
	pids, err := cgroup.Procs(kid.Cgroup)
	if err != nil {
		return 0
	}
	return len(pids)
}

// longRuns is how often what takes long is run.
func (s *stops) longRuns() int { return max(1, s.Runs/3) }

// memory is killswitchd's, before the first stop and after the last.
func (s *stops) memory(before float64) ([]Metric, error) {
	after, err := s.rss()
	if err != nil {
		return nil, err
	}
	m := AtMost("resident memory of killswitchd after all stops", after, "MB", 25).Beside("itself before the first", before)
	if !m.Met {
		m.Limits = "records and events of stops that the garbage collector has not taken yet"
	}
	return []Metric{m}, nil
}

// rss is killswitchd's resident memory in MB.
func (s *stops) rss() (float64, error) {
	pids, err := cgroup.Procs(s.layout.V2(s.Inst.DaemonCgroupRel(instance.Killswitchd)))
	if err == nil && len(pids) != 1 {
		err = fmt.Errorf("killswitchd has %d processes", len(pids))
	}
	if err != nil {
		return 0, err
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pids[0]))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(raw)) {
		var kb float64
		if n, _ := fmt.Sscanf(line, "VmRSS: %f kB", &kb); n == 1 {
			return kb / 1024, nil
		}
	}
	return 0, errors.New("/proc says nothing about killswitchd's memory")
}
