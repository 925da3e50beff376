package kids

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"
	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/runtime"
)

// Results of an exec.
const (
	resultExited   = "exited"
	resultSignaled = "signaled"
	resultTimeout  = "timeout"
	resultStopped  = "stopped"
	resultOOM      = "oom"
	resultKilled   = "killed"
	resultFailed   = "failed"
	resultUnknown  = "unknown"
)

// Exit codes where the command gave none, as shells and timeout(1) have them.
const (
	codeUnknown     = -1
	codeTimeout     = 124
	codeNotRunnable = 126
	codeNotFound    = 127
	codeSignal      = 128 // plus the signal's number
	codeKilled      = codeSignal + int(unix.SIGKILL)
)

const (
	drainGrace = 200 * time.Millisecond // for output that a command's children still write after its end
	killGrace  = 2 * time.Second        // for a killed command to end
	stopGrace  = time.Second            // for killswitchd to hang the tag of a stop that just fired
)

// execFields are what a record says of a command. Environment and input stay out: they are the likeliest
// places of secrets.
func execFields(r wire.ExecRequest, exit *wire.ExecExit) map[string]string {
	argv := audit.Line(r.Argv) // the log redacts it, and cuts it after that
	if exit == nil {
		out := map[string]string{"argv": argv}
		asked(r, out)
		return out
	}
	const most = 512 // its start has it whole
	if len(argv) > most {
		argv = audit.WithoutLastWord(argv[:most])
	}
	out := map[string]string{"argv": argv, "result": exit.Result, "code": fmt.Sprint(exit.Code)}
	if exit.Signal != "" {
		out["signal"] = exit.Signal
	}
	return out
}

// asked says what else was asked for; of the environment and the input no more than that there was some.
func asked(r wire.ExecRequest, fields map[string]string) {
	if r.Shell != "" {
		fields["shell"] = r.Shell
	}
	if r.Dir != "" {
		fields["dir"] = audit.Shown(r.Dir)
	}
	if len(r.Env) > 0 {
		fields["env"] = audit.Line(slices.Sorted(maps.Keys(r.Env)))
	}
	if len(r.Stdin) > 0 {
		fields["stdin_bytes"] = fmt.Sprint(len(r.Stdin))
	}
	if r.TTY != nil {
		fields["tty"] = "true"
	}
	if r.Detach {
		fields["detach"] = "true"
	}
}

// admitExec finds the kid and says whether the command may run in it.
func (m *Manager) admitExec(ctx context.Context, name string, r wire.ExecRequest) (*kid, error) {
	if err := errors.Join(checkExec(r), m.canRecord()); err != nil {
		return nil, err
	}
	m.mu.Lock()
	k := m.kids[name]
	var view wire.Kid
	if k != nil {
		view = k.view()
	}
	m.mu.Unlock()
	if k == nil {
		return nil, notFound(name)
	}
	if view.State == wire.KidStopped || view.State == wire.KidRunning && m.isStopped(ctx, k) {
		if err := m.clear(ctx, k); KindOf(err) == Tagged {
			return nil, err // who stopped it, and why
		}
		return nil, refuse(Tagged, reason.Stopped, "kid %s was stopped: nothing runs in it any more; destroy it and spawn another", name)
	}
	if view.State == wire.KidOOM {
		return nil, refuse(Conflict, reason.OutOfMemory, "kid %s ended %s: nothing runs in it any more; destroy it and spawn another, with a larger limits.memory", name, view.Cause)
	}
	if view.State != wire.KidRunning {
		return nil, refuse(Conflict, reason.OK, "kid %s is %s: commands run only in a kid that is running", name, view.State)
	}
	if err := m.searchIn(k, "").command(r.Argv, r.Env, r.Stdin); err != nil {
		return nil, err
	}
	if err := m.clear(ctx, k); err != nil {
		return nil, err
	}
	return k, nil
}

func checkExec(r wire.ExecRequest) error {
	if len(r.Argv) == 0 || r.Argv[0] == "" {
		return refuse(Invalid, reason.Malformed, "no command was given")
	}
	if slices.ContainsFunc(append([]string{r.Dir}, r.Argv...), func(s string) bool { return strings.ContainsRune(s, 0) }) {
		return refuse(Invalid, reason.Malformed, "the command contains a NUL byte")
	}
	if max(len(r.Dir), len(r.Argv[0])) >= unix.PathMax { // and runc would hang on saying so
		return refuse(Invalid, reason.Malformed, "the command or its directory is longer than a path can be (%d bytes)", unix.PathMax-1)
	}
	if r.Dir != "" && !path.IsAbs(r.Dir) {
		return refuse(Invalid, reason.Malformed, "directory %q: give an absolute path", r.Dir)
	}
	if r.Timeout < 0 {
		return refuse(Invalid, reason.Malformed, "timeout %s: give a positive duration, or none", r.Timeout)
	}
	for name, value := range r.Env {
		if err := checkEnv(name); err != nil {
			return err
		}
		if strings.ContainsRune(value, 0) {
			return refuse(Invalid, reason.Malformed, "environment variable %s contains a NUL byte", name)
		}
	}
	return nil
}

// runCommand runs the command to its end and says how it ended. When ctx ends, its cause says why the command is
// killed.
func (m *Manager) runCommand(ctx context.Context, e *execution, r wire.ExecRequest) wire.ExecExit {
	k := e.k
	run, err := m.startInTime(ctx, k, r)
	if errors.Is(err, errTooSlow) {
		return wire.ExecExit{Result: resultTimeout, Code: codeTimeout, Detail: fmt.Sprintf("called off after %s, before it had started", r.Timeout)}
	}
	if err != nil {
		return m.notStarted(ctx, k, err)
	}
	m.noteFirst(k, time.Since(e.began))
	m.noteStarted(e, run)
	go m.feed(e, run, r)
	return m.see(ctx, e, run)
}

// see reads what the command writes, waits for its end, and says how it ended.
func (m *Manager) see(ctx context.Context, e *execution, run *runtime.Running) wire.ExecExit {
	defer m.tidy(e, run)
	defer run.Close()
	e.out.read(run)
	cause := m.await(ctx, e, run)
	cut := e.out.drain(run)
	exit := m.verdict(ctx, e, run, cause)
	exit.Cut, exit.Usage = cut, usage(run)
	return exit
}

// usage is what the command had used, nil where the kernel did not say.
func usage(run *runtime.Running) *wire.ExecUsage {
	user, system, err := run.CPU()
	if err != nil {
		return nil // the kid is gone
	}
	return &wire.ExecUsage{User: user, System: system, MaxRSS: run.Exit().MaxRSS}
}

// errTooSlow is a command whose time was over before it had started: the kid's processes can hold that up.
var errTooSlow = errors.New("its time was over before it had started")

// startInTime is start within the command's own time-out, to which starting does not count as long as it is
// quick.
func (m *Manager) startInTime(ctx context.Context, k *kid, r wire.ExecRequest) (*runtime.Running, error) {
	if r.Timeout == 0 {
		return m.start(ctx, k, r)
	}
	within, cancel := context.WithTimeoutCause(ctx, r.Timeout+killGrace, errTooSlow)
	defer cancel()
	run, err := m.start(within, k, r)
	if err != nil && context.Cause(within) == errTooSlow {
		err = errTooSlow
	}
	return run, err
}

func (m *Manager) start(ctx context.Context, k *kid, r wire.ExecRequest) (*runtime.Running, error) {
	m.tidyLingering(k)
	img, err := m.imageOf(k)
	if err != nil {
		return nil, err
	}
	dir := r.Dir
	if dir == "" {
		dir = runtime.Home
	}
	return m.cfg.Runtime.Exec(ctx, k.name, "exec-"+strings.ToLower(ulid.Make().String()), m.bundleDir(k), runtime.Process{
		Argv: r.Argv, Dir: dir, TTY: terminal(r.TTY), OpenFiles: k.rec.Plan.Limits.OpenFiles, Owner: m.runsAs(k), Root: k.rec.Plan.Root > 0,
		Env: environment(img.Env(m.rootDir(k)), k.rec.Plan.Env, k.rec.Tokens, r.Env),
	})
}

// notStarted says why a command did not start: it cannot be run, or the kid was stopped meanwhile.
func (m *Manager) notStarted(ctx context.Context, k *kid, err error) wire.ExecExit {
	if m.ranOut(k, false) {
		return wire.ExecExit{Result: resultOOM, Code: codeKilled, Detail: m.cause(k)}
	}
	if m.wasStopped(ctx, k) {
		return wire.ExecExit{Result: resultStopped, Code: codeKilled, Detail: "the kid was stopped before the command started"}
	}
	if errors.As(context.Cause(ctx), new(*endedBy)) {
		return wire.ExecExit{Result: resultKilled, Code: codeKilled, Detail: context.Cause(ctx).Error() + ", before it had started"}
	}
	m.cfg.Log.Info("a command could not be started", "kid", k.name, "error", err)
	code := codeNotFound
	if !errors.Is(err, runtime.ErrNotStarted) || strings.Contains(err.Error(), "permission denied") {
		code = codeNotRunnable
	}
	return wire.ExecExit{Result: resultFailed, Code: code, Detail: err.Error()}
}

// await returns when the command has ended, or as much as it ever will, with the reason why it was killed:
// empty where it was not killed from here.
func (m *Manager) await(ctx context.Context, e *execution, run *runtime.Running) (cause string) {
	k := e.k
	var expired <-chan time.Time
	if e.due > 0 {
		t := time.NewTimer(e.due - bootclock.Now())
		defer t.Stop()
		expired = t.C
	}
	select {
	case <-run.Done():
		return ""
	default:
	}
	select {
	case <-run.Done():
		return ""
	case <-k.gone:
	case <-expired:
		cause = resultTimeout
	case <-ctx.Done():
		cause = resultFailed
		if errors.As(context.Cause(ctx), new(*endedBy)) {
			cause = resultKilled
		}
	}
	if cause != "" {
		if err := run.Kill(); err != nil {
			m.cfg.Log.Error("killing a command", "kid", k.name, "error", err)
		}
	}
	grace := time.NewTimer(killGrace)
	defer grace.Stop()
	select {
	case <-run.Done():
	case <-grace.C: // in uninterruptible sleep, or held by a tracer outside: contained, not dead
	}
	return cause
}

// verdict says how the command ended.
func (m *Manager) verdict(ctx context.Context, e *execution, run *runtime.Running, cause string) wire.ExecExit {
	select {
	case <-run.Done():
	default:
		return wire.ExecExit{Result: resultFailed, Code: codeKilled, Detail: "the command was killed but has not ended: it waits in the kernel"}
	}
	switch exit := run.Exit(); {
	case cause == resultTimeout:
		return wire.ExecExit{Result: resultTimeout, Code: codeTimeout, Detail: fmt.Sprintf("killed after %s", e.timeout)}
	case cause == resultKilled:
		return wire.ExecExit{Result: resultKilled, Code: codeKilled, Signal: unix.SignalName(unix.SIGKILL), Detail: context.Cause(ctx).Error()}
	case cause == resultFailed:
		return wire.ExecExit{Result: resultFailed, Code: codeKilled, Detail: "killed because whoever asked for it went away"}
	case (exit.Unknown || exit.Signal == int(unix.SIGKILL)) && m.ranOut(e.k, false):
		return wire.ExecExit{Result: resultOOM, Code: codeKilled, Signal: unix.SignalName(unix.SIGKILL), Detail: m.cause(e.k)}
	case (exit.Unknown || exit.Signal == int(unix.SIGKILL)) && m.wasStopped(ctx, e.k):
		return wire.ExecExit{Result: resultStopped, Code: codeKilled, Signal: unix.SignalName(unix.SIGKILL)}
	case exit.Unknown:
		return wire.ExecExit{Result: resultUnknown, Code: codeUnknown, Detail: e.unknown()}
	case exit.Signal != 0:
		return wire.ExecExit{Result: resultSignaled, Code: codeSignal + exit.Signal, Signal: unix.SignalName(unix.Signal(exit.Signal))}
	default:
		return wire.ExecExit{Result: resultExited, Code: exit.Code}
	}
}

// wasStopped says whether a SIGKILL was a stop's or a destroy's. When all of the kid is gone it waits a
// little for killswitchd, which fires first and hangs the tag after.
func (m *Manager) wasStopped(ctx context.Context, k *kid) bool {
	deadline := time.Now().Add(stopGrace)
	for {
		m.mu.Lock()
		destroying := k.state.Is(wire.KidDestroying)
		m.mu.Unlock()
		if destroying || m.isStopped(ctx, k) {
			return true
		}
		select {
		case <-k.gone:
		case <-time.After(20 * time.Millisecond):
			return false // kid-init lives: it was not a stop
		}
		if time.Now().After(deadline) {
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// tidy removes the command's cgroup, now or, where background processes remain in it, before a later command.
func (m *Manager) tidy(e *execution, run *runtime.Running) {
	if run.Tidy() {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	e.lingers = true
	e.k.lingering = append(e.k.lingering, e)
}

func (m *Manager) tidyLingering(k *kid) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k.lingering = slices.DeleteFunc(k.lingering, func(e *execution) bool {
		if !e.run.Tidy() {
			return false
		}
		e.lingers = false
		m.dropRecord(e)
		return true
	})
}
