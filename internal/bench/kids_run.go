package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// KidsConfig says what to measure the life of kids with. All fields must be set.
type KidsConfig struct {
	Inst     instance.Instance // set up and running, with vendor_api in the vault
	InputDir string            // an existing directory; nothing in it is used
	Dir      string            // where kids.json is written
	Out      io.Writer
	Spawns   int // how often a spawn is measured, and each peer's
	Execs    int // the same of a command
	Idle     int // kids that are idle at once
	Parallel int // spawns at once
}

// kidsCard is the card of the kids that are measured: with everything that makes a spawn slow but a big input.
const kidsCard = `apiVersion: tagout/v1
kind: Card
name: bench
task: Be spawned, and be timed.
image: host
egress:
  allow:
    - {host: api.vendor.test, ports: [443], protocol: tls, inspect: true, credential: vendor_api}
    - {host: files.vendor.test, ports: [80], protocol: http}
filesystem: {workspace: 64MiB, tmp: 16MiB}
identity:
  scope:
    - {secret: vendor_api, env: VENDOR_API_KEY}
limits: {pids: 128, memory: 256MiB, cpus: 1, openFiles: 1024}
stop: {authority: "Ada Operator", maxTime: 60s}
`

// dockerLimits are kidsCard's, and what else holds a kid that docker can be asked for.
var dockerLimits = []string{
	"--pids-limit", "128", "--memory", "256m", "--cpus", "1", "--ulimit", "nofile=1024:1024", "--read-only",
	"--tmpfs", "/tmp:size=16m", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "1000:1000",
}

// lives is one run of the benchmark.
type lives struct {
	KidsConfig
	box    drill.Box
	layout cgroup.Layout
	runc   *runc
}

// RunKids measures and writes what a kid's life costs: spawns beside runc and docker, commands beside `runc exec`, idle
// kids' memory, spawns at once. Without docker its figures are left out; a missed target is no error and stands in the
// table.
func RunKids(ctx context.Context, c KidsConfig) (metrics []Metric, err error) {
	layout, err := cgroup.Detect()
	if err != nil {
		return nil, fmt.Errorf("measuring kids: %w", err)
	}
	l := &lives{KidsConfig: c, box: drill.Sockets(c.Inst, nil), layout: layout}
	if l.runc, err = newRunc(ctx, c.Inst, []byte(kidsCard), c.InputDir); err != nil {
		return nil, fmt.Errorf("measuring kids: %w", err)
	}
	defer func() { err = errors.Join(err, l.runc.close(ctx)) }()
	return measure(ctx, c.Out, c.Dir, "kids", []part{
		{"spawns", l.spawns}, {"commands", l.commands}, {"spawns at once", l.parallel}, {"idle kids", l.idle},
	})
}

// firstCommand is what a new kid runs, and every peer's container.
var firstCommand = []string{"/bin/sh", "-c", "echo ready"}

// spawned is one measured spawn.
type spawned struct {
	kid     wire.Kid
	ready   time.Duration // request to the first byte that a command in it printed
	command time.Duration // the part of it from the request of the command on
}

// spawn makes a kid. The caller destroys it.
func (l *lives) spawn(ctx context.Context, name string) (s spawned, err error) {
	began := time.Now()
	s.kid, err = l.box.Spawn(ctx, wire.SpawnRequest{Name: name, Purpose: "measure a spawn", Card: kidsCard, InputDir: l.InputDir})
	if err != nil {
		return s, err
	}
	up := time.Since(began)
	s.command, _, err = l.exec(ctx, name, firstCommand)
	s.ready = up + s.command
	return s, err
}

// exec runs a command that prints something, and returns how long it took until its first byte and until its end.
func (l *lives) exec(ctx context.Context, kid string, argv []string) (first, end time.Duration, err error) {
	began := time.Now()
	err = l.box.Exec(ctx, kid, wire.ExecRequest{Argv: argv}, func(f wire.ExecFrame) {
		if first == 0 && len(f.Stdout) > 0 {
			first = time.Since(began)
		}
		if f.Exit != nil && f.Exit.Code == 0 {
			end = time.Since(began)
		}
	})
	if err == nil && (first == 0 || end == 0) {
		err = fmt.Errorf("the command %v in %s did not print and end as it should", argv, kid)
	}
	return first, end, err
}

func (l *lives) destroy(ctx context.Context, kid string) error {
	return l.box.Destroy(ctx, kid, "measured")
}
