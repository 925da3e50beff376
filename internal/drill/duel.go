package drill

import (
	"context"
	"errors"
	"fmt"
	"time"

	"tagout/internal/practice"
	"tagout/internal/wire"
)

const (
	// quiet is how long the network or the credential must have been silent to count as stopped.
	quiet = 400 * time.Millisecond
	// settleWithin bounds how long the observers wait for a stop to take effect.
	settleWithin = 5 * time.Second
	// replays a second by the accomplice.
	replays = 200
	by      = "drill"
)

// duel is one run of one case against a fresh kid.
type duel struct {
	Config
	c   Case
	run int
	kid string
}

// fight spawns, provokes, stops, judges and removes one kid.
func (d *duel) fight(ctx context.Context) (res Result, err error) {
	res = Result{Case: d.c.Name, Run: d.run, Kid: d.kid}
	kid, err := d.Box.Spawn(ctx, wire.SpawnRequest{
		Name: d.kid, Purpose: "drill: " + d.c.Name, Card: string(d.Card), CardFile: d.CardFile, InputDir: d.InputDir,
	})
	if err != nil {
		return res, fmt.Errorf("spawning kid %s: %w", d.kid, err)
	}
	busy, stop := context.WithCancel(ctx)
	done := d.provoke(busy)
	defer func() {
		stop()
		err = errors.Join(err, d.remove(ctx, res.Stop))
		<-done
	}()
	o := newObserver(d.Internet, d.kid, kid.Cgroup)
	res.Before, err = d.ready(ctx, busy, o)
	if err != nil {
		res.Void = err.Error()
		res.judge(d.c.Layers, d.SLA, verdicts{})
		return res, nil
	}
	watch := o.watchEmpty(ctx)
	defer watch.stop()
	command := practice.Now() // nothing may come between this and writing the order
	report, stopErr := d.Box.Stop(ctx, wire.StopRequest{Scope: wire.Scope{Kid: d.kid}, Layers: d.c.Layers, By: by, Reason: "drill: " + d.c.Name})
	res.Acked = practice.Now() - command
	res.Command, res.Report = command, report
	if stopErr != nil {
		res.StopError = stopErr.Error()
	}
	if report != nil {
		res.Stop = report.Stop
	}
	seen := o.settle(ctx, d.c.Layers, command, watch)
	res.After = o.activity()
	res.judge(d.c.Layers, d.SLA, seen)
	return res, nil
}

// provoke starts the agent in the kid, and the accomplice as soon as the token is stolen. The channel closes
// when both have ended.
func (d *duel) provoke(ctx context.Context) <-chan struct{} {
	argv := append(append([]string(nil), d.Agent...),
		"-tag", d.kid,
		"-evil", d.Internet.EvilAddr().String(),
		"-evil6", d.Internet.EvilAddr6().String(),
		"-dns", d.Internet.DNSAddr().String()+":53",
	)
	done := make(chan struct{})
	go func() {
		defer close(done)
		accomplice := make(chan struct{})
		go func() {
			defer close(accomplice)
			stolen := func() bool { return d.Internet.Sink.Token(d.kid) != "" }
			if practice.Wait(ctx, "the token is stolen", stolen) == nil {
				d.Internet.Replay(ctx, d.Internet.Sink.Token(d.kid), "accomplice:"+d.kid, replays) // its rate is right
			}
		}()
		// However the exec ends, what the agent started lives on in the kid; the observers see what matters.
		d.Box.Exec(ctx, d.kid, wire.ExecRequest{Argv: argv}, func(wire.ExecFrame) {}) // see above
		<-accomplice
	}()
	return done
}

// ready waits until everything is seen at work, all at the same time and just now.
func (d *duel) ready(ctx, busy context.Context, o *observer) (Activity, error) {
	wait, cancel := context.WithTimeout(busy, d.ReadyWithin)
	defer cancel()
	var a Activity
	err := practice.Wait(wait, "the agent is at work", func() bool {
		a = o.activity()
		return a.missing(d.Processes) == ""
	})
	if err == nil || ctx.Err() != nil {
		return a, err
	}
	return a, fmt.Errorf("not seen before the order: %s", a.missing(d.Processes))
}

// remove destroys the kid and takes the drill's own tag off. The kid is gone for good, so nothing comes back.
func (d *duel) remove(ctx context.Context, stop string) error {
	// Also when the drill is called off: a kid with a hostile agent is not left behind.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 15*time.Second)
	defer cancel()
	if err := d.Box.Destroy(ctx, d.kid, "drill ended"); err != nil {
		return fmt.Errorf("destroying kid %s: %w", d.kid, err)
	}
	if stop == "" {
		return nil
	}
	if err := d.Box.Release(ctx, wire.ReleaseRequest{Stop: stop, By: by, Reason: "drill ended"}); err != nil {
		return fmt.Errorf("releasing the tag of kid %s: %w", d.kid, err)
	}
	return nil
}
