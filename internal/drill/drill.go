// Package drill times stops. It spawns a kid with an agent that resists, lets an accomplice outside replay the
// kid's stolen token, waits until all of it is really seen from outside, orders a stop, and lets observers
// outside the kid decide when it took effect: each technique of resisting, with each layer alone on a fresh kid
// and then all three together; the same with something of the box knocked out; and the same with a layer left
// out, which must fail.
//
// What killswitchd says about itself is shown and never believed: a verdict rests on the cgroup's own
// `populated 0` and on no process of the kid anywhere else, on the last byte that reached the practice internet
// and the kernel's own time of the last packet that passed, and on the last token use that a service there
// accepted. A run in which something was not seen at work before the order proves nothing and is VOID; a drill
// whose control runs do not fail proves nothing either.
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
	// Techniques are what the agent does, each in every case; nil means everything at once and nothing else.
	Techniques []Technique
	// AllTechniques says that these are all that the agent knows, for the report.
	AllTechniques bool
	// Cases are the layers that are stopped at the same time; nil means Cases(), empty none.
	Cases []Case
	// Knockouts name what is broken while everything at once is stopped; Knockouts() lists them.
	Knockouts []string
	// Controls adds the runs that must fail.
	Controls bool
	// ClockHelper is the command that holds a step of this machine's clock for a knock-out (clockstep.Hold with
	// ClockStep and ClockLimit). nil: that knock-out is not allowed.
	ClockHelper []string
	// Processes is how many processes must be seen before the order, where the technique is about their number;
	// 0 means 100.
	Processes int
	// ReadyWithin bounds the wait for the agent to be seen; 0 means 20 s.
	ReadyWithin time.Duration
	// Prefix begins the kids' names, which must be new to the Internet; empty means one that is.
	Prefix string
	// By is who runs the drill, for the report.
	By string
	// Version is tagout's own, for the report.
	Version string
	// Out gets short progress lines and the table; nil means nowhere. NoTable leaves the table to the caller.
	Out     io.Writer
	NoTable bool
	// Path is where the report is written as JSON; empty means nowhere.
	Path string
	// Box is how the daemons are reached; nil means over the instance's sockets.
	Box Box
	// Passed is when the kernel last let a packet of the session with that mark pass (CLOCK_BOOTTIME). nil: the
	// practice internet alone tells of bytes.
	Passed func(mark uint32) (time.Duration, error)

	card *card.Card
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
	return append(out, Together())
}

// Together is the case of all three layers.
func Together() Case { return Case{Name: "all together", Layers: wire.AllLayers()} }

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
	bouts, err := cfg.bouts()
	if err != nil {
		return nil, fmt.Errorf("drilling: %w", err)
	}
	rep := cfg.newReport()
	for i, b := range bouts {
		for run := 1; run <= b.runs && err == nil; run++ {
			d := &duel{Config: cfg, c: b, run: run, kid: fmt.Sprintf("%s-%d-%d", cfg.Prefix, i+1, run)}
			var res Result
			res, err = d.fight(ctx)
			rep.add(res)
			fmt.Fprintln(cfg.Out, res.Line())
		}
	}
	if err != nil {
		err = fmt.Errorf("drilling: %w", err)
	}
	rep.close(err == nil)
	if !cfg.NoTable {
		err = errors.Join(err, rep.Table(cfg.Out))
	}
	if cfg.Path != "" {
		err = errors.Join(err, rep.Write(cfg.Path))
	}
	return rep, err
}

// Kind tells the runs of a drill apart.
type Kind string

// Kinds.
const (
	KindStop     Kind = "stop"     // a technique against layers that are ordered
	KindControl  Kind = "control"  // against a layer that is judged and not ordered: it must fail
	KindKnockout Kind = "knockout" // with something of the box broken
)

// bout is one kind of run with all that makes it different from the others.
type bout struct {
	kind      Kind
	name      string
	technique Technique
	ordered   []wire.Layer
	judged    []wire.Layer
	runs      int
	knockout  *knockout
	within    time.Duration // how long what does not stop is watched
}

// bouts lists what is to be run, in order. What breaks the box for good comes last.
func (c Config) bouts() ([]bout, error) {
	var out []bout
	for _, t := range c.Techniques {
		for _, cs := range c.Cases {
			out = append(out, bout{kind: KindStop, name: cs.Name, technique: t, ordered: cs.Layers, judged: cs.Layers, runs: c.Runs, within: settleWithin})
		}
	}
	if c.Controls {
		out = append(out, controls()...)
	}
	broken, err := c.knockouts()
	return append(out, broken...), err
}

func (c Config) withDefaults() (Config, error) {
	parsed, err := card.Parse(c.CardFile, c.Card)
	if err != nil {
		return c, err
	}
	c.card = parsed
	if c.Agent == nil {
		c.Agent = []string{"/workspace/" + AgentFile, "agent"}
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
	if c.Techniques == nil {
		c.Techniques = []Technique{allAtOnce()}
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
		c.Box = Sockets(c.Inst, c.Internet)
	}
	return c, nil
}
