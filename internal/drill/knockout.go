package drill

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// knockout is something of the box that is broken while a stop of all layers is ordered.
type knockout struct {
	name string
	what string // for people
	// strike breaks it and returns what mends it. nil: nothing before the order.
	strike func(ctx context.Context, d *duel) (mend func(context.Context) error, err error)
	amid   func(d *duel) // called when the first event of the stop arrives
	again  bool          // who orders has to order again, as long as nobody answers
	twice  bool          // two people order at once
	grace  time.Duration // on top of the SLA: killswitchd itself has to be started again first
	says   string        // must be said in the stop's report, where not empty
}

// notHere is why a knock-out is not run on this machine.
type notHere struct{ why string }

func (n *notHere) Error() string { return "not run here: " + n.why }

// restart is what a killed killswitchd may take until it serves again, on a busy machine.
const restart = 2 * time.Second

// allKnockouts lists them in the order in which they are run.
func allKnockouts() []knockout {
	var out []knockout
	others := []string{instance.Sandboxd, instance.Proxy, instance.DNSFilter, instance.Credd}
	for _, daemon := range others {
		k := knockout{name: daemon + "-stopped", what: daemon + " is stopped with SIGSTOP", strike: halting(daemon), says: daemon + " stands still"}
		if daemon == instance.Credd {
			k.says = "credd killed"
		}
		out = append(out, k)
	}
	for _, daemon := range others {
		out = append(out, knockout{name: daemon + "-killed", what: daemon + " is killed with SIGKILL", strike: killing(daemon)})
	}
	return append(out,
		knockout{name: "all-stopped", what: "every daemon but killswitchd is stopped with SIGSTOP", strike: halting(others...), says: "credd killed"},
		knockout{name: "killswitchd-killed", what: "killswitchd is killed with SIGKILL just before the order", strike: killing(instance.Killswitchd), again: true, grace: restart},
		knockout{name: "killswitchd-stopped", what: "killswitchd is stopped with SIGSTOP just before the order", strike: halting(instance.Killswitchd), again: true, grace: StageLeases.Watchdog + restart},
		knockout{name: "killswitchd-killed-midstop", what: "killswitchd is killed with SIGKILL at the first sign of the stop", amid: killNow(instance.Killswitchd), strike: watching, grace: restart},
		knockout{name: "two-stops", what: "two people order the same stop at once", twice: true},
		knockout{name: "audit-disk-full", what: "the disk of the audit log is full", strike: fillDisk, says: "no space left"},
		knockout{name: "sink-hung", what: "the receiver of alerts takes them and never answers", strike: hangSink, says: "receiver of alerts"},
		knockout{name: "clock-stepped", what: "the wall clock is set an hour forward before the order, and back at the first sign of the stop", strike: stepClock, amid: letGoOfClock},
		knockout{name: "bpffs-unmounted", what: "the BPF filesystem is unmounted", strike: unmountPins, says: "BPF filesystem"},
	)
}

// Knockouts returns the names of all knock-outs and what each is.
func Knockouts() (names []string, what map[string]string) {
	what = map[string]string{}
	for _, k := range allKnockouts() {
		names = append(names, k.name)
		what[k.name] = k.what
	}
	return names, what
}

// knockouts are the bouts of the knock-outs that were asked for.
func (c Config) knockouts() ([]bout, error) {
	names, _ := Knockouts()
	for _, n := range c.Knockouts {
		if !slices.Contains(names, n) {
			return nil, fmt.Errorf("no knock-out is called %q: use %s", n, strings.Join(names, ", "))
		}
	}
	var out []bout
	for _, k := range allKnockouts() {
		if !slices.Contains(c.Knockouts, k.name) {
			continue
		}
		out = append(out, bout{
			kind: KindKnockout, name: k.name, technique: allAtOnce(), ordered: wire.AllLayers(), judged: wire.AllLayers(),
			runs: 1, within: settleWithin, knockout: &k,
		})
	}
	return out, nil
}

// strike breaks what is to be broken. mend is never nil.
func (d *duel) strike(ctx context.Context) (mend func(context.Context) error, err error) {
	k := d.c.knockout
	if k == nil || k.strike == nil {
		return func(context.Context) error { return nil }, nil
	}
	mend, err = k.strike(ctx, d)
	if err == nil && k.amid == nil {
		d.note("%s", k.what)
	}
	return mend, err
}

// slas are what this bout is held to.
func (d *duel) slas() map[wire.Layer]time.Duration {
	out := map[wire.Layer]time.Duration{}
	for l, sla := range d.SLA {
		if d.c.knockout != nil {
			sla += d.c.knockout.grace
		}
		out[l] = sla
	}
	return out
}

// healthLook is how long a daemon may take to say how it is.
const healthLook = 300 * time.Millisecond

// degraded says what was not as it should be while the stop went on: what killswitchd's report tells, and how
// each daemon is.
func (d *duel) degraded(ctx context.Context, rep *wire.StopReport) []string {
	var out []string
	if rep != nil {
		for _, what := range rep.Degraded {
			out = append(out, "the stop's report: "+what)
		}
		for _, l := range wire.AllLayers() {
			if r, ok := rep.Layers[l]; ok && (r.State != wire.StateObserved || strings.Contains(r.Detail, "killed")) {
				out = append(out, fmt.Sprintf("the stop's report, %s layer: %s: %s", l, r.State, r.Detail))
			}
		}
	}
	for _, daemon := range instance.Daemons() {
		if why := d.ill(ctx, daemon); why != "" {
			out = append(out, daemon+": "+why)
		}
	}
	if n := d.Internet.Webhook.Held(); n > 0 {
		out = append(out, fmt.Sprintf("the receiver of alerts keeps %d requests waiting", n))
	}
	return out
}

// ill says what is wrong with a daemon, as it answers for itself.
func (d *duel) ill(ctx context.Context, daemon string) string {
	c := control.NewClient(d.Inst.Socket(daemon))
	defer c.CloseIdle()
	ctx, cancel := context.WithTimeout(ctx, healthLook)
	defer cancel()
	var h wire.Health
	if err := c.Call(ctx, "GET", "/healthz", nil, &h); err != nil {
		if ctx.Err() != nil {
			return "does not answer"
		}
		return err.Error()
	}
	return h.Warning
}

// mendWithin bounds how long daemons may take to be well again.
const mendWithin = 30 * time.Second

// waitWell waits until every daemon answers that it is well.
func (d *duel) waitWell(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, mendWithin)
	defer cancel()
	var lack string
	err := practice.Wait(ctx, "the daemons are well again", func() bool {
		for _, daemon := range instance.Daemons() {
			if lack = d.ill(ctx, daemon); lack != "" {
				lack = daemon + ": " + lack
				return false
			}
		}
		return true
	})
	if err != nil {
		return fmt.Errorf("%w: %s", err, lack)
	}
	return nil
}
