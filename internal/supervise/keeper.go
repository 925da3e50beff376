package supervise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
	"tagout/internal/priority"
)

// settled is how long a daemon must have run for its next death to count as a first one again.
const settled = 10 * time.Second

// Bounds of the wait between restarts: everything that needs the daemon is denied meanwhile.
const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// backoff is how long the next restart waits: not at all, then minBackoff, and after as many restarts as quick says
// twice as long each time.
type backoff struct {
	next  time.Duration
	quick int
}

func (b *backoff) grow() {
	if b.next > 0 && b.quick <= 0 {
		b.next = min(2*b.next, maxBackoff)
		return
	}
	b.next, b.quick = minBackoff, b.quick-1
}

// keeper keeps one daemon running.
type keeper struct {
	cfg    Config
	spec   Spec
	cancel context.CancelFunc
	done   chan struct{} // closed when the daemon is gone and is not started again
	notify *notifier     // nil where there is no watchdog
}

// child is one run of a daemon.
type child struct {
	cmd    *exec.Cmd
	logEnd int64 // size of the log before this run
	begun  time.Time
	exited chan struct{}
	err    error // how it ended; valid after exited is closed
}

// keep starts the daemon, waits until it is healthy and then keeps it running in the background until stop.
func keep(ctx context.Context, cfg Config, s Spec) (*keeper, error) {
	// The keeper must outlive ctx: what ends with ctx is Up, which then stops the keepers one by one.
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	k := &keeper{cfg: cfg, spec: s, cancel: cancel, done: make(chan struct{})}
	c, err := k.first(ctx, run)
	if err != nil {
		cancel()
		return nil, err
	}
	cfg.Log.Info("daemon is up", "daemon", s.Name, "pid", c.cmd.Process.Pid)
	go k.loop(run, c)
	return k, nil
}

// first starts the daemon for the first time and waits until it is healthy.
func (k *keeper) first(ctx, run context.Context) (*child, error) {
	if k.spec.Watchdog > 0 {
		n, err := listen(filepath.Join(k.cfg.Inst.RunDir(), "notify", k.spec.Name), k.spec.UID)
		if err != nil {
			return nil, err
		}
		k.notify = n
	}
	c, err := k.start(run)
	if err == nil {
		if err = k.waitHealthy(ctx, c); err != nil {
			k.end(c)
		}
	}
	if err != nil {
		k.deafen()
		return nil, err
	}
	return c, nil
}

// deafen ends the notify socket, where there is one.
func (k *keeper) deafen() {
	if k.notify != nil {
		k.notify.close()
	}
}

// stop ends the daemon: SIGTERM, then cgroup.kill after the grace. It returns when the daemon is gone.
func (k *keeper) stop() {
	k.cancel()
	<-k.done
}

func (k *keeper) loop(ctx context.Context, c *child) {
	defer close(k.done)
	defer k.deafen()
	wait := backoff{quick: k.spec.Quick}
	for {
		select {
		case <-ctx.Done():
			k.end(c)
			return
		case <-c.exited:
		}
		if time.Since(c.begun) > settled {
			wait = backoff{quick: k.spec.Quick}
		}
		k.cfg.Log.Error("daemon died: starting it again", "daemon", k.spec.Name, "how", exitText(c.err), "last", c.lastWords(k.spec.LogFile), "wait", wait.next)
		for c = nil; c == nil; {
			if !pause(ctx, wait.next) {
				k.clear()
				return
			}
			wait.grow()
			next, err := k.restart(ctx)
			if err != nil {
				k.cfg.Log.Error("starting the daemon again", "daemon", k.spec.Name, "err", err, "wait", wait.next)
			}
			c = next
		}
	}
}

// restart clears what the dead daemon left in its cgroup and starts it.
func (k *keeper) restart(ctx context.Context) (*child, error) {
	if err := sweep(ctx, k.cfg, k.spec); err != nil {
		return nil, err
	}
	return k.start(ctx)
}

// start runs the daemon once, inside its cgroup from its first instruction on, and watches it until ctx ends.
func (k *keeper) start(ctx context.Context) (*child, error) {
	s := k.spec
	log, err := os.OpenFile(s.LogFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o640) // logs carry no secrets
	if err != nil {
		return nil, fmt.Errorf("opening its log: %w", err)
	}
	defer log.Close() // the child has its own copy
	end, err := log.Seek(0, 2)
	if err != nil {
		return nil, fmt.Errorf("opening its log: %w", err)
	}
	cmd := exec.Command(s.Path, s.Args...)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = slices.Clone(s.Env), "/", log, log
	if k.notify != nil {
		cmd.Env = append(cmd.Env, k.notify.env(s.Watchdog)...)
	}
	if s.Unlock != "" {
		if f, err := openKey(s.Unlock); err != nil { // without it the daemon denies everything, and can be told to stop doing so
			k.cfg.Log.Error("opening what opens the vault", "daemon", s.Name, "err", err)
		} else {
			defer f.Close() // the child has its own copy
			cmd.ExtraFiles, cmd.Env = []*os.File{f}, append(cmd.Env, instance.UnlockEnv+"=3")
		}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true, // a Ctrl-C at the terminal reaches the supervisor alone, which stops them in order
	}
	if s.UID != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(s.UID), Gid: uint32(s.GID)} // ids are not negative
		cmd.SysProcAttr.AmbientCaps = s.Caps
	}
	c := &child{cmd: cmd, logEnd: end, begun: time.Now(), exited: make(chan struct{})}
	if err := startIn(cmd, s.Cgroup, k.prepare); err != nil {
		return nil, err
	}
	go func() {
		c.err = cmd.Wait()
		close(c.exited)
	}()
	if err := writePid(s.PidFile, cmd.Process.Pid); err != nil {
		k.end(c)
		return nil, fmt.Errorf("noting its pid: %w", err)
	}
	if k.notify != nil {
		go k.watchdog(ctx, c)
	}
	return c, nil
}

// openKey opens a regular file: a pipe would be empty at the second start, or have this wait for a writer.
func openKey(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close() // nothing was read
		return nil, errors.Join(err, fmt.Errorf("%s is no regular file", path))
	}
	return f, nil
}

// prepare does what must be done before the first instruction, or needs a privilege that the daemon has not.
func (k *keeper) prepare(pid int) {
	if k.notify != nil {
		k.notify.expect(pid)
	}
	if k.spec.Nice == 0 {
		return
	}
	if err := priority.Give(pid, k.spec.Nice); err != nil {
		k.cfg.Log.Warn("the daemon runs without its priority: under load a stop may take longer", "daemon", k.spec.Name, "err", err)
	}
}

// end stops one run: asks, waits, and then kills the whole cgroup.
func (k *keeper) end(c *child) {
	c.cmd.Process.Signal(unix.SIGTERM) // it may be gone already
	select {
	case <-c.exited:
	case <-time.After(k.cfg.Grace):
		k.cfg.Log.Warn("daemon did not stop when asked: killing it", "daemon", k.spec.Name)
	}
	k.clear()
	<-c.exited
}

// clear kills whatever is left in the cgroup and removes the pid file.
func (k *keeper) clear() {
	if err := sweep(context.Background(), k.cfg, k.spec); err != nil {
		k.cfg.Log.Error("clearing the daemon's cgroup", "daemon", k.spec.Name, "err", err)
	}
	if err := os.Remove(k.spec.PidFile); err != nil && !errors.Is(err, os.ErrNotExist) {
		k.cfg.Log.Error("removing the daemon's pid file", "daemon", k.spec.Name, "err", err)
	}
}

func writePid(path string, pid int) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(strconv.Itoa(pid)+"\n"), 0o644); err != nil { // not secret
		return err
	}
	return os.Rename(tmp, path)
}

func exitText(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

// pause waits for d and returns true, or returns false as soon as ctx ends.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return ctx.Err() == nil
	}
}
