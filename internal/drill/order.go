package drill

import (
	"context"
	"errors"
	"sync"
	"time"

	"tagout/internal/practice"
	"tagout/internal/wire"
)

// orderAgain bounds how long an order is given again where killswitchd was killed before it took it.
const orderAgain = 10 * time.Second

// order orders the stop as the bout wants it, and returns the report of the first order.
func (d *duel) order(ctx context.Context) (*wire.StopReport, error) {
	k := d.c.knockout
	if k == nil {
		return d.orderOnce(ctx, by, nil)
	}
	if k.twice {
		return d.orderTwice(ctx)
	}
	var rep *wire.StopReport
	var err error
	limit, cancel := context.WithTimeout(ctx, orderAgain)
	defer cancel()
	first := true
	practice.Wait(limit, "the order is taken", func() bool { // what the last attempt said is returned
		if !first {
			d.note("the order is given again")
		}
		rep, err = d.orderOnce(ctx, by, func(ev wire.StopEvent) {
			if first && k.amid != nil {
				first = false
				d.note("%s", k.what)
				k.amid(d)
			}
		})
		first = false
		return err == nil || !k.again
	})
	return rep, err
}

// orderOnce gives one order; fn, if any, is called at each event.
func (d *duel) orderOnce(ctx context.Context, who string, fn func(wire.StopEvent)) (*wire.StopReport, error) {
	req := wire.StopRequest{Scope: wire.Scope{Kid: d.kid}, Layers: d.c.ordered, By: who, Reason: "drill: " + d.c.name}
	rep, err := d.Box.Stop(ctx, req, func(ev wire.StopEvent) {
		if fn != nil {
			fn(ev)
		}
		if ev.Final == nil {
			d.note("killswitchd says: %s", eventText(ev))
		}
	})
	if rep != nil {
		d.tagged(rep, who)
	}
	return rep, err
}

// tagged remembers who placed which tag, for its release.
func (d *duel) tagged(rep *wire.StopReport, who string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.tags == nil {
		d.tags = map[string]string{}
	}
	if rep.Tag != nil { // of a stop that two people share, each has a tag
		d.tags[rep.Tag.Stop] = rep.Tag.By
		return
	}
	d.tags[rep.Stop] = who
}

func eventText(ev wire.StopEvent) string {
	text := string(ev.Layer)
	if ev.Layer == "" {
		text = "tag"
	}
	text += " " + string(ev.State) + " at " + ev.Point
	if ev.Detail != "" {
		text += " (" + ev.Detail + ")"
	}
	return text
}

// orderTwice has two people order the same thing at the same time. Both must get a whole report.
func (d *duel) orderTwice(ctx context.Context) (*wire.StopReport, error) {
	reps, errs := make([]*wire.StopReport, 2), make([]error, 2)
	var wg sync.WaitGroup
	for i, who := range []string{by, second} {
		wg.Go(func() { reps[i], errs[i] = d.orderOnce(ctx, who, nil) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return reps[0], err
	}
	return reps[0], nil
}
