package bench

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"time"
)

// oneCommand is what is run in a kid that is up, and in a container of runc.
var oneCommand = []string{"/bin/echo", "ready"}

// commands measures a command in a kid until its end beside `runc exec`, by turns.
func (l *lives) commands(ctx context.Context) (metrics []Metric, err error) {
	fmt.Fprintf(l.Out, "running %d commands in a kid, by turns with runc exec\n", l.Execs)
	s, err := l.spawn(ctx, "commands")
	if err != nil {
		return nil, err
	}
	held, err := l.runc.hold(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, held()) }()
	var first, ends, runcs []time.Duration
	for i := range l.Execs + 1 {
		f, e, err := l.exec(ctx, s.kid.Name, oneCommand)
		if err != nil {
			return nil, err
		}
		began := time.Now()
		if err := l.runc.exec(ctx, oneCommand); err != nil {
			return nil, err
		}
		if took := time.Since(began); i > 0 { // the first finds nothing warm
			first, ends, runcs = append(first, f), append(ends, e), append(runcs, took)
		}
	}
	p50 := AtMost("command in a kid, request to its end, p50", Percentile(ends, 50), "ms", 5).Beside("runc exec", Percentile(runcs, 50))
	if !p50.Met {
		p50.Limits = "the processors: client, sandboxd, kid-init and the command each wait for their turn"
	}
	return []Metric{p50,
		AtMost("command in a kid, request to its end, p99", Percentile(ends, 99), "ms", 0).Beside("runc exec", Percentile(runcs, 99)),
		AtMost("command in a kid, request to first output, p50", Percentile(first, 50), "ms", 0),
		AtMost("command in a kid, request to first output, p99", Percentile(first, 99), "ms", 0),
	}, l.destroy(ctx, s.kid.Name)
}

// heldName is the container that commands are run in.
const heldName = "bench-held"

// hold runs a container that waits, and returns how to end it. runc exec works in it when hold returns.
func (r *runc) hold(ctx context.Context) (end func() error, err error) {
	cmd, err := r.command(ctx, heldName, "/bin/sleep", "infinity")
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	end = func() error {
		kill := exec.CommandContext(context.WithoutCancel(ctx), "runc", "--root", filepath.Join(r.dir, "state"), "kill", "--all", heldName, "KILL")
		said, err := kill.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("runc kill: %w: %s", err, said)
			cmd.Process.Kill() // or Wait would wait for ever
		}
		cmd.Wait() // it was killed: any end is fine
		return err
	}
	err = until(ctx, "a container of runc that takes commands", func() bool { return r.exec(ctx, oneCommand) == nil })
	if err != nil {
		return nil, errors.Join(err, end())
	}
	return end, nil
}

// exec runs a command in the container that hold made.
func (r *runc) exec(ctx context.Context, argv []string) error {
	args := append([]string{"--root", filepath.Join(r.dir, "state"), "exec", heldName}, argv...)
	if out, err := exec.CommandContext(ctx, "runc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("runc exec: %w: %s", err, out)
	}
	return nil
}
