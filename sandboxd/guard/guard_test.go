package guard

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"tagout/internal/wire"
)

// rig is everything around a guard, on a clock that the test moves.
type rig struct {
	now    time.Duration
	sick   map[string]error // check -> what it answers
	away   error            // what killswitchd's client says
	asked  []wire.LeaseRequest
	killed []string
	alive  int
}

func newRig() (*rig, *Guard) {
	r := &rig{now: time.Hour, sick: map[string]error{}, alive: 2}
	check := func(name string) Check {
		return Check{name, func(context.Context) error { return r.sick[name] }}
	}
	g := New(Config{
		Checks: []Check{check("audit log"), check("proxy"), check("credd")}, Kids: r, Metrics: r,
		Renew: func(_ context.Context, req wire.LeaseRequest) error {
			r.asked = append(r.asked, req)
			return r.away
		},
		Term: 30 * time.Second, Absent: 20 * time.Second, Log: slog.New(slog.DiscardHandler),
	})
	g.now = func() time.Duration { return r.now }
	g.answered = g.now()
	return r, g
}

func (r *rig) KillAll(_ context.Context, why string) (int, error) {
	r.killed = append(r.killed, why)
	n := r.alive
	r.alive = 0
	return n, nil
}

func (*rig) LeaseRenewed(bool)          {}
func (*rig) SwitchSilent(time.Duration) {}

// rounds lets time pass as the guard itself makes it pass.
func (r *rig) rounds(t *testing.T, g *Guard, d time.Duration) {
	t.Helper()
	for end := r.now + d; r.now < end; {
		wait := g.round(t.Context(), r.now)
		if wait <= 0 || wait > most {
			t.Fatalf("the next round is in %v", wait)
		}
		r.now += wait
	}
}

func TestTheLeaseIsRenewedWhileAllIsWell(t *testing.T) {
	r, g := newRig()
	r.rounds(t, g, time.Minute)
	if n := len(r.asked); n != 12 || slices.ContainsFunc(r.asked, func(q wire.LeaseRequest) bool { return len(q.Unwell) > 0 }) {
		t.Errorf("%d renewals in a minute: %+v", n, r.asked)
	}
	if len(r.killed) > 0 {
		t.Errorf("killed: %v", r.killed)
	}
}

func TestWhatIsUnwellIsNamed(t *testing.T) {
	r, g := newRig()
	r.sick["proxy"], r.sick["audit log"] = errors.New("no answer in time"), errors.New("disk full")
	r.rounds(t, g, time.Minute)
	want := []string{"audit log: disk full", "proxy: no answer in time"}
	for _, q := range r.asked {
		if !slices.Equal(q.Unwell, want) {
			t.Fatalf("said %q, want %q", q.Unwell, want)
		}
	}
	if len(r.killed) > 0 {
		t.Errorf("a lease that is not renewed is killswitchd's business, but killed: %v", r.killed)
	}
}

// TestKillswitchdStaysAway: the kids are killed once its time is over, and not before; whatever is alive later, too.
func TestKillswitchdStaysAway(t *testing.T) {
	r, g := newRig()
	r.rounds(t, g, 10*time.Second)
	r.away = errors.New("nobody serves it")
	last := g.answered
	r.rounds(t, g, 14*time.Second)
	if len(r.killed) > 0 {
		t.Fatalf("killed %v after its last answer: %v", r.now-last, r.killed)
	}
	r.away = nil // it comes back
	r.rounds(t, g, 10*time.Second)
	r.away = errors.New("nobody serves it")
	r.rounds(t, g, 14*time.Second)
	if len(r.killed) > 0 {
		t.Fatalf("killed %v after its last answer: %v", r.now-g.answered, r.killed)
	}
	r.rounds(t, g, 10*time.Second)
	if len(r.killed) < 2 || !strings.Contains(r.killed[0], "killswitchd has not answered for 2") || !strings.Contains(r.killed[0], "nobody serves it") {
		t.Errorf("killed: %q", r.killed)
	}
}

// TestASleepIsNoAbsence (S14): after a suspension killswitchd is given its time, even where its first answer fails.
func TestASleepIsNoAbsence(t *testing.T) {
	r, g := newRig()
	r.rounds(t, g, 10*time.Second)
	due := r.now
	r.now += 10 * time.Minute
	r.away = errors.New("it is still waking up")
	r.now += g.round(t.Context(), due)
	r.rounds(t, g, 15*time.Second)
	if len(r.killed) > 0 {
		t.Fatalf("killed: %v", r.killed)
	}
	r.rounds(t, g, 10*time.Second)
	if len(r.killed) == 0 {
		t.Error("a killswitchd that stays away after it is forgiven for ever")
	}
}

func TestTheEndIsNoAbsence(t *testing.T) {
	r, g := newRig()
	r.away = context.Canceled
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.now += time.Hour
	g.round(ctx, r.now)
	if len(r.killed) > 0 {
		t.Error("a sandboxd that is told to end kills the kids")
	}
	done := make(chan struct{})
	go func() { defer close(done); g.Run(ctx) }()
	<-done
}

func TestHungChecksAreAskedForABoundedTime(t *testing.T) {
	r, g := newRig()
	g.cfg.Checks = append(g.cfg.Checks, Check{"dnsfilter", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }})
	begun := time.Now()
	g.round(t.Context(), r.now)
	if took := time.Since(begun); took > 5*askLimit {
		t.Errorf("it took %v", took)
	}
	if len(r.asked) != 1 || len(r.asked[0].Unwell) != 1 || !strings.HasPrefix(r.asked[0].Unwell[0], "dnsfilter: ") {
		t.Errorf("said %+v", r.asked)
	}
}
