package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/bpf"
	"tagout/internal/config"
	"tagout/internal/drill"
	"tagout/internal/instance"
)

// drillFlags are what `tagout drill` was asked for.
type drillFlags struct {
	bin, card, dir        string
	key, passphraseFile   string
	private               string // what key holds
	techniques, knockouts []string
	short, list           bool
}

func (a *app) drillCommand() *cobra.Command {
	var f drillFlags
	var stepClock bool
	cfg := drill.Config{Controls: true}
	cmd := &cobra.Command{
		Use:   "drill",
		Short: "Time stops of an agent that resists, from outside, and with the box broken around them",
		Long: `Make a box and a practice internet of their own, let an agent that resists run in it
in every way that it knows, stop it, and let observers outside decide when each layer
took effect: each technique with each layer alone and with all together. Then the same
with a layer left out, which must fail, and with something of the box knocked out. It
ends with 0 only if every verdict is within the SLA.

With --report, a signed report is left behind: drill.json, drill.html and drill.note;
"tagout drill verify" checks it with the public key alone. "tagout drill history" lists
the drills of this machine. Nothing else is left.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if stepClock {
				if cfg.ClockHelper, err = clockHelper(); err != nil {
					return err
				}
			}
			return a.drill(cmd, f, cfg)
		},
	}
	cmd.AddCommand(a.drillVerifyCommand(), a.drillHistoryCommand(), a.holdClockCommand())
	cmd.Flags().StringVar(&f.bin, "bin-dir", "", "directory of the binaries (default: where tagout itself lies)")
	cmd.Flags().StringVar(&f.card, "card", "", "the agent's card (default: the drill card that comes with tagout)")
	cmd.Flags().StringArrayVar(&f.techniques, "technique", nil, "run this technique only; repeat for more (default: all)")
	cmd.Flags().StringArrayVar(&f.knockouts, "knockout", nil, "run this knock-out only; repeat for more, or none (default: all)")
	cmd.Flags().BoolVar(&f.list, "list", false, "list the techniques and knock-outs, and run nothing")
	cmd.Flags().BoolVar(&f.short, "short", false, "stop all layers together only, and knock nothing out unless named")
	cmd.Flags().StringVar(&f.dir, "report", "", "write drill.json, drill.html and their signature to this directory")
	cmd.Flags().StringVar(&f.key, "key", "", "sign the report with the key in this file, as made by 'tagout key new' (default: the box's drill key)")
	cmd.Flags().StringVar(&f.passphraseFile, "passphrase-file", "", "what decrypts the key")
	cmd.Flags().StringVar(&cfg.By, "by", "", "who runs the drill, for the report (default: the user)")
	cmd.Flags().IntVar(&cfg.Runs, "runs", 1, "how often each case is run")
	cmd.Flags().IntVar(&cfg.Processes, "processes", 100, "how many hostile processes must run before the order, where that is the point")
	cmd.Flags().BoolVar(&stepClock, "allow-clock-step", false, "allow a knock-out to set this machine's clock an hour forward for up to 2 s")
	return cmd
}

func (a *app) drill(cmd *cobra.Command, f drillFlags, cfg drill.Config) error {
	if err := errors.Join(atLeastOne("runs", cfg.Runs), atLeastOne("processes", cfg.Processes)); err != nil {
		return err
	}
	name := a.ownName(cmd, "drill")
	if !f.list {
		if err := mayOwn(name); err != nil {
			return err
		}
	}
	dir, err := binDir(f.bin)
	if err != nil {
		return err
	}
	all, err := drill.Techniques(cmd.Context(), filepath.Join(dir, drill.AgentFile))
	if err != nil {
		return fmt.Errorf("%w: run `make build` first", err)
	}
	if f.list {
		return a.listDrills(all)
	}
	if err := f.apply(&cfg, all); err != nil {
		return usage(err)
	}
	if cfg.By == "" {
		cfg.By = invoker()
	}
	if f.key != "" { // before the work, not after it
		if f.private, err = a.drillKey(f.key, f.passphraseFile); err != nil {
			return err
		}
	}
	stage := func(inst instance.Instance, box *config.Box) error {
		box.Leases = drill.StageLeases
		return drill.Stage(inst)
	}
	return a.withPracticeBoxOf(cmd.Context(), name, f.bin, f.card, stage, func(p practiceBox) error {
		return a.runDrill(cmd.Context(), p, f, cfg)
	})
}

// apply fills in which techniques, cases and knock-outs are run.
func (f drillFlags) apply(cfg *drill.Config, all []drill.Technique) error {
	var err error
	cfg.Techniques, err = drill.Choose(all, f.techniques)
	cfg.AllTechniques = len(f.techniques) == 0
	if f.short {
		cfg.Cases = []drill.Case{drill.Together()}
	}
	known, _ := drill.Knockouts()
	cfg.Knockouts = f.knockouts
	switch {
	case len(f.knockouts) == 0 && !f.short && len(f.techniques) == 0:
		cfg.Knockouts = known
	case slices.Equal(f.knockouts, []string{"none"}):
		cfg.Knockouts = nil
	}
	for _, k := range cfg.Knockouts {
		if !slices.Contains(known, k) {
			err = errors.Join(err, fmt.Errorf("no knock-out is called %q: use %s", k, strings.Join(known, ", ")))
		}
	}
	if len(f.knockouts) > 0 && len(f.techniques) == 0 && cfg.Knockouts != nil {
		cfg.Techniques, cfg.AllTechniques = []drill.Technique{}, false // these knock-outs alone
	}
	return err
}

func (a *app) listDrills(all []drill.Technique) error {
	names, what := drill.Knockouts()
	if a.json {
		return a.printJSON(map[string]any{"techniques": all, "knockouts": what})
	}
	t := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	for _, tech := range all {
		fmt.Fprintf(t, "technique\t%s\t%s\n", tech.Name, tech.What)
	}
	for _, n := range names {
		fmt.Fprintf(t, "knock-out\t%s\t%s\n", n, what[n])
	}
	return t.Flush()
}

func (a *app) runDrill(ctx context.Context, p practiceBox, f drillFlags, cfg drill.Config) error {
	maps, err := bpf.Open(p.inst.PinDir())
	if err != nil {
		return err
	}
	defer maps.Close()
	cfg.Passed = func(mark uint32) (time.Duration, error) {
		c, err := maps.Counters(mark)
		return c.LastPass, err
	}
	cfg.Inst, cfg.Internet, cfg.Card, cfg.CardFile, cfg.InputDir = p.inst, p.net, p.card, f.card, p.inputDir
	cfg.Out, cfg.Version, cfg.NoTable = a.out, version, a.json
	if a.json {
		cfg.Out = a.err
	}
	rep, err := drill.Run(ctx, cfg)
	if rep != nil && ctx.Err() == nil { // one that was called off is none
		err = errors.Join(err, a.keepDrill(rep, f.dir, f.private))
		if a.json {
			err = errors.Join(err, a.printJSON(rep))
		}
	}
	if err == nil && !rep.Passed {
		err = &coded{exitIncomplete, fmt.Errorf("the drill did not pass: %s: %s", rep.Verdict, rep.Why)}
	}
	return err
}

// ownName is the instance of a command that makes its own: what --instance says, or else the fallback.
func (a *app) ownName(cmd *cobra.Command, fallback string) string {
	if cmd.Flags().Changed("instance") {
		return a.instance
	}
	return fallback
}
