package main

import (
	"errors"

	"github.com/spf13/cobra"

	"tagout/internal/drill"
)

func (a *app) drillCommand() *cobra.Command {
	var bin, cardFile, report string
	cfg := drill.Config{}
	cmd := &cobra.Command{
		Use:   "drill",
		Short: "Time the stop of an agent that resists, from outside, each layer alone and all together",
		Long: `Make a box and a practice internet of their own, let an agent that resists run in it,
stop it, and let observers outside decide when each layer took effect. Nothing is left
of it afterwards. It ends with 0 only if every verdict is within the SLA.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			name := a.ownName(cmd, "drill")
			if err := errors.Join(atLeastOne("runs", cfg.Runs), atLeastOne("processes", cfg.Processes)); err != nil {
				return err
			}
			return a.withPracticeBox(cmd.Context(), name, bin, cardFile, func(p practiceBox) error {
				cfg.Inst, cfg.Internet, cfg.Card, cfg.CardFile, cfg.InputDir = p.inst, p.net, p.card, cardFile, p.inputDir
				cfg.Out, cfg.Path = a.out, report
				rep, err := drill.Run(cmd.Context(), cfg)
				if err == nil && !rep.Passed {
					err = &coded{exitIncomplete, errors.New("the drill did not pass: see the table")}
				}
				return err
			})
		},
	}
	cmd.Flags().StringVar(&bin, "bin-dir", "", "directory of the binaries (default: where tagout itself lies)")
	cmd.Flags().StringVar(&cardFile, "card", "", "the agent's card (default: the drill card that comes with tagout)")
	cmd.Flags().StringVar(&report, "json", "", "write the report to this file as JSON")
	cmd.Flags().IntVar(&cfg.Runs, "runs", 1, "how often each case is run")
	cmd.Flags().IntVar(&cfg.Processes, "processes", 100, "how many hostile processes must run before the order")
	return cmd
}

// ownName is the instance of a command that makes its own: what --instance says, or else the fallback.
func (a *app) ownName(cmd *cobra.Command, fallback string) string {
	if cmd.Flags().Changed("instance") {
		return a.instance
	}
	return fallback
}
