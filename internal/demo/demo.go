// Package demo runs Tagout's main job once, from a bare machine to a proven clean one, and believes nothing
// that it did not observe: eight ways out of a kid denied, logged with the process and alerted; a secret used
// and never seen, also by an ordinary client library that takes a placeholder for its key; a stop of an agent that resists, timed from outside; and nothing left at the end.
//
// It talks to the daemons over their sockets alone. What makes and removes a box comes in as functions.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"tagout/internal/config"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
)

// Config says how to run the demo. All functions must be set; each must be usable once.
type Config struct {
	Instance string    // name; made by the demo and gone after it
	BinDir   string    // holds the hostile binary and chat
	Cards    fs.FS     // holds practice.yaml, chat.yaml and drill.yaml
	Out      io.Writer // progress and tables
	Path     string    // where the report is written as JSON; empty means nowhere

	// Doctor checks the machine and writes a line a finding to w; an error means that it cannot run Tagout.
	Doctor func(ctx context.Context, w io.Writer) error
	// Setup makes the box's static parts with that configuration.
	Setup func(ctx context.Context, name string, box *config.Box) error
	// Up starts the daemons and returns when all are healthy.
	Up func(ctx context.Context, inst instance.Instance) error
	// Down ends the daemons; nil where Cleanup does it.
	Down func(ctx context.Context, inst instance.Instance) error
	// Cleanup removes the instance with all its state.
	Cleanup func(ctx context.Context, name string) error
	// Leftovers names what of the instance is still there.
	Leftovers func(ctx context.Context, name string) ([]string, error)
}

// cleanupWithin bounds the last step, which also runs when the demo is called off.
const cleanupWithin = 30 * time.Second

// show is one run of the demo.
type show struct {
	Config
	inst   instance.Instance
	net    *practice.Internet
	inputs string // directory of the kids' inputs
	rep    *Report
	ev     evidence
}

// Run runs the demo. It returns nil only if everything that it claims was observed; otherwise the error says
// what was not. The instance is cleaned up in any case.
func Run(ctx context.Context, cfg Config) error {
	s := &show{Config: cfg, rep: &Report{Instance: cfg.Instance, Started: time.Now().UTC()}}
	began := practice.Now()
	if _, err := instance.Open(cfg.Instance); err == nil {
		return fmt.Errorf("running the demo: %w", instance.Exists(cfg.Instance))
	}
	err := s.acts(ctx)
	err = errors.Join(err, s.step(context.WithoutCancel(ctx), "Cleaning up and looking for leftovers", s.cleanUp))
	s.rep.Took = practice.Now() - began
	s.rep.Claims = s.ev.judge()
	s.rep.Passed = err == nil && len(s.rep.failed()) == 0
	if err != nil {
		s.rep.Error = err.Error()
	}
	s.rep.table(cfg.Out)
	if cfg.Path != "" {
		err = errors.Join(err, s.rep.write(cfg.Path))
	}
	if failed := s.rep.failed(); err == nil && len(failed) > 0 {
		err = fmt.Errorf("%d of %d claims were not observed, the first: %s: %s", len(failed), len(s.rep.Claims), failed[0].Text, failed[0].Detail)
	}
	if err != nil {
		return fmt.Errorf("running the demo: %w", err)
	}
	return nil
}

// acts runs everything but the cleaning up; the first error ends it.
func (s *show) acts(ctx context.Context) error {
	for _, a := range []struct {
		name string
		run  func(context.Context) error
	}{
		{"Checking the machine (tagout doctor)", func(ctx context.Context) error { return s.Doctor(ctx, indent{s.Out}) }},
		{"Building a practice internet", s.buildInternet},
		{"Starting five daemons, each its own user", s.startBox},
		{"Running an untrusted script in a kid", s.escape},
		{"Asking a language model with the vendor's own client library", s.chat},
		{"Drill: stopping an agent that resists", s.drill},
	} {
		if err := s.step(ctx, a.name, a.run); err != nil {
			return err
		}
	}
	return nil
}

// step runs one numbered step, timed.
func (s *show) step(ctx context.Context, name string, run func(context.Context) error) error {
	fmt.Fprintf(s.Out, "\n[%d/7] %s\n", len(s.rep.Steps)+1, name)
	began := practice.Now()
	err := ctx.Err()
	if err == nil {
		err = run(ctx)
	}
	st := Step{Name: name, Took: practice.Now() - began, OK: err == nil}
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
		st.Error = err.Error()
		fmt.Fprintf(s.Out, "  failed: %v\n", err)
	} else {
		fmt.Fprintf(s.Out, "  done in %.1f s\n", st.Took.Seconds())
	}
	s.rep.Steps = append(s.rep.Steps, st)
	return err
}

func (s *show) drill(ctx context.Context) error {
	rep, err := drill.Run(ctx, drill.Config{
		Inst: s.inst, Internet: s.net, Card: s.ev.drillCard, CardFile: "drill.yaml", InputDir: s.inputs,
		Out: s.Out, NoTable: true, // it is shown at the end
	})
	s.rep.Drill, s.ev.drill = rep, rep
	// The agent hammered the ways out all the while: what the attacker got is counted after it.
	if err == nil {
		s.ev.contacts, s.ev.attackerBytes = s.net.Attacker.Total()
		s.ev.evilQueries = s.net.DNS.Count(practice.NameEvil)
		s.ev.attackerCounted = true
	}
	return err
}
