package bench

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// agents measures the whole stop of the hostile agent from the command line on, and the kill commands of the peers
// on the same agent.
func (s *stops) agents(ctx context.Context) ([]Metric, error) {
	runs := s.longRuns()
	fmt.Fprintf(s.Out, "stopping %d hostile agents with %d processes each from the command line\n", runs, hostileProcesses)
	var told, seen, silent []time.Duration
	for range runs {
		t, err := s.stopAgent(ctx)
		if err != nil {
			return nil, err
		}
		told, seen, silent = append(told, t.told), append(seen, t.seen), append(silent, t.silent)
	}
	all := AtMost("all layers, hostile agent: `tagout stop` started to all observed and told, p99", Percentile(told, 99), "ms", 150)
	if !all.Met {
		all.Limits = fmt.Sprintf("the scheduler: the command line and killswitchd share the processors with %d runnable processes", hostileProcesses)
	}
	out := []Metric{all,
		AtMost("all layers: the same, p50", Percentile(told, 50), "ms", 0),
		AtMost("all layers: started to last sign of life seen from outside, p99", Percentile(seen, 99), "ms", 0),
	}
	at := site{inst: s.Inst, layout: s.layout, born: s.Internet.Do}
	for _, p := range []struct {
		name string
		open func(context.Context) (*engine, error)
	}{
		{"docker kill", func(ctx context.Context) (*engine, error) { return openDocker(ctx, at, dockerWay{storage: "vfs"}) }},
		{"podman kill", func(ctx context.Context) (*engine, error) { return openPodman(ctx, at) }},
	} {
		m, err := s.beside(ctx, p.name, p.open, silent)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		out = append(out, m...)
	}
	return out, nil
}

// stopTimes are counted from before the command was started.
type stopTimes struct {
	told   time.Duration // the command ended, with the word that all was observed
	seen   time.Duration // last process, byte and accepted use, as seen from outside
	silent time.Duration // last byte at the sink
}

// attempts is how often an agent is started anew that does not come to work within workLimit: one that runs into its
// limit of processes too early may be left without a thread to work with.
const (
	attempts  = 3
	workLimit = 15 * time.Second
)

// hostileKid returns a kid with the agent at work.
func (s *stops) hostileKid(ctx context.Context) (wire.Kid, error) {
	var missing string
	for range attempts {
		kid, err := s.spawn(ctx, processLimit)
		if err != nil {
			return kid, err
		}
		s.run(ctx, kid.Name, "/workspace/hostile", "agent", "-tag", kid.Name, "-parts", "ticks,bulk,token,storm")
		limited, cancel := context.WithTimeout(ctx, workLimit)
		err = until(limited, "the hostile agent at work", func() bool {
			n, uses := s.processes(kid), s.Internet.API.Uses.Tally("agent:"+kid.Name).Accepted
			missing = fmt.Sprintf("%d processes, token accepted %d times, at work: %v", n, uses, s.atWork(kid.Name))
			return n >= hostileProcesses && uses > 0 && s.atWork(kid.Name)
		})
		cancel()
		if err == nil {
			return kid, nil
		}
		if err := errors.Join(ctx.Err(), s.done(ctx, kid, nil)); err != nil {
			return kid, err
		}
		fmt.Fprintf(s.Out, "%s is not at work and is replaced: %s\n", kid.Name, missing)
	}
	return wire.Kid{}, fmt.Errorf("the hostile agent did not come to work %d times: %s", attempts, missing)
}

// stopAgent runs the agent in a kid, stops it with `tagout stop` and looks from outside.
func (s *stops) stopAgent(ctx context.Context) (t stopTimes, err error) {
	kid, err := s.hostileKid(ctx)
	if err != nil {
		return t, err
	}
	empty := make(chan time.Duration, 1)
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	go func() {
		cgroup.WaitEmpty(limited, kid.Cgroup) // at the limit the figure shows it
		empty <- practice.Now()
	}()
	began := practice.Now()
	said, err := exec.CommandContext(ctx, s.Tagout, "--instance", s.Inst.Name(), "stop", "--kid", kid.Name, "--by", stopBy, "--reason", "measured").CombinedOutput()
	t.told = practice.Now() - began
	if err != nil {
		return t, fmt.Errorf("tagout stop: %w: %s", err, said)
	}
	last := func() time.Duration {
		return max(s.Internet.Sink.LastByte(kid.Name), s.Internet.API.Uses.Tally("agent:"+kid.Name).LastAccepted)
	}
	if err := s.quiet(ctx, last); err != nil {
		return t, err
	}
	t.seen, t.silent = max(<-empty, last())-began, max(0, s.Internet.Sink.LastByte(kid.Name)-began)
	return t, s.done(ctx, kid, nil)
}

// atWork says whether an agent ticks, sends in bulk and has run into its limit of processes.
func (s *stops) atWork(tag string) bool {
	var ticks, bulk, refused int64
	for _, st := range s.Internet.Sink.Streams(tag) {
		ticks, refused = ticks+st.Ticks, max(refused, st.Refusals)
		if st.Kind == "bulk" {
			bulk += st.Bytes
		}
	}
	return ticks > 0 && refused > 0 && bulk > 1<<20 && practice.Now()-s.Internet.Sink.LastByte(tag) < silence
}

// errNoPeer says that a peer is not installed.
var errNoPeer = errors.New("it is not installed: run `deploy/setup.sh bench-stop`")

// beside measures a peer until its agent's last byte, beside ours.
func (s *stops) beside(ctx context.Context, name string, open func(context.Context) (*engine, error), ours []time.Duration) (out []Metric, err error) {
	p, err := open(ctx)
	if errors.Is(err, errNoPeer) {
		fmt.Fprintf(s.Out, "%s is left out: %v\n", name, err)
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.close(context.WithoutCancel(ctx))) }()
	if err := p.load(ctx, s.agentImage); err != nil {
		return nil, err
	}
	runs := s.longRuns()
	fmt.Fprintf(s.Out, "killing %d hostile agents with %s\n", runs, name)
	var theirs []time.Duration
	for i := range runs {
		d, err := s.killAgent(ctx, p, fmt.Sprintf("%s%d", name[:6], i))
		if err != nil {
			return nil, err
		}
		theirs = append(theirs, d)
	}
	return []Metric{
		AtMost("hostile agent: command started to last byte at the sink, p50", Percentile(ours, 50), "ms", 0).Beside(name, Percentile(theirs, 50)),
		AtMost("hostile agent: command started to last byte at the sink, p99", Percentile(ours, 99), "ms", 0).Beside(name, Percentile(theirs, 99)),
	}, nil
}

func (s *stops) killAgent(ctx context.Context, p *engine, name string) (time.Duration, error) {
	if err := p.start(ctx, name, containerLimits(), s.agentArgs(name)); err != nil {
		return 0, err
	}
	if err := until(ctx, "the hostile agent at work in a container", func() bool { return s.atWork(name) }); err != nil {
		return 0, err
	}
	began := practice.Now()
	if err := p.kill(ctx, name); err != nil {
		return 0, err
	}
	last := func() time.Duration { return s.Internet.Sink.LastByte(name) }
	if err := s.quiet(ctx, last); err != nil {
		return 0, err
	}
	return max(0, last()-began), p.remove(ctx, name)
}

// ticksAt is where the agent in a container sends: names mean nothing there.
func (s *stops) ticksAt() string {
	return fmt.Sprintf("%v:%d", s.Internet.TicksAddr(), practice.PortTicks)
}

// agentArgs are what the agent does in a container. Its token is of no use there.
func (s *stops) agentArgs(name string) []string {
	return []string{"/hostile", "agent", "-tag", name, "-ticks", s.ticksAt(), "-parts", "ticks,bulk,storm"}
}

// agentImage fills an image that holds the agent and nothing else.
func (s *stops) agentImage(w *tar.Writer) error {
	agent, err := os.ReadFile(filepath.Join(s.InputDir, "hostile"))
	if err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Name: "hostile", Mode: 0o755, Size: int64(len(agent))}); err != nil {
		return err
	}
	_, err = w.Write(agent)
	return err
}

// limits are those of the kid.
func containerLimits() []string {
	return []string{"--network", "host", "--pids-limit", fmt.Sprint(processLimit), "--memory", "768m"}
}
