// Command sandboxd makes, runs and destroys kids.
package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"tagout/bpf"
	"tagout/internal/audit"
	"tagout/internal/daemon"
	"tagout/internal/drillhistory"
	"tagout/internal/instance"
	"tagout/internal/leaks"
	"tagout/internal/lease"
	"tagout/internal/metrics"
	"tagout/sandboxd"
	"tagout/sandboxd/image/oci"
	"tagout/sandboxd/kids"
	"tagout/sandboxd/trial"
)

// trialArg makes this program try the runtime, and do nothing else.
const trialArg = "try-runtime"

// version is set by the linker.
var version = "unknown"

func main() {
	if len(os.Args) == 3 && os.Args[1] == trialArg {
		if _, err := trial.Run(context.Background(), os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	daemon.Main(instance.Sandboxd, run)
}

// tryRuntime runs a trial in a process of its own: a trial reaps its container's processes, and this process those of
// its kids.
func tryRuntime(ctx context.Context, self, init string) error {
	out, err := exec.CommandContext(ctx, self, trialArg, init).CombinedOutput()
	if ctx.Err() != nil {
		return nil // it was called off
	}
	if err != nil {
		return fmt.Errorf("trying the runtime: no kid can be started: %s (%w)", strings.TrimSpace(string(out)), err)
	}
	return nil
}

func run(ctx context.Context, d *daemon.Daemon) error {
	maps, err := bpf.Open(d.Inst.PinDir())
	if err != nil {
		return err
	}
	defer maps.Close() // what they hold stays
	d.Audit.SetScan(leaks.NewRedactor(audit.Redacted).Text)
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding kid-init: %w", err)
	}
	terms, err := lease.Load(d.Inst)
	if err != nil {
		d.Log.Error("going on with the default leases", "error", err)
	}
	d.Metrics.Drills(func() (time.Time, bool) { return drillhistory.LastPassed(instance.DrillDir()) })
	keep, err := keeper(d)
	if err != nil {
		return err
	}
	init := filepath.Join(filepath.Dir(self), "kid-init")
	return sandboxd.Run(ctx, sandboxd.Config{
		Keep: keep,
		Inst: d.Inst, Init: init, Trial: func(ctx context.Context) error { return tryRuntime(ctx, self, init) }, Alerts: sinks(d.Box), Streams: streams(d.Box), Version: version, Authorities: d.Box.Authorities, Leases: terms, Trip: d.Box.Trip, API: d.Box.API, Served: served(d.Box), SpawnSigned: d.Box.SpawnSigned,
		Registries: func(private bool) (*http.Transport, error) {
			return oci.NewTransport(d.Box.Resolvers[0], d.Box.UpstreamCAs, private)
		},
		Budget: kids.Budget{Box: d.Box.KidLimits.Kids, Owner: d.Box.KidLimits.KidsPerOwner},
		Kernel: &kernel{maps: maps, lease: terms.Kernel, opens: connectRate(d.Box.KidLimits)}, Denials: denials{maps}, Starts: starts{maps}, Audit: d.Audit, Metrics: metrics.NewSandboxd(d.Metrics), Log: d.Log,
	}, d.Serve)
}
