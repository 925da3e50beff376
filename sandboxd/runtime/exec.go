package runtime

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/kidinit"
)

// ErrNotStarted wraps the reason why a command could not be started: it does not exist, is not executable,
// or its directory is missing.
var ErrNotStarted = errors.New("the command could not be started")

// prepareLate is how long the next child waits for a command that goes on. One that is parked while a short command
// runs would hold up its end: the kernel removes no cgroup while it moves a process.
const prepareLate = 50 * time.Millisecond

// kidUmask is the umask of a kid's commands.
const kidUmask = 0o022

// Running is a command that runs in a container. Stdin, Stdout and Stderr are this side's ends of its pipes; of a
// command with a terminal, Stdin and Stdout are the terminal's master and Stderr is nil. Close closes them.
type Running struct {
	PID    int // in the host's pid namespace
	Stdin  *os.File
	Stdout *os.File
	Stderr *os.File

	handle *os.File // pidfd; closed when the command has ended
	group  execGroup
	tidied func() // called when the command is tidied away; may be nil
	done   chan struct{}
	exit   Exit // valid once done is closed

	adopted bool // another process has written input
	typed   bool // this one has, and last is the last byte of it
	last    byte
}

// Exec starts p in the container, in a cgroup of its own below the container's, so that Kill reaches
// everything that it forks. name is unique among the container's commands; bundle is Create's.
//
// The container's kid-init forks it where this process started that kid-init; runc starts it otherwise.
func (r *Runc) Exec(ctx context.Context, id, name, bundle string, p Process) (*Running, error) {
	fail := func(err error) (*Running, error) {
		return nil, fmt.Errorf("running a command in container %s: %w", id, err)
	}
	pipes, err := newStreams(p)
	if err != nil {
		return fail(err)
	}
	defer pipes.closeTheirs()
	run := &Running{Stdin: pipes.in.w, Stdout: pipes.out.r, Stderr: pipes.err.r, done: make(chan struct{})}
	err = errNoInit
	if m := r.master(id); m != nil && !p.Root { // kid-init has not the capabilities that root gets
		err = m.exec(ctx, p, pipes, run)
	}
	if errors.Is(err, errNoInit) {
		err = r.execRunc(ctx, id, name, bundle, p, pipes, run)
	}
	if err != nil {
		pipes.closeOurs()
		return fail(err)
	}
	return run, nil
}

// exec gives a parked child its command.
func (m *master) exec(ctx context.Context, p Process, pipes *pipes, run *Running) error {
	command, text, err := kidinit.Text(p.Dir, kidinit.Paths(p.Argv[0], p.Env), p.Argv, p.Env)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotStarted, err)
	}
	command.UID, command.Umask = KidUID, kidUmask
	if p.TTY != nil {
		command.TTY = 1
	}
	memory, err := inMemory(text)
	if err != nil {
		return err
	}
	defer memory.Close() // the child has mapped its own
	child, err := m.take(ctx)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { child.sock.SetDeadline(time.Now()) }) // ends waiting
	defer stop()
	deadline := time.Now().Add(patience)
	err = child.sock.send(kidinit.EncodeCommand(command), deadline, memory, pipes.in.r, pipes.out.w, pipes.err.w)
	if err == nil {
		err = child.answer(deadline, p)
	}
	if err != nil {
		m.giveUp(child)
		m.prepare()
		return m.explain(ctx, child, err)
	}
	child.sock.Close() // it has ended
	run.PID, run.handle, run.group = child.pid, child.handle, child.group
	late := time.AfterFunc(prepareLate, m.prepare)
	run.tidied = func() { late.Stop(); m.prepare() }
	go run.follow(m, child)
	return nil
}

// answer returns when the child has become the command.
func (c *parked) answer(deadline time.Time, p Process) error {
	if err := c.sock.SetReadDeadline(deadline); err != nil {
		return err
	}
	var buf [kidinit.FailureSize + 1]byte
	n, _, err := c.sock.receive(buf[:])
	if err != nil || n == 0 {
		return err
	}
	failure, err := kidinit.DecodeFailure(buf[:n])
	if err != nil {
		return err
	}
	switch errno := unix.Errno(failure.Errno); failure.Stage {
	case kidinit.StageDir:
		return fmt.Errorf("%w: directory %s: %w", ErrNotStarted, p.Dir, errno)
	case kidinit.StageExec:
		return fmt.Errorf("%w: %s: %w", ErrNotStarted, p.Argv[0], errno)
	default:
		return fmt.Errorf("preparing the command: %w", errno)
	}
}

// follow waits for the end of a command that kid-init forked. That it has ended the kernel says; how, kid-init.
func (r *Running) follow(m *master, c *parked) {
	defer close(r.done)
	defer c.handle.Close()
	r.exit = Exit{Signal: int(unix.SIGKILL)} // what ended kid-init ended it
	err := awaitEnd(c.handle)
	grace := time.NewTimer(reportGrace)
	defer grace.Stop()
	select {
	case report, ok := <-c.report:
		if ok && report.Kind == kidinit.Ended && err == nil {
			r.exit = exitOf(unix.WaitStatus(report.Status))
			r.exit.MaxRSS = int64(min(report.MaxRSS, math.MaxInt64>>10)) << 10
		}
	case <-grace.C:
		m.forget(c.id)
		r.exit = Exit{Unknown: true}
	}
}

func exitOf(ws unix.WaitStatus) Exit {
	if ws.Signaled() {
		return Exit{Signal: int(ws.Signal())}
	}
	return Exit{Code: ws.ExitStatus()}
}

// inMemory returns a file that lies in memory alone and holds text.
func inMemory(text []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("command", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // a kernel before 6.3
		fd, err = unix.MemfdCreate("command", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("writing down the command: %w", err)
	}
	f := os.NewFile(uintptr(fd), "command")
	if _, err := f.Write(text); err != nil {
		f.Close() // already failing
		return nil, fmt.Errorf("writing down the command: %w", err)
	}
	return f, nil
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
func (r *Running) Tidy() (gone bool) {
	gone = r.group.remove() == nil
	if r.tidied != nil {
		r.tidied()
	}
	return gone
}

// pipe is a pair of file ends.
type pipe struct{ r, w *os.File }

// pipes connects a command's standard streams. It implements go-runc's IO.
type pipes struct{ in, out, err pipe }

// newStreams makes what the process is to have.
func newStreams(p Process) (*pipes, error) {
	if p.TTY == nil {
		return newPipes(p.Owner)
	}
	master, slave, err := newTerminal(p.Owner, *p.TTY)
	if err != nil {
		return nil, err
	}
	return &pipes{in: pipe{r: slave, w: master}, out: pipe{r: master, w: slave}, err: pipe{w: slave}}, nil
}

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
