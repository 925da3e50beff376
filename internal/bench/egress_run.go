package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// EgressConfig says what to measure with. All fields must be set unless they say otherwise.
type EgressConfig struct {
	Inst     instance.Instance  // set up and running; a kid may ask as many DNS queries as it can
	Internet *practice.Internet // the box is configured for it
	Peers    string             // directory of the load command and of peers; those that are missing are left out
	Dir      string             // where egress.json is written
	Out      io.Writer
	Rounds   int           // how often each figure is taken; the median counts
	During   time.Duration // of one measurement
	Idle     int           // tunnels that are held open
	Only     []string      // parts to measure, of EgressParts; nil: all
	Hook     func() (HookMeter, error)
}

// HookMeter counts what the connect hook of kids costs while it is open.
type HookMeter interface {
	// Read returns how often the hook ran and how long that took, since the kernel loaded it.
	Read() (calls uint64, spent time.Duration, err error)
	Close() error
}

// egressCard lets the kid through to both servers. Its limits are those of a big job, so that the road is
// measured and not the limits.
const egressCard = `apiVersion: tagout/v1
kind: Card
name: bench-egress
task: Send as much as goes through.
image: host
egress:
  allow:
    - {host: bulk.vendor.test, ports: [443], protocol: tls}
    - {host: api.vendor.test, ports: [443], protocol: tls, inspect: true, methods: [GET], paths: ["/v1/*"]}
filesystem:
  inputs:
    - {from: load, to: /workspace/load, mode: "0755"}
  workspace: 64MiB
  tmp: 16MiB
limits: {pids: 256, memory: 1GiB, cpus: 4, openFiles: 8192}
stop: {authority: "Ada Operator", maxTime: 60s}
`

const portBulk = 443

// egress is one run.
type egress struct {
	EgressConfig
	layout cgroup.Layout
	box    drill.Box
	kid    string // the kid that measures
	sink   *sink
	place  *place
	peers  *peers
}

// EgressParts names the parts of the benchmark, in their order.
var EgressParts = [...]string{"tunnel", "open", "latency", "inspect", "dns", "hook", "idle"}

// RunEgress measures the road out beside its peers and writes egress.json. An error means that something
// could not be measured, and comes beside the figures that could; a missed target is no error and stands in
// the table.
func RunEgress(ctx context.Context, c EgressConfig) (metrics []Metric, err error) {
	e := &egress{EgressConfig: c, box: drill.Sockets(c.Inst, nil)}
	undo, err := e.prepare(ctx)
	defer func() { err = errors.Join(err, undo()) }()
	if err != nil {
		return nil, fmt.Errorf("preparing to measure egress: %w", err)
	}
	var failed []error
	for i, run := range []func(context.Context) ([]Metric, error){e.throughput, e.openings, e.latency, e.inspection, e.dns, e.hook, e.idle} {
		name := EgressParts[i]
		if c.Only != nil && !slices.Contains(c.Only, name) {
			continue
		}
		ms, err := run(ctx)
		if err != nil {
			fmt.Fprintf(e.Out, "measuring %s: %v\n", name, err)
			failed = append(failed, fmt.Errorf("measuring %s: %w", name, err))
			continue
		}
		metrics = append(metrics, ms...)
	}
	if err := Write(c.Dir, "egress", metrics); err != nil {
		return nil, err
	}
	return metrics, errors.Join(e.print(metrics), errors.Join(failed...))
}

// prepare makes everything that the measurements need. undo is never nil and removes what was made.
func (e *egress) prepare(ctx context.Context) (undo func() error, err error) {
	var steps []func() error
	undo = func() error {
		var errs []error
		for i := len(steps) - 1; i >= 0; i-- {
			errs = append(errs, steps[i]())
		}
		return errors.Join(errs...)
	}
	if e.Peers, err = filepath.Abs(e.Peers); err != nil { // programs are started in directories of their own
		return undo, err
	}
	if e.layout, err = cgroup.Detect(); err != nil {
		return undo, err
	}
	if e.sink, err = newSink(e.Internet, netip.AddrPortFrom(e.Internet.TicksAddr(), portBulk)); err != nil {
		return undo, err
	}
	steps = append(steps, e.sink.close)
	e.Internet.DNS.SetHost(nameBulk, e.sink.at.Addr())
	if e.place, err = newPlace(e.Inst, e.Internet.Link()); err != nil {
		return undo, err
	}
	steps = append(steps, e.place.close)
	if e.peers, err = newPeers(ctx, e); err != nil {
		return undo, err
	}
	steps = append(steps, func() error { return e.peers.close(context.WithoutCancel(ctx)) })
	if !isFile(filepath.Join(e.Peers, "load")) {
		return undo, fmt.Errorf("the load command is not in %s: run `make bench-egress`", e.Peers)
	}
	e.kid, err = e.spawn(ctx, "road")
	return undo, err
}

// spawn makes a kid; the box is gone after the benchmark, and its kids with it.
func (e *egress) spawn(ctx context.Context, name string) (string, error) {
	kid, err := e.box.Spawn(ctx, wire.SpawnRequest{Name: name, Purpose: "measure the road out", Card: egressCard, InputDir: e.Peers})
	return kid.Name, err
}

// proxyMemory is what the proxy has resident, in MB.
func (e *egress) proxyMemory() (float64, error) {
	pids, err := cgroup.Procs(e.layout.V2(e.Inst.DaemonCgroupRel(instance.Proxy)))
	if err != nil {
		return 0, err
	}
	return resident(pids...)
}
