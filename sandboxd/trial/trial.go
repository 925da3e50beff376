// Package trial finds out whether this machine can run a kid, by running one: a container as every kid gets it, with
// kid-init alone in it, no network and no session. That a program of the runtime's is installed proves nothing: it may
// be unable to run here. What a trial makes is gone when it returns; what a killed one left, the next one removes.
package trial

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/sandboxd/network"
	"tagout/sandboxd/runtime"
)

// limit bounds a trial: a runtime that hangs is one that cannot run.
const limit = 15 * time.Second

// name is the kid's. Its things are named after the process that tries.
const name = "trial"

// prefix begins the names of directories and cgroups; the pid of who tries ends them.
const prefix = "tagout-trial-"

// Run makes a container with the runtime found on PATH, runs a command in it and removes it. init is the path of
// kid-init. It says what it did; the error says what did not work.
func Run(ctx context.Context, init string) (found string, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	layout, err := cgroup.Detect()
	if err != nil {
		return "", err
	}
	if err := removeOld(ctx, layout); err != nil {
		return "", fmt.Errorf("removing what a killed trial left: %w", err)
	}
	if _, err := os.Stat(init); err != nil {
		return "", fmt.Errorf("looking for kid-init: install it beside the other programs: %w", err)
	}
	t := newTrial(os.Getpid(), layout)
	began := time.Now()
	err = t.run(ctx, init)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("it hangs: there was no result after %s: %w", time.Since(began).Round(time.Second), err)
	}
	if err := errors.Join(err, t.remove(context.WithoutCancel(ctx))); err != nil {
		return "", err
	}
	return fmt.Sprintf("made a container, ran a command in it and removed it in %s", time.Since(began).Round(time.Millisecond)), nil
}

type trial struct {
	dir    string
	rel    string // of its cgroup
	layout cgroup.Layout
	pins   network.Namespaces
}

func newTrial(pid int, layout cgroup.Layout) trial {
	dir := filepath.Join("/run", prefix+strconv.Itoa(pid))
	return trial{dir: dir, rel: "/" + filepath.Base(dir), layout: layout, pins: network.Paths(filepath.Join(dir, "ns"), name)}
}

func (t trial) run(ctx context.Context, init string) (err error) {
	root, bundle := filepath.Join(t.dir, "root"), filepath.Join(t.dir, "bundle")
	dirs, files := runtime.RootFiles()
	for _, d := range append([]string{"/"}, dirs...) {
		if err := makeDir(filepath.Join(root, d)); err != nil {
			return err
		}
	}
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(root, f), nil, 0o644); err != nil {
			return err
		}
	}
	if err := errors.Join(makeDir(t.dir), os.Mkdir(bundle, 0o700)); err != nil {
		return err
	}
	nobody, err := instance.New(name, 0)
	if err != nil {
		return err
	}
	first, count := nobody.KidUIDRange(0) // no kid has the index 0
	if err := network.CreateNamespaces(ctx, network.NamespaceConfig{Pins: t.pins, UIDFirst: first, UIDCount: count, Holder: init}); err != nil {
		return err
	}
	if err := t.layout.Create(t.rel); err != nil {
		return err
	}
	stay, err := adopting()
	if err != nil {
		return err
	}
	defer stay()
	runc, err := runtime.NewRunc(filepath.Join(t.dir, "runc"))
	if err != nil {
		return err
	}
	spec := runtime.Spec{
		ID: name, Root: root, Init: init, UserNS: t.pins.User, NetNS: t.pins.Net, UIDFirst: first, UIDCount: count, Cgroup: t.rel,
		Limits: runtime.Limits{PIDs: 32, Memory: 64 << 20, CPUs: 1, OpenFiles: 64}, Tmp: 1 << 20,
	}
	state, err := runc.Create(ctx, bundle, spec)
	if err != nil {
		return err
	}
	defer func() {
		end(t.layout.V2(t.rel))
		err = errors.Join(err, runc.Delete(context.WithoutCancel(ctx), name))
		unix.Wait4(state.PID, nil, 0, nil) // it is dead, and ours
	}()
	if err := runc.Start(ctx, name); err != nil {
		return err
	}
	return command(ctx, runc, bundle, int(first)+runtime.KidUID)
}

// adopting makes this process, for as long as the trial takes, the one that reaps what runtime.NewRunc leaves to it.
func adopting() (stay func(), err error) {
	var was int32
	if err := unix.Prctl(unix.PR_GET_CHILD_SUBREAPER, uintptr(unsafe.Pointer(&was)), 0, 0, 0); err != nil {
		return nil, fmt.Errorf("asking who reaps: %w", err)
	}
	return func() { unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, uintptr(was), 0, 0, 0) }, nil // it was possible before
}

// end kills what is in the cgroup and waits until that is dead.
func end(group string) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cgroup.Kill(group)           // remove says it where that is not possible
	cgroup.WaitEmpty(ctx, group) // likewise
}

// command runs a command that ends when its input does.
func command(ctx context.Context, runc *runtime.Runc, bundle string, owner int) error {
	p := runtime.Process{Argv: []string{runtime.InitPath, "hold"}, Env: []string{}, Dir: "/", OpenFiles: 64, Owner: owner}
	running, err := runc.Exec(ctx, name, "command", bundle, p)
	if err != nil {
		return err
	}
	defer running.Close()
	if err := running.Stdin.Close(); err != nil {
		return err
	}
	select {
	case <-running.Done():
	case <-ctx.Done():
		return fmt.Errorf("waiting for a command in the container: %w", ctx.Err())
	}
	if exit := running.Exit(); exit.Code != 0 || exit.Signal != 0 || exit.Unknown {
		return fmt.Errorf("the command in the container ended with code %d, signal %d instead of 0", exit.Code, exit.Signal)
	}
	return nil
}

// remove takes everything away, whatever there is of it.
func (t trial) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	group := t.layout.V2(t.rel)
	if _, err := os.Stat(group); err == nil {
		if err := errors.Join(cgroup.Kill(group), cgroup.Thaw(group, t.layout.Freezer(t.rel)), cgroup.WaitEmpty(ctx, group)); err != nil {
			return fmt.Errorf("ending the trial's container: %w", err)
		}
	}
	err := errors.Join(network.RemoveNamespaces(t.pins), t.layout.Remove(ctx, t.rel))
	if err != nil {
		return fmt.Errorf("removing the trial's container: %w", err)
	}
	if err := errors.Join(runtime.RemoveState(filepath.Join(t.dir, "runc", name)), os.RemoveAll(t.dir)); err != nil {
		return fmt.Errorf("removing the trial's container: %w", err)
	}
	return nil
}

// removeOld removes the trials of processes that are gone.
func removeOld(ctx context.Context, layout cgroup.Layout) error {
	dirs, err := filepath.Glob(filepath.Join("/run", prefix+"*"))
	if err != nil {
		return err
	}
	groups, err := filepath.Glob(layout.V2("/" + prefix + "*"))
	if err != nil {
		return err
	}
	for _, dir := range append(dirs, groups...) {
		pid, err := strconv.Atoi(filepath.Base(dir)[len(prefix):])
		if err != nil {
			continue // not a trial's
		}
		if err := unix.Kill(pid, 0); pid != os.Getpid() && !errors.Is(err, unix.ESRCH) {
			continue // it may be at it
		}
		if err := newTrial(pid, layout).remove(ctx); err != nil {
			return err
		}
	}
	return nil
}

// makeDir lets runc pass as the container's root user, whatever the umask is.
func makeDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.Chmod(dir, 0o755)
}
