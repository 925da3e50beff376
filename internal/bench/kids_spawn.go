package bench

import (
	"archive/tar"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// spawns measures a spawn until its first output beside the peers', by turns: the machine is in the same state for all.
func (l *lives) spawns(ctx context.Context) (metrics []Metric, err error) {
	bare := l.runc.bare()
	rivals := []*rival{
		{name: runcBare, once: func(ctx context.Context, _ string) (time.Duration, error) { return bare.firstOutput(ctx) }},
		{name: "runc run, limits and filter of a kid", once: func(ctx context.Context, _ string) (time.Duration, error) { return l.runc.firstOutput(ctx) }},
	}
	docker, err := openDocker(ctx, site{inst: l.Inst, layout: l.layout, born: func(fork func() error) error { return fork() }}, dockerWay{storage: "overlay2", bridge: true})
	switch {
	case errors.Is(err, errNoPeer):
		fmt.Fprintf(l.Out, "docker run is left out: %v\n", err)
	case err != nil:
		return nil, fmt.Errorf("docker: %w", err)
	default:
		defer func() { err = errors.Join(err, docker.close(context.WithoutCancel(ctx))) }()
		if err := docker.load(ctx, l.runc.image); err != nil {
			return nil, fmt.Errorf("docker: %w", err)
		}
		for _, way := range [][2]string{{dockerAlone, "none"}, {dockerBridge, "bridge"}} {
			options := append(append(l.runc.volumes(), dockerLimits...), "--network", way[1])
			rivals = append(rivals, &rival{name: way[0], once: func(ctx context.Context, name string) (time.Duration, error) {
				return docker.firstOutput(ctx, name, options)
			}})
		}
	}
	fmt.Fprintf(l.Out, "spawning %d kids, by turns with the peers\n", l.Spawns)
	var kids, first []time.Duration
	stages, steps := map[string][]time.Duration{}, map[string][]time.Duration{}
	for i := range l.Spawns + 1 {
		s, err := l.spawn(ctx, fmt.Sprintf("spawn-%d", i))
		if err == nil {
			err = l.destroy(ctx, s.kid.Name)
		}
		for _, w := range rivals {
			if err == nil {
				err = w.measure(ctx, fmt.Sprintf("spawn-%d", i), i > 0)
			}
		}
		if err != nil {
			return nil, err
		}
		if i == 0 {
			continue // nothing is warm yet
		}
		kids, first = append(kids, s.ready), append(first, s.command)
		for name, d := range s.kid.Timings {
			stages[name] = append(stages[name], d)
		}
		for name, d := range s.kid.Steps {
			steps[name] = append(steps[name], d)
		}
	}
	rows := append(spawnRows(kids, rivals, longest(steps)), timeRows("stage", stages)...)
	rows = append(rows, timeRows("step", steps)...)
	return append(rows, AtMost("first command in a new kid, request to first output, p50", Percentile(first, 50), "ms", 0)), nil
}

// rival is one peer's way to run a command in a new container.
type rival struct {
	name string
	once func(ctx context.Context, name string) (time.Duration, error)
	took []time.Duration
}

func (w *rival) measure(ctx context.Context, name string, counts bool) error {
	d, err := w.once(ctx, name)
	if err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	if counts {
		w.took = append(w.took, d)
	}
	return nil
}

// Peers that a spawn has a target beside.
const (
	runcBare     = "runc run, bare"
	dockerAlone  = "docker run, same limits, no network"
	dockerBridge = "docker run, same limits, its bridge"
)

// spawnTargets are parts of what the peer takes.
var spawnTargets = map[string]float64{runcBare: 2.5, dockerAlone: 0.2, dockerBridge: 0.2}

func spawnRows(kids []time.Duration, rivals []*rival, limits string) []Metric {
	var out []Metric
	for _, w := range rivals {
		for _, p := range []float64{50, 99} {
			theirs := Percentile(w.took, p)
			m := AtMost(fmt.Sprintf("spawn to first output, p%.0f", p), Percentile(kids, p), "ms", spawnTargets[w.name]*theirs).Beside(w.name, theirs)
			if !m.Met {
				m.Limits = limits
			}
			out = append(out, m)
		}
	}
	return out
}

// byLength returns the names, the longest times first.
func byLength(times map[string][]time.Duration) []string {
	return slices.SortedFunc(maps.Keys(times), func(a, b string) int {
		return cmp.Or(cmp.Compare(Percentile(times[b], 50), Percentile(times[a], 50)), cmp.Compare(a, b))
	})
}

// longest says where most of a spawn's time goes.
func longest(steps map[string][]time.Duration) string {
	var parts []string
	for _, name := range byLength(steps) {
		if len(parts) < 3 {
			parts = append(parts, fmt.Sprintf("%s %.1f ms", name, Percentile(steps[name], 50)))
		}
	}
	return "its longest steps: " + strings.Join(parts, ", ")
}

// timeRows lists the stages or steps of the spawns, the longest first.
func timeRows(what string, times map[string][]time.Duration) []Metric {
	var out []Metric
	for _, name := range byLength(times) {
		out = append(out, AtMost(what+" of a spawn, p50: "+name, Percentile(times[name], 50), "ms", 0))
	}
	return out
}

// image fills an image with the names, links and small files of the kid's root filesystem. What is mounted into it,
// volumes says.
func (r *runc) image(w *tar.Writer) error {
	return filepath.WalkDir(r.spec.Root.Path, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if path == r.spec.Root.Path {
			return nil
		}
		return addFile(w, path, strings.TrimPrefix(path, r.spec.Root.Path+"/"), entry)
	})
}

// addFile adds a directory, a link or a file to an archive.
func addFile(w *tar.Writer, path, name string, entry fs.DirEntry) error {
	info, err := entry.Info()
	if err != nil {
		return err
	}
	var target string
	var data []byte
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		target, err = os.Readlink(path)
	case info.Mode().IsRegular():
		data, err = os.ReadFile(path)
	}
	if err != nil {
		return err
	}
	head, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	head.Name = name
	if err := w.WriteHeader(head); err != nil {
		return err
	}
	_, err = w.Write(data)
	return err
}

// volumes are docker's options for the mounts of the kid's root filesystem.
func (r *runc) volumes() []string {
	var out []string
	for _, m := range r.spec.Mounts {
		if m.Type == "bind" && !strings.HasPrefix(m.Source, filepath.Dir(r.hostile)) {
			out = append(out, "--volume", m.Source+":"+m.Destination+":ro")
		}
	}
	return out
}

// firstOutput measures `docker run` until the first byte that a command printed, and waits until the container is gone.
func (e *engine) firstOutput(ctx context.Context, name string, options []string) (time.Duration, error) {
	args := append(slices.Clone(e.command[1:]), "run", "--rm", "--name", name, "--cgroup-parent", e.rel)
	args = append(append(args, options...), image)
	return firstOutput(exec.CommandContext(ctx, e.command[0], append(args, firstCommand...)...))
}
