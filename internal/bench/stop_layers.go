package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// connections is how many bulk uploads are open when the network layer fires.
const connections = 10

// uploads measures the network layer alone on a kid with established bulk uploads, from the order's receipt until the
// last packet that the kernel let pass, by the kernel's own clock and counter.
func (s *stops) uploads(ctx context.Context) ([]Metric, error) {
	fmt.Fprintf(s.Out, "cutting %d kids with %d bulk uploads each\n", s.Runs, connections)
	var packet, sent, arrival []time.Duration
	for range s.Runs {
		c, err := s.cut(ctx)
		if err != nil {
			return nil, err
		}
		packet, sent, arrival = append(packet, c.packet), append(sent, c.sent), append(arrival, c.arrival)
	}
	m := AtMost("network: order received to last packet passed, 10 bulk uploads, p99", Percentile(packet, 99), "ms", 5)
	if !m.Met {
		m.Limits = "killswitchd's turn on processors that the uploads, the proxy and the sink share"
	}
	return []Metric{m,
		AtMost("network: the same, p50", Percentile(packet, 50), "ms", 0),
		AtMost("network: order sent to last packet passed, p99", Percentile(sent, 99), "ms", 0),
		AtMost("network: order sent to last byte read at the sink, p99", Percentile(arrival, 99), "ms", 0),
	}, nil
}

// cutTimes are of one cut: from the order's receipt and from its sending to the last packet that passed, and from its
// sending to the last byte that the sink read.
type cutTimes struct{ packet, sent, arrival time.Duration }

const uploadScript = `for i in 1 2 3 4 5 6 7 8 9 10; do
	(exec 3<>/dev/tcp/ticks.vendor.test/7000; echo "bulk $0" >&3; exec cat /dev/zero >&3) &
done; wait`

func (s *stops) cut(ctx context.Context) (c cutTimes, err error) {
	kid, err := s.spawn(ctx, 64)
	if err != nil {
		return c, err
	}
	s.run(ctx, kid.Name, "/bin/bash", "-c", uploadScript, kid.Name)
	err = until(ctx, "ten uploads", func() bool {
		flowing := 0
		for _, st := range s.Internet.Sink.Streams(kid.Name) {
			if st.Bytes > 1<<20 {
				flowing++
			}
		}
		return flowing == connections
	})
	if err != nil {
		return c, err
	}
	boot, mono := bootclock.Now(), practice.Now()
	rep, err := s.order(ctx, kid.Name, wire.LayerNetwork)
	if err != nil {
		return c, err
	}
	last, err := s.LastPass(kid.Mark)
	if err != nil {
		return c, err
	}
	if last < boot-50*time.Millisecond {
		return c, fmt.Errorf("nothing passed for %v before the order: the run shows nothing", boot-last)
	}
	// The sink may read what had passed a little later.
	if err := s.quiet(ctx, func() time.Duration { return s.Internet.Sink.LastByte(kid.Name) }); err != nil {
		return c, err
	}
	c = cutTimes{
		packet: max(0, last-rep.Received), sent: max(0, last-boot), arrival: max(0, s.Internet.Sink.LastByte(kid.Name)-mono),
	}
	return c, s.done(ctx, kid, rep)
}

// silence is how long nothing must be heard to call it the end.
const silence = 100 * time.Millisecond

// quiet waits until last does not move any more.
func (s *stops) quiet(ctx context.Context, last func() time.Duration) error {
	return until(ctx, "silence", func() bool { return practice.Now()-last() > silence })
}

// usesPerSecond is how often the token is used from outside while the credential layer fires.
const usesPerSecond = 1000

// tokens measures the credential layer alone while the kid's token is used from outside the box, from the order's
// receipt until the last use that was accepted was answered.
func (s *stops) tokens(ctx context.Context) ([]Metric, error) {
	fmt.Fprintf(s.Out, "revoking the tokens of %d kids at %d uses a second\n", s.Runs, usesPerSecond)
	var took, sent []time.Duration
	rate := 0.0
	for range s.Runs {
		u, err := s.revoke(ctx)
		if err != nil {
			return nil, err
		}
		took, sent, rate = append(took, u.use), append(sent, u.sent), rate+u.rate/float64(s.Runs)
	}
	name := fmt.Sprintf("credential: order received to last use accepted, at %.0f uses a second, p99", rate)
	m := AtMost(name, Percentile(took, 99), "ms", 5)
	if !m.Met {
		m.Limits = "the order's way from killswitchd to credd on processors that the callers share"
	}
	return []Metric{m,
		AtMost("credential: the same, p50", Percentile(took, 50), "ms", 0),
		AtMost("credential: order sent to last use accepted, p99", Percentile(sent, 99), "ms", 0),
	}, nil
}

// useTimes are of one revocation: from the order's receipt and from its sending to the answer to the last use that was
// accepted, and how many uses a second there were before.
type useTimes struct {
	use, sent time.Duration
	rate      float64
}

func (s *stops) revoke(ctx context.Context) (t useTimes, err error) {
	kid, err := s.spawn(ctx, 64)
	if err != nil {
		return t, err
	}
	token, err := s.tokenOf(ctx, kid.Name)
	if err != nil {
		return t, err
	}
	u := practice.UseToken(ctx, s.Inst.Socket(instance.Credd), token, usesPerSecond)
	defer u.Stop()
	began := practice.Now()
	want := usesPerSecond / 5
	if err := until(ctx, "uses of the token", func() bool { return u.Seen().Answered >= want }); err != nil {
		return t, err
	}
	boot, command := bootclock.Now(), practice.Now()
	before := u.Seen()
	if before.Accepted < command-50*time.Millisecond {
		return t, fmt.Errorf("the token was last accepted %v before the order: the run shows nothing", command-before.Accepted)
	}
	rep, err := s.order(ctx, kid.Name, wire.LayerCredential)
	if err != nil {
		return t, err
	}
	if err := until(ctx, "uses after the order", func() bool { return u.Seen().Answered > before.Answered+want/2 }); err != nil {
		return t, err
	}
	accepted := u.Seen().Accepted
	t = useTimes{
		use: max(0, accepted-command-(rep.Received-boot)), sent: max(0, accepted-command),
		rate: float64(before.Answered) / (command - began).Seconds(),
	}
	return t, s.done(ctx, kid, rep)
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
