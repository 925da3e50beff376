package drill

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"tagout/internal/clockstep"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

const (
	// quiet is how long the network or the credential must have been silent to count as stopped: thirty ticks.
	quiet = 300 * time.Millisecond
	// settleWithin bounds how long the observers wait for a stop to take effect.
	settleWithin = 5 * time.Second
	// replays a second by the accomplice, and by one of its clients.
	replays    = 200
	replayEach = 250
	by         = practice.Authority
	second     = practice.Second // gives the second of two orders
)

// duel is one run of one bout against a fresh kid.
type duel struct {
	Config
	c   bout
	run int
	kid string

	began time.Duration // CLOCK_MONOTONIC; when the run began
	mu    sync.Mutex
	story []Event           // guarded by mu
	tags  map[string]string // guarded by mu; stop -> who placed its tag

	// Of a knock-out; only the run's own goroutine uses them.
	clock  *clockstep.Step // nil: the clock was not stepped
	spoilt string          // why the knock-out alone did what only a stop may do
	void   string          // why it was not in force as it should have been
}

// Event is one moment of a run. At counts from the command, and is negative before it.
type Event struct {
	At   time.Duration `json:"at_ns"`
	What string        `json:"what"`
}

// note adds a moment to the story, now.
func (d *duel) note(format string, args ...any) { d.noteAt(practice.Now(), format, args...) }

func (d *duel) noteAt(at time.Duration, format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.story = append(d.story, Event{at, fmt.Sprintf(format, args...)})
}

// fight spawns, provokes, stops, judges and removes one kid.
func (d *duel) fight(ctx context.Context) (res Result, err error) {
	res = Result{Kind: d.c.kind, Technique: d.c.technique.Name, Case: d.c.name, Run: d.run, Kid: d.kid}
	d.began = practice.Now()
	kid, err := d.Box.Spawn(ctx, wire.SpawnRequest{
		Name: d.kid, Purpose: "drill: " + d.c.name, Card: string(d.Card), CardFile: d.CardFile, InputDir: d.InputDir,
	})
	if err != nil {
		return res, fmt.Errorf("spawning kid %s: %w", d.kid, err)
	}
	d.note("kid spawned")
	busy, stop := context.WithCancel(ctx)
	done := d.provoke(busy)
	hand := d.newHand(kid)
	defer func() {
		stop()
		err = errors.Join(err, hand.undo(), d.remove(ctx))
		<-done
	}()
	o := d.newObserver(kid)
	res.Before, err = d.ready(ctx, busy, o, hand)
	if err != nil {
		res.Void = err.Error()
		res.judge(d.c.judged, d.SLA, verdicts{})
		return res, nil
	}
	o.family = familyOf(kid.Cgroup)
	return res, d.strikeAndStop(ctx, o, hand, &res)
}

// strikeAndStop breaks what is to be broken, orders the stop, judges it and mends.
func (d *duel) strikeAndStop(ctx context.Context, o *observer, hand hand, res *Result) error {
	mend, err := d.strike(ctx)
	var missing *notHere
	if errors.As(err, &missing) {
		res.Skipped = missing.Error()
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", d.c.name, err)
	}
	if d.clock != nil {
		defer d.clock.Back() // where mend is not reached
	}
	watch := o.watchEmpty(ctx)
	defer watch.stop()
	command := practice.Now() // nothing may come between this and writing the order
	report, stopErr := d.order(ctx)
	res.Acked = practice.Now() - command
	res.Command, res.Report = command, report
	if stopErr != nil {
		res.StopError = stopErr.Error()
	}
	if report != nil {
		res.Stop = report.Stop
	}
	d.note("killswitchd's report was read")
	released, err := hand.after()
	if err != nil {
		return err
	}
	seen := verdicts{}
	o.settle(ctx, d.c.judged, command, d.c.within, watch, seen)
	if d.c.knockout != nil {
		res.Degraded = d.degraded(ctx, report)
		if err := mend(ctx); err != nil {
			return fmt.Errorf("%s: mending: %w", d.c.name, err)
		}
		// What comes back to life must not bring the kid's bytes or tokens with it.
		o.settle(ctx, d.c.judged, command, d.c.within, watch, seen)
	}
	res.After = o.activity(d.c.technique.Signs)
	res.Void = d.void
	res.judge(d.c.judged, d.slas(), seen)
	if d.spoilt != "" {
		for _, l := range d.c.judged {
			res.fail(l, "%s", d.spoilt)
		}
	}
	d.judgeDeath(res, o, command, released)
	d.tell(res, o, command)
	return nil
}

// tell puts the story into the result, with what the observers saw.
func (d *duel) tell(res *Result, o *observer, command time.Duration) {
	d.noteAt(command, "order written to killswitchd: %v", d.c.ordered)
	if at := o.lastByte(); at > 0 {
		d.noteAt(at, "last byte seen")
	}
	if at := o.lastAccepted(); at > 0 {
		d.noteAt(at, "last token use accepted")
	}
	for _, l := range res.Layers {
		if l.Layer == wire.LayerSession && l.Stopped {
			d.noteAt(command+l.Observed, "the kid's cgroup is empty")
		}
	}
	d.note("the observers have seen enough")
	res.tellStory(d.story, command)
}

// provoke starts the agent in the kid, and the accomplice as soon as the token is stolen. The channel closes
// when both have ended.
func (d *duel) provoke(ctx context.Context) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		accomplice := make(chan struct{})
		go func() {
			defer close(accomplice)
			stolen := func() bool { return d.Internet.Sink.Token(d.kid) != "" }
			if practice.Wait(ctx, "the token is stolen", stolen) == nil {
				d.replay(ctx, d.Internet.Sink.Token(d.kid))
			}
		}()
		// However the exec ends, what the agent started lives on in the kid; the observers see what matters.
		d.Box.Exec(ctx, d.kid, wire.ExecRequest{Argv: d.arguments()}, func(wire.ExecFrame) {}) // see above
		<-accomplice
	}()
	return done
}

// replay is the accomplice, with as many clients as its rate needs.
func (d *duel) replay(ctx context.Context, token string) {
	rate := d.c.technique.Replay
	if rate == 0 {
		rate = replays
	}
	var wg sync.WaitGroup
	for ; rate > 0; rate -= replayEach {
		each := min(rate, replayEach)
		wg.Go(func() { d.Internet.Replay(ctx, token, "accomplice:"+d.kid, each) }) // its rate is right
	}
	wg.Wait()
}

// ready waits until everything is seen at work, all at the same time and just now. Where something is done from
// outside, that comes after the beacon was seen, and before the technique's own signs.
func (d *duel) ready(ctx, busy context.Context, o *observer, hand hand) (Activity, error) {
	wait, cancel := context.WithTimeout(busy, d.ReadyWithin)
	defer cancel()
	signs := d.c.technique.Signs
	var a Activity
	var lack string
	fromOutside := d.c.technique.Host != ""
	err := practice.Wait(wait, "the agent is at work", func() bool {
		a = o.activity(nil)
		if lack = a.beaconMissing(); lack != "" || fromOutside {
			return lack == ""
		}
		a = o.activity(signs)
		lack = a.beaconMissing()
		if more := d.signsMissing(a, signs); more != "" {
			lack = more
		}
		return lack == ""
	})
	if err == nil {
		d.note("the agent is at work")
		err = hand.before(wait)
		lack = fmt.Sprint(err)
	}
	if err == nil && fromOutside {
		err = practice.Wait(wait, "the technique is at work", func() bool {
			a = o.activity(signs)
			lack = d.signsMissing(a, signs)
			return lack == ""
		})
	}
	if err == nil || ctx.Err() != nil {
		return a, err
	}
	return a, fmt.Errorf("not seen before the order: %s", lack)
}

// remove destroys the kid and takes the drill's own tags off. The kid is gone for good, so nothing comes back.
func (d *duel) remove(ctx context.Context) error {
	// Also when the drill is called off: a kid with a hostile agent is not left behind.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 15*time.Second)
	defer cancel()
	if err := d.Box.Destroy(ctx, d.kid, "drill ended"); err != nil {
		return fmt.Errorf("destroying kid %s: %w", d.kid, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for stop, who := range d.tags {
		if err := d.Box.Release(ctx, wire.ReleaseRequest{Stop: stop, By: who, Reason: "drill ended"}); err != nil {
			return fmt.Errorf("releasing the tag of kid %s: %w", d.kid, err)
		}
	}
	return nil
}
