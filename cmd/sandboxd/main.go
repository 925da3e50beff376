// Command sandboxd makes, runs and destroys kids.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"tagout/bpf"
	"tagout/internal/daemon"
	"tagout/internal/drillhistory"
	"tagout/internal/instance"
	"tagout/internal/lease"
	"tagout/internal/metrics"
	"tagout/sandboxd"
	"tagout/sandboxd/kids"
)

func main() { daemon.Main(instance.Sandboxd, run) }

func run(ctx context.Context, d *daemon.Daemon) error {
	maps, err := bpf.Open(d.Inst.PinDir())
	if err != nil {
		return err
	}
	defer maps.Close() // what they hold stays
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding kid-init: %w", err)
	}
	terms, err := lease.Load(d.Inst)
	if err != nil {
		d.Log.Error("going on with the default leases", "error", err)
	}
	d.Metrics.Drills(func() (time.Time, bool) { return drillhistory.LastPassed(instance.DrillDir()) })
	return sandboxd.Run(ctx, sandboxd.Config{
		Inst: d.Inst, Init: filepath.Join(filepath.Dir(self), "kid-init"), Alerts: sinks(d.Box), Authorities: d.Box.Authorities, Leases: terms, Trip: d.Box.Trip, API: d.Box.API,
		Budget: kids.Budget{Box: d.Box.KidLimits.Kids, Owner: d.Box.KidLimits.KidsPerOwner},
		Kernel: &kernel{maps: maps, lease: terms.Kernel, opens: connectRate(d.Box.KidLimits)}, Denials: denials{maps}, Audit: d.Audit, Metrics: metrics.NewSandboxd(d.Metrics), Log: d.Log,
	}, d.Serve)
}
