// Package guard keeps the lease on which all kids live. It renews it through killswitchd for as long as everything that
// guards the kids is well, and says what is not. Where killswitchd itself stays away it kills the kids: nobody else
// would stop them any more.
//
// What it does not do: decide what happens when the lease runs out. That is killswitchd's part and the cards', and
// works without this process, too. All times are CLOCK_BOOTTIME.
package guard

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/wire"
)

// Check asks one of the kids' guards whether it is well. Ask returns when its context ends, at the latest.
type Check struct {
	Name string
	Ask  func(ctx context.Context) error
}

// Kids can be killed without anybody's help. *kids.Manager fulfils it.
type Kids interface {
	// KillAll returns how many kids it found alive. It may be called again.
	KillAll(ctx context.Context, why string) (n int, err error)
}

// Metrics is told what happened. internal/metrics fulfils it.
type Metrics interface {
	LeaseRenewed(ok bool)           // one attempt
	SwitchSilent(age time.Duration) // since killswitchd last answered
}

// Config is what a guard works with. Every field is needed.
type Config struct {
	Checks  []Check
	Renew   func(ctx context.Context, r wire.LeaseRequest) error // asks killswitchd
	Kids    Kids
	Term    time.Duration // of the kids' lease
	Absent  time.Duration // how long killswitchd may not answer
	Metrics Metrics
	Log     *slog.Logger
}

const (
	most       = 5 * time.Second // between renewals
	retry      = time.Second     // after one that failed
	askLimit   = 2 * time.Second // for one question
	killLimit  = 10 * time.Second
	overslept  = 5 * time.Second // so late this process did not run
	renewShare = 6               // renewals in one term
)

// Guard keeps one box's lease. Make it with New and call Run once.
type Guard struct {
	cfg Config
	now func() time.Duration // CLOCK_BOOTTIME; tests set another before Run

	// Of Run alone.
	answered time.Duration // when killswitchd last did
	said     string        // what was unwell last time
}

// New returns a guard. Its clocks start with Run.
func New(cfg Config) *Guard { return &Guard{cfg: cfg, now: bootclock.Now} }

// Run keeps the lease until ctx ends. Whoever starts anew gives killswitchd all of its time.
func (g *Guard) Run(ctx context.Context) {
	g.answered = g.now()
	due := g.now()
	for {
		wait := g.round(ctx, due)
		due = g.now() + wait
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

// round renews once, and kills where killswitchd has been away for too long. It returns how long to wait then.
func (g *Guard) round(ctx context.Context, due time.Duration) time.Duration {
	if late := g.now() - due; late > overslept {
		g.cfg.Log.Warn("sandboxd did not run for a while", "late", late)
		g.answered = g.now() // for as long as we were away nobody could have answered
	}
	unwell := g.ask(ctx)
	if text := strings.Join(unwell, "; "); text != g.said {
		g.said = text
		if text != "" {
			g.cfg.Log.Error("the kids' lease is not renewed", "why", text)
		} else {
			g.cfg.Log.Info("the kids' lease is renewed again")
		}
	}
	call, cancel := context.WithTimeout(ctx, askLimit)
	err := g.cfg.Renew(call, wire.LeaseRequest{Unwell: unwell})
	cancel()
	if ctx.Err() != nil {
		return 0 // the end is no answer
	}
	g.cfg.Metrics.LeaseRenewed(err == nil && len(unwell) == 0)
	if err == nil {
		g.answered = g.now()
	}
	silent := g.now() - g.answered
	g.cfg.Metrics.SwitchSilent(silent)
	if err != nil && silent > g.cfg.Absent {
		g.kill(ctx, fmt.Sprintf("killswitchd has not answered for %v, and without it nobody could stop a kid: %v", silent.Round(time.Second), err))
	}
	if err != nil || len(unwell) > 0 {
		return retry
	}
	return min(most, g.cfg.Term/renewShare)
}

// ask asks all guards at the same time and returns what is not well, in the order of the checks.
func (g *Guard) ask(ctx context.Context) []string {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	said := make([]string, len(g.cfg.Checks))
	var wg sync.WaitGroup
	for i, c := range g.cfg.Checks {
		wg.Go(func() {
			if err := c.Ask(ctx); err != nil {
				said[i] = c.Name + ": " + err.Error()
			}
		})
	}
	wg.Wait()
	return slices.DeleteFunc(said, func(s string) bool { return s == "" })
}

func (g *Guard) kill(ctx context.Context, why string) {
	ctx, cancel := context.WithTimeout(ctx, killLimit)
	defer cancel()
	n, err := g.cfg.Kids.KillAll(ctx, why)
	if n > 0 || err != nil {
		g.cfg.Log.Error("killing all kids", "why", why, "kids", n, "error", err)
	}
}
