package main

import (
	"errors"

	"github.com/spf13/cobra"

	"tagout/internal/bench"
)

func (a *app) benchCommand() *cobra.Command {
	var bin, out string
	var runs, spawns int
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure what is promised, in a box of its own", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(atLeastOne("runs", runs), atLeastOne("spawns", spawns)); err != nil {
				return err
			}
			return a.withPracticeBox(cmd.Context(), a.ownName(cmd, "bench"), bin, "", func(p practiceBox) error {
				_, err := bench.Run(cmd.Context(), bench.Config{
					Inst: p.inst, Internet: p.net, Card: p.card, InputDir: p.inputDir,
					Dir: out, Out: a.out, Runs: runs, Spawns: spawns,
				})
				return err
			})
		},
	}
	cmd.AddCommand(a.benchEgressCommand(), a.benchStopCommand(), a.benchKidsCommand(), a.benchAuditCommand(), a.benchCredentialsCommand())
	cmd.Flags().StringVar(&bin, "bin-dir", "", "directory of the binaries (default: where tagout itself lies)")
	cmd.Flags().StringVar(&out, "out", "build/bench", "directory in which the figures are written as JSON")
	cmd.Flags().IntVar(&runs, "runs", 20, "how often each stop is measured")
	cmd.Flags().IntVar(&spawns, "spawns", 50, "how many spawns are measured")
	return cmd
}
