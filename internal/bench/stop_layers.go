package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// connections is how many bulk uploads are open when the network layer fires.
const connections = 10

// uploads measures the network layer alone on a kid with established bulk uploads, from before the order was sent
// until the last packet that the kernel let pass, by the kernel's own clock and counter.
func (s *stops) uploads(ctx context.Context) ([]Metric, error) {
	fmt.Fprintf(s.Out, "cutting %d kids with %d bulk uploads each\n", s.Runs, connections)
	var packet, arrival []time.Duration
	for range s.Runs {
		p, a, err := s.cut(ctx)
		if err != nil {
			return nil, err
		}
		packet, arrival = append(packet, p), append(arrival, a)
	}
	m := AtMost("network: order to last packet passed, 10 bulk uploads, p99", Percentile(packet, 99), "ms", 5)
	if !m.Met {
		m.Limits = "the order's way to killswitchd, past the uploads, the proxy and the sink on the same processors"
	}
	return []Metric{m,
		AtMost("network: the same, p50", Percentile(packet, 50), "ms", 0),
		AtMost("network: order to last byte read at the sink, p99", Percentile(arrival, 99), "ms", 0),
	}, nil
}

const uploadScript = `for i in 1 2 3 4 5 6 7 8 9 10; do
	(exec 3<>/dev/tcp/ticks.vendor.test/7000; echo "bulk $0" >&3; exec cat /dev/zero >&3) &
done; wait`

func (s *stops) cut(ctx context.Context) (packet, arrival time.Duration, err error) {
	kid, err := s.spawn(ctx, 64)
	if err != nil {
		return 0, 0, err
	}
	s.run(ctx, kid.Name, "/bin/bash", "-c", uploadScript, kid.Name)
	err = s.until(ctx, "ten uploads", func() bool {
		flowing := 0
		for _, st := range s.Internet.Sink.Streams(kid.Name) {
			if st.Bytes > 1<<20 {
				flowing++
			}
		}
		return flowing == connections
	})
	if err != nil {
		return 0, 0, err
	}
	boot, mono := bootTime(), practice.Now()
	rep, err := s.order(ctx, kid.Name, wire.LayerNetwork)
	if err != nil {
		return 0, 0, err
	}
	last, err := s.LastPass(kid.Mark)
	if err != nil {
		return 0, 0, err
	}
	if last < boot-50*time.Millisecond {
		return 0, 0, fmt.Errorf("nothing passed for %v before the order: the run shows nothing", boot-last)
	}
	// The sink may read what had passed a little later.
	if err := s.quiet(ctx, func() time.Duration { return s.Internet.Sink.LastByte(kid.Name) }); err != nil {
		return 0, 0, err
	}
	return max(0, last-boot), max(0, s.Internet.Sink.LastByte(kid.Name)-mono), s.done(ctx, kid, rep)
}

// silence is how long nothing must be heard to call it the end.
const silence = 100 * time.Millisecond

// quiet waits until last does not move any more.
func (s *stops) quiet(ctx context.Context, last func() time.Duration) error {
	return s.until(ctx, "silence", func() bool { return practice.Now()-last() > silence })
}

// usesPerSecond is how often the token is used from outside while the credential layer fires.
const usesPerSecond = 1000

// tokens measures the credential layer alone while the kid's token is used from outside the box, from before the
// order was sent until the last use that was accepted was answered.
func (s *stops) tokens(ctx context.Context) ([]Metric, error) {
	fmt.Fprintf(s.Out, "revoking the tokens of %d kids at %d uses a second\n", s.Runs, usesPerSecond)
	var took []time.Duration
	rate := 0.0
	for range s.Runs {
		d, r, err := s.revoke(ctx)
		if err != nil {
			return nil, err
		}
		took, rate = append(took, d), rate+r/float64(s.Runs)
	}
	name := fmt.Sprintf("credential: order to last use accepted, at %.0f uses a second, p99", rate)
	m := AtMost(name, Percentile(took, 99), "ms", 5)
	if !m.Met {
		m.Limits = "the order's way to killswitchd and to credd on processors that the callers share"
	}
	return []Metric{m, AtMost("credential: the same, p50", Percentile(took, 50), "ms", 0)}, nil
}

func (s *stops) revoke(ctx context.Context) (took time.Duration, rate float64, err error) {
	kid, err := s.spawn(ctx, 64)
	if err != nil {
		return 0, 0, err
	}
	token, err := s.tokenOf(ctx, kid.Name)
	if err != nil {
		return 0, 0, err
	}
	u := practice.UseToken(ctx, s.Inst.Socket(instance.Credd), token, usesPerSecond)
	defer u.Stop()
	began := practice.Now()
	want := usesPerSecond / 5
	if err := s.until(ctx, "uses of the token", func() bool { return u.Seen().Answered >= want }); err != nil {
		return 0, 0, err
	}
	command := practice.Now()
	before := u.Seen()
	if before.Accepted < command-50*time.Millisecond {
		return 0, 0, fmt.Errorf("the token was last accepted %v before the order: the run shows nothing", command-before.Accepted)
	}
	rep, err := s.order(ctx, kid.Name, wire.LayerCredential)
	if err != nil {
		return 0, 0, err
	}
	if err := s.until(ctx, "uses after the order", func() bool { return u.Seen().Answered > before.Answered+want/2 }); err != nil {
		return 0, 0, err
	}
	return max(0, u.Seen().Accepted-command), float64(before.Answered) / (command - began).Seconds(), s.done(ctx, kid, rep)
}

func (s *stops) tokenOf(ctx context.Context, kid string) (string, error) {
	var out strings.Builder
	err := s.box.Exec(ctx, kid, wire.ExecRequest{Argv: []string{"/usr/bin/printenv", "VENDOR_API_KEY"}}, func(f wire.ExecFrame) { out.Write(f.Stdout) })
	token := strings.TrimSpace(out.String())
	if err == nil && token == "" {
		err = errors.New("the kid has no token")
	}
	return token, err
}
