package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"tagout/internal/cgroup"
	"tagout/internal/clockstep"
	"tagout/internal/doctor"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/sandboxd/box"
	"tagout/sandboxd/trial"
)

// offVar names checks of doctor, with commas in between, that are to come out as missing: it shows how a
// machine without them is refused, and can only ever make a setup stop.
const offVar = "TAGOUT_DOCTOR_OFF"

// diagnose probes the machine.
func diagnose(ctx context.Context) doctor.Report {
	off := strings.FieldsFunc(os.Getenv(offVar), func(r rune) bool { return r == ',' || r == ' ' })
	return doctor.Probes{BPF: box.KernelBPF{}.Features, Trial: runtimeTrial(), Off: off}.Run(ctx)
}

// runtimeTrial runs a kid with the kid-init beside this program; nil where there is none.
func runtimeTrial() func(context.Context) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil
	}
	init := filepath.Join(filepath.Dir(self), "kid-init")
	if _, err := os.Stat(init); err != nil {
		return nil
	}
	return func(ctx context.Context) (string, error) { return trial.Run(ctx, init) }
}

func boxes() box.Boxes {
	return box.Boxes{
		BPF:    box.KernelBPF{},
		Doctor: diagnose,
		Extras: []box.Extra{
			{Cleanup: practice.Cleanup, Leftovers: practice.Leftovers},
			{Cleanup: drill.Unstage, Leftovers: drill.Staged},
			{Cleanup: rightClock, Leftovers: func(instance.Instance) []string { return clockstep.Left() }},
		},
	}
}

// groups fulfils supervise.Cgroups.
type groups struct{ cgroup.Layout }

func (groups) Kill(dir string) error { return cgroup.Kill(dir) }

func (groups) WaitEmpty(ctx context.Context, dir string) error { return cgroup.WaitEmpty(ctx, dir) }

// binDir makes a --bin-dir absolute; "" stands for where this program lies.
func binDir(dir string) (string, error) {
	if dir != "" {
		return filepath.Abs(dir)
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	return filepath.Dir(self), nil
}
