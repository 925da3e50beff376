package runtime

import (
	"context"
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
	pipes, err := newPipes()
	if err != nil {
		group.remove() //nolint:errcheck // already failing
		return fail(err)
	}
	pidFile, logFile := filepath.Join(bundle, name+".pid"), filepath.Join(bundle, name+".log")
	defer os.Remove(pidFile) //nolint:errcheck // read by then
	defer os.Remove(logFile) //nolint:errcheck // as above
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	r.procs.starting.RLock() // until the command is known to be ours to reap
	defer r.procs.starting.RUnlock()
	err = r.runc.Exec(ctx, id, *process(p, KidUID), &gorunc.ExecOpts{
		IO: pipes, PidFile: pidFile, LogFile: logFile, Detach: true, ExtraArgs: []string{"--cgroup", name},
	})
	pipes.closeTheirs()
	var pid int
	if err == nil {
		pid, err = readPID(pidFile)
	} else {
		err = fmt.Errorf("%w: %w", ErrNotStarted, explain(err, logFile))
	}
	if err != nil {
		pipes.closeOurs()
		return fail(errors.Join(err, group.kill(), group.remove()))
	}
	run = &Running{PID: pid, Stdin: pipes.in.w, Stdout: pipes.out.r, Stderr: pipes.err.r, group: group, done: make(chan struct{})}
	r.procs.add(pid)
	go func() {
		run.wait()
		r.procs.remove(pid)
	}()
	return run, nil
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

func newPipes() (*pipes, error) {
	var p pipes
	for _, end := range []*pipe{&p.in, &p.out, &p.err} {
		r, w, err := os.Pipe()
		if err != nil {
			p.closeTheirs()
			p.closeOurs()
			return nil, fmt.Errorf("making pipes: %w", err)
		}
		end.r, end.w = r, w
	}
	return &p, nil
}

func (p *pipes) Set(cmd *exec.Cmd) { cmd.Stdin, cmd.Stdout, cmd.Stderr = p.in.r, p.out.w, p.err.w }

func (p *pipes) closeTheirs() { closeFiles(p.in.r, p.out.w, p.err.w) }

func (p *pipes) closeOurs() { closeFiles(p.in.w, p.out.r, p.err.r) }

func closeFiles(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close() //nolint:errcheck // pipes lose nothing on close
		}
	}
}
