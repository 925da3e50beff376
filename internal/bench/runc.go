package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"tagout/internal/cgroup"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// runc is the peer: the same root filesystem, limits and seccomp filter as a kid's, run by bare runc without a
// network, a policy, tokens or a user namespace.
type runc struct {
	dir     string
	remove  func()
	spec    specs.Spec
	rel     string // cgroup
	layout  cgroup.Layout
	hostile string                      // the agent's binary, bound into the container
	model   func(context.Context) error // destroys the kid whose root filesystem is used
}

// newRunc learns the specification from the bundle of a kid of that card.
// inputDir holds the hostile binary.
func newRunc(ctx context.Context, inst instance.Instance, card []byte, inputDir string) (*runc, error) {
	layout, err := cgroup.Detect()
	if err != nil {
		return nil, err
	}
	dir, remove, err := scratch(inst)
	if err != nil {
		return nil, err
	}
	r := &runc{dir: dir, remove: remove, layout: layout, rel: inst.CgroupRel() + "/bench", hostile: filepath.Join(inputDir, "hostile")}
	if err := r.learn(ctx, inst, card); err != nil {
		remove()
		return nil, fmt.Errorf("preparing the bare runc: %w", err)
	}
	return r, nil
}

func (r *runc) learn(ctx context.Context, inst instance.Instance, card []byte) error {
	box := drill.Sockets(inst, nil)
	kid, err := box.Spawn(ctx, wire.SpawnRequest{Name: "bench-model", Purpose: "show its specification", Card: string(card), InputDir: filepath.Dir(r.hostile)})
	if err != nil {
		return err
	}
	// The kid lives on until close: its root filesystem is the peer's.
	r.model = func(ctx context.Context) error { return box.Destroy(ctx, kid.Name, "measured") }
	raw, err := os.ReadFile(filepath.Join(inst.KidDir(kid.Name), "bundle", "config.json"))
	if err == nil {
		err = json.Unmarshal(raw, &r.spec)
	}
	if err != nil {
		return errors.Join(err, r.model(context.WithoutCancel(ctx)))
	}
	r.strip(inst.KidDir(kid.Name))
	return nil
}

// strip takes away what bare runc does not have, and whatever belonged to the kid that is gone.
func (r *runc) strip(kidDir string) {
	var mounts []specs.Mount
	for _, m := range r.spec.Mounts {
		if !strings.HasPrefix(m.Source, kidDir) {
			mounts = append(mounts, m)
		}
	}
	r.spec.Mounts = append(mounts, specs.Mount{Destination: "/workspace", Type: "bind", Source: filepath.Dir(r.hostile), Options: []string{"bind", "ro"}})
	var spaces []specs.LinuxNamespace
	for _, ns := range r.spec.Linux.Namespaces {
		if ns.Type != specs.UserNamespace {
			spaces = append(spaces, specs.LinuxNamespace{Type: ns.Type})
		}
	}
	r.spec.Linux.Namespaces, r.spec.Linux.UIDMappings, r.spec.Linux.GIDMappings = spaces, nil, nil
	r.spec.Linux.CgroupsPath = r.rel
	r.spec.Process.User = specs.User{}
}

// close removes the peer and the kid that lent it its root filesystem.
func (r *runc) close(ctx context.Context) error {
	r.remove()
	return r.model(context.WithoutCancel(ctx))
}

// command returns `runc run` of argv as the container's only process.
func (r *runc) command(ctx context.Context, id string, argv ...string) (*exec.Cmd, error) {
	spec := r.spec
	process := *spec.Process
	process.Args = argv
	spec.Process = &process
	raw, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(r.dir, "config.json"), raw, 0o600); err != nil {
		return nil, err
	}
	return exec.CommandContext(ctx, "runc", "--root", filepath.Join(r.dir, "state"), "run", "--bundle", r.dir, id), nil
}

// firstOutput measures `runc run` until the first byte that a command printed.
func (r *runc) firstOutput(ctx context.Context) (time.Duration, error) {
	cmd, err := r.command(ctx, "bench-first", firstCommand...)
	if err != nil {
		return 0, err
	}
	return firstOutput(cmd)
}

// firstOutput starts cmd, measures until the first byte that it prints, and waits for its end.
func firstOutput(cmd *exec.Cmd) (time.Duration, error) {
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	_, readErr := bufio.NewReader(out).ReadByte()
	first := time.Since(began)
	if err := errors.Join(readErr, cmd.Wait()); err != nil {
		return 0, fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, stderr.Bytes())
	}
	return first, nil
}

// bare returns the peer without limits and without a filter for system calls.
func (r *runc) bare() *runc {
	out := *r
	linux, process := *r.spec.Linux, *r.spec.Process
	linux.Resources, linux.Seccomp, process.Rlimits = nil, nil, nil
	out.spec.Linux, out.spec.Process = &linux, &process
	return &out
}

// kills measures `runc kill --all ID KILL` until nothing of the hostile agent is left, as often as c.Runs.
func (r *runc) kills(ctx context.Context, c Config) ([]time.Duration, error) {
	var out []time.Duration
	for range c.Runs {
		d, err := r.kill(ctx)
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

func (r *runc) kill(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd, err := r.command(ctx, "bench-kill", "/workspace/hostile", "agent", "--parts", "storm")
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	dir := r.layout.V2(r.rel)
	for n := 0; n < processes; {
		pids, err := cgroup.Procs(dir)
		if err == nil {
			n = len(pids)
		}
		if ctx.Err() != nil {
			cmd.Process.Kill()
			return 0, fmt.Errorf("the agent under bare runc got to %d processes only", n)
		}
		time.Sleep(5 * time.Millisecond) // between looks at a condition
	}
	began := time.Now()
	kill := exec.CommandContext(ctx, "runc", "--root", filepath.Join(r.dir, "state"), "kill", "--all", "bench-kill", "KILL")
	if out, err := kill.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("runc kill: %w: %s", err, out)
	}
	if err := cgroup.WaitEmpty(ctx, dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	took := time.Since(began)
	cmd.Wait() // it was killed: any end is fine
	return took, nil
}
