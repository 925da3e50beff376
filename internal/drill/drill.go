// Package drill times stops. It spawns a kid with an agent that resists, lets an accomplice outside replay the
// kid's stolen token, waits until all of it is really seen from outside, orders a stop, and lets observers
// outside the kid decide when it took effect: each layer alone on a fresh kid, then all three together.
//
// What killswitchd says about itself is shown and never believed: a verdict rests on the cgroup's own
// `populated 0`, on the last byte that reached the practice internet and on the last token use that a service
// there accepted. A run in which something was not seen flowing before the order proves nothing and is VOID.
//
// All times are CLOCK_MONOTONIC. The command time is taken just before the order is written to the socket, and
// an observation after it was read, so that a reported delay is never too short.
package drill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"tagout/internal/card"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// Config says what to drill. Inst, Internet and Card must be set.
type Config struct {
	Inst     instance.Instance
	Internet *practice.Internet // the box must be configured with its BoxConfig and its secret in the vault
	Card     []byte             // YAML; deploy/cards/drill.yaml
	CardFile string             // only for messages
	InputDir string             // where the card's inputs lie, with the hostile binary among them

	// Agent is the command that runs in the kid; the drill's own flags are put behind it. nil means
	// /workspace/hostile agent.
	Agent []string
	// SLA is how long each layer may take, 0 and missing meaning DefaultSLA's.
	SLA map[wire.Layer]time.Duration
	// Runs is how often each case is run; 0 means once.
	Runs int
	// Cases are the cases to run; nil means Cases().
	Cases []Case
	// Processes is how many processes must be seen before the order; 0 means 100.
	Processes int
	// ReadyWithin bounds the wait for the agent to be seen; 0 means 20 s.
	ReadyWithin time.Duration
	// Prefix begins the kids' names, which must be new to the Internet; empty means one that is.
	Prefix string
	// Out gets short progress lines and the table; nil means nowhere. NoTable leaves the table to the caller.
	Out     io.Writer
	NoTable bool
	// Path is where the report is written as JSON; empty means nowhere.
	Path string
	// Box is how the daemons are reached; nil means over the instance's sockets.
	Box Box
}

// Case is one kind of run: the layers that are ordered at the same time.
type Case struct {
	Name   string
	Layers []wire.Layer
}

// Cases returns the four cases: each layer alone, then all together.
func Cases() []Case {
	var out []Case
	for _, l := range wire.AllLayers() {
		out = append(out, Case{Name: string(l) + " alone", Layers: []wire.Layer{l}})
	}
	return append(out, Case{Name: "all together", Layers: wire.AllLayers()})
}

// DefaultSLA is what a stop against 500 hostile processes may take.
func DefaultSLA() map[wire.Layer]time.Duration {
	return map[wire.Layer]time.Duration{
		wire.LayerSession:    500 * time.Millisecond,
		wire.LayerNetwork:    50 * time.Millisecond,
		wire.LayerCredential: 50 * time.Millisecond,
	}
}

// Run runs the drill. The report is whole also where verdicts are not PASS; an error means that a kid could
// not be spawned or removed, or that the report could not be written, and then the report holds what there is.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("drilling: %w", err)
	}
	rep := &Report{Instance: cfg.Inst.Name(), Started: time.Now().UTC(), Runs: cfg.Runs, Processes: cfg.Processes}
	for i, c := range cfg.Cases {
		for run := 1; run <= cfg.Runs && err == nil; run++ {
			d := &duel{Config: cfg, c: c, run: run, kid: fmt.Sprintf("%s-%d-%d", cfg.Prefix, i+1, run)}
			var res Result
			res, err = d.fight(ctx)
			rep.Results = append(rep.Results, res)
			fmt.Fprintln(cfg.Out, res.Line())
		}
	}
	if err != nil {
		err = fmt.Errorf("drilling: %w", err)
	}
	rep.Passed = err == nil && rep.allPassed()
	if !cfg.NoTable {
		err = errors.Join(err, rep.Table(cfg.Out))
	}
	if cfg.Path != "" {
		err = errors.Join(err, rep.Write(cfg.Path))
	}
	return rep, err
}

func (c Config) withDefaults() (Config, error) {
	parsed, err := card.Parse(c.CardFile, c.Card)
	if err != nil {
		return c, err
	}
	if c.Agent == nil {
		c.Agent = []string{"/workspace/hostile", "agent"}
	}
	sla := DefaultSLA()
	for l, d := range c.SLA {
		if d > 0 {
			sla[l] = d
		}
	}
	// A card that promises more than the default is held to its promise.
	for l, d := range sla {
		if parsed.Stop.MaxTime > 0 && parsed.Stop.MaxTime < d {
			sla[l] = parsed.Stop.MaxTime
		}
	}
	c.SLA = sla
	if c.Runs == 0 {
		c.Runs = 1
	}
	if c.Cases == nil {
		c.Cases = Cases()
	}
	if c.Processes == 0 {
		c.Processes = 100
	}
	if c.ReadyWithin == 0 {
		c.ReadyWithin = 20 * time.Second
	}
	if c.Prefix == "" {
		// Observers go by the kid's name, so another drill on the same internet needs other names.
		c.Prefix = fmt.Sprintf("drill%04x", uint16(practice.Now().Milliseconds())) // wraps on purpose
	}
	if c.Out == nil {
		c.Out = io.Discard
	}
	if c.Box == nil {
		c.Box = Sockets(c.Inst)
	}
	return c, nil
}
