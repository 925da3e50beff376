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

// ErrNotStarted wraps the reason why a command could not be started: it does not exist, is not executable,
// or its directory is missing.
var ErrNotStarted = errors.New("the command could not be started")

// Running is a command that runs in a container. Stdin, Stdout and Stderr are this side's ends of its pipes;
// Close closes them.
type Running struct {
	PID    int // in the host's pid namespace
	Stdin  *os.File
	Stdout *os.File
	Stderr *os.File

	group execGroup
	done  chan struct{}
	exit  Exit // valid once done is closed
}

// Exec starts p in the container, in a cgroup of its own below the container's, so that Kill reaches
// everything that it forks. name is unique among the container's commands; bundle is Create's.
func (r *Runc) Exec(ctx context.Context, id, name, bundle string, p Process) (run *Running, err error) {
	fail := func(err error) (*Running, error) {
		return nil, fmt.Errorf("running a command in container %s: %w", id, err)
	}
	group, err := newExecGroup(filepath.Join(r.root, id), name)
	if err != nil {
		return fail(err)
	}
	pipes, err := newPipes(p.Owner)
	if err != nil {
		r.abandon(group)
		return fail(err)
	}
	r.procs.starting.RLock() // until the command is known to be ours to reap
	defer r.procs.starting.RUnlock()
	pid, err := r.enter(ctx, id, name, bundle, p, pipes)
	pipes.closeTheirs()
	if err != nil {
		pipes.closeOurs()
		r.abandon(group)
		return fail(err)
	}
	run = &Running{PID: pid, Stdin: pipes.in.w, Stdout: pipes.out.r, Stderr: pipes.err.r, group: group, done: make(chan struct{})}
	r.procs.add(pid)
	go func() {
		run.wait()
		r.procs.remove(pid)
	}()
	return run, nil
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
	raw, err := json.Marshal(process(p, KidUID))
	if err == nil {
		err = os.WriteFile(specFile, raw, 0o600)
	}
	if err != nil {
		return 0, fmt.Errorf("writing down the command: %w", err)
	}
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(within, gorunc.DefaultCommand, "--root", r.root, "--log", logFile, "--log-format", string(gorunc.JSON),
		"exec", "--process", specFile, "--detach", "--pid-file", pidFile, "--cgroup", name, id)
	pipes.Set(cmd)
	err = cmd.Run()
	switch {
	case err == nil:
		return readPID(pidFile)
	case ctx.Err() != nil:
		return 0, fmt.Errorf("it had not started when it was called off: %w", ctx.Err())
	case within.Err() != nil: // the kid can do that: once runc has put its uid on, its processes may stop it
		return 0, fmt.Errorf("it did not start within %v: processes in the kid may hold it up", patience)
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

// Done is closed when the command itself has ended; what it started may go on.
func (r *Running) Done() <-chan struct{} { return r.done }

// Exit says how the command ended. Call it after Done.
func (r *Running) Exit() Exit { return r.exit }

// Kill kills the command and everything that it started.
func (r *Running) Kill() error { return r.group.kill() }

// Close closes the pipes. Closing twice is harmless.
func (r *Running) Close() { closeFiles(r.Stdin, r.Stdout, r.Stderr) }

// Tidy removes the command's cgroup; gone is false while something that the command started still runs in
// it. What is never tidied goes away with the container's cgroup.
func (r *Running) Tidy() (gone bool) { return r.group.remove() == nil }

// wait reaps the command. It is this process's child since runc ended.
func (r *Running) wait() {
	defer close(r.done)
	r.exit = Exit{Signal: int(unix.SIGKILL)} // if somebody else reaped it, it is gone all the same
	for {
		var ws unix.WaitStatus
		_, err := unix.Wait4(r.PID, &ws, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
		case ws.Signaled():
			r.exit = Exit{Signal: int(ws.Signal())}
		default:
			r.exit = Exit{Code: ws.ExitStatus()}
		}
		return
	}
}

// pipe is a pair of file ends.
type pipe struct{ r, w *os.File }

// pipes connects a command's standard streams. It implements go-runc's IO.
type pipes struct{ in, out, err pipe }

// newPipes makes pipes that belong to owner, a uid and gid of the host: the command may then open
// /dev/stdout and the like again (proc(5)), as any program may.
func newPipes(owner int) (*pipes, error) {
	var p pipes
	for _, end := range []*pipe{&p.in, &p.out, &p.err} {
		var err error
		if end.r, end.w, err = os.Pipe(); err == nil {
			err = end.r.Chown(owner, owner) // of the one inode that both ends are
		}
		if err != nil {
			p.closeTheirs()
			p.closeOurs()
			return nil, fmt.Errorf("making pipes: %w", err)
		}
	}
	return &p, nil
}

func (p *pipes) Set(cmd *exec.Cmd) { cmd.Stdin, cmd.Stdout, cmd.Stderr = p.in.r, p.out.w, p.err.w }

func (p *pipes) closeTheirs() { closeFiles(p.in.r, p.out.w, p.err.w) }

func (p *pipes) closeOurs() { closeFiles(p.in.w, p.out.r, p.err.r) }

func closeFiles(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close() // pipes lose nothing on close
		}
	}
}
