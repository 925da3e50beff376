package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	gorunc "github.com/containerd/go-runc"
	"golang.org/x/sys/unix"
)

// execRunc lets runc start p, where kid-init takes no orders.
func (r *Runc) execRunc(ctx context.Context, id, name, bundle string, p Process, pipes *pipes, run *Running) error {
	group, err := newExecGroup(filepath.Join(r.root, id), name)
	if err != nil {
		return err
	}
	r.procs.starting.RLock() // until the command is known to be ours to reap
	defer r.procs.starting.RUnlock()
	pid, err := r.enter(ctx, id, name, bundle, p, pipes)
	if err != nil {
		r.abandon(group)
		return err
	}
	if run.handle, err = pidfd(pid); err != nil { // a dead one is still ours to reap: this is no child of ours
		r.abandon(group)
		return err
	}
	run.PID, run.group = pid, group
	r.procs.add(pid)
	go func() {
		run.wait()
		r.procs.remove(pid)
	}()
	return nil
}

// enter lets runc start p and returns its pid. It does not use go-runc, which would write p with its
// environment, tokens included, to a file in the machine's temporary directory: a sandboxd that is killed
// would leave it there for good. The bundle goes with the kid.
func (r *Runc) enter(ctx context.Context, id, name, bundle string, p Process, pipes *pipes) (int, error) {
	base := filepath.Join(bundle, name)
	specFile, pidFile, logFile := base+".json", base+".pid", base+".log"
	defer func() {
		for _, f := range []string{specFile, pidFile, logFile} {
			os.Remove(f) // read by then
		}
	}()
	if p.TTY != nil {
		p.Argv = append([]string{InitPath, "tty"}, p.Argv...)
	}
	raw, err := json.Marshal(process(p, KidUID))
	if err == nil {
		err = os.WriteFile(specFile, raw, 0o600)
	}
	if err != nil {
		return 0, fmt.Errorf("writing down the command: %w", err)
	}
	noted, err := readState(filepath.Join(r.root, id))
	if err != nil {
		return 0, err
	}
	within, cancel := context.WithTimeout(ctx, r.Patience)
	defer cancel()
	// runc leaves the umask of what it starts so at what its own is, and the clocks too.
	cmd := exec.CommandContext(within, "/bin/sh", "-c", fmt.Sprintf(`umask %03o; exec "$0" "$@"`, kidUmask),
		"nsenter", "--time="+timeOf(noted.PID), "--", gorunc.DefaultCommand, "--root", r.root, "--log", logFile, "--log-format", string(gorunc.JSON),
		"exec", "--process", specFile, "--detach", "--pid-file", pidFile, "--cgroup", name, id)
	pipes.Set(cmd)
	bound(cmd)
	err = cmd.Run()
	switch {
	case err == nil:
		return readPID(pidFile)
	case ctx.Err() != nil:
		return 0, fmt.Errorf("it had not started when it was called off: %w", ctx.Err())
	case within.Err() != nil: // the kid can do that: once runc has put its uid on, its processes may stop it
		return 0, fmt.Errorf("it did not start within %v: processes in the kid may hold it up", r.Patience)
	default:
		return 0, fmt.Errorf("%w: %w", ErrNotStarted, explain(err, logFile))
	}
}

// abandon kills what is in the cgroup of a command that did not start. Reap removes it.
func (r *Runc) abandon(g execGroup) {
	g.kill() // what cannot be killed now dies with the kid
	r.procs.mu.Lock()
	defer r.procs.mu.Unlock()
	r.procs.abandoned = append(r.procs.abandoned, g)
}

// wait reaps the command. It is this process's child since runc ended.
func (r *Running) wait() {
	defer close(r.done)
	defer r.handle.Close()
	r.exit = Exit{Signal: int(unix.SIGKILL)} // if somebody else reaped it, it is gone all the same
	for {
		var ws unix.WaitStatus
		var used unix.Rusage
		_, err := unix.Wait4(r.PID, &ws, 0, &used)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err == nil:
			r.exit = exitOf(ws)
			r.exit.MaxRSS = used.Maxrss << 10
		}
		return
	}
}
