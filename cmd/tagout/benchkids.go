package main

import (
	"errors"

	"github.com/spf13/cobra"

	"tagout/internal/bench"
)

func (a *app) benchKidsCommand() *cobra.Command {
	var bin, out string
	var c bench.KidsConfig
	var short bool
	cmd := &cobra.Command{
		Use: "kids", Short: "Measure spawns, commands and idle kids beside runc and docker, in a box of its own", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if short { // figures of no meaning, to see that all of them can be taken
				c.Spawns, c.Execs, c.Idle, c.Parallel = 2, 3, 4, 3
			}
			err := errors.Join(atLeastOne("spawns", c.Spawns), atLeastOne("execs", c.Execs), atLeastOne("idle", c.Idle/2), atLeastOne("parallel", c.Parallel))
			if err != nil {
				return err
			}
			return a.withPracticeBox(cmd.Context(), a.ownName(cmd, "benchkids"), bin, "", func(p practiceBox) error {
				c.Inst, c.InputDir, c.Dir, c.Out = p.inst, p.inputDir, out, a.out
				_, err := bench.RunKids(cmd.Context(), c)
				return err
			})
		},
	}
	cmd.Flags().StringVar(&bin, "bin-dir", "", "directory of the binaries (default: where tagout itself lies)")
	cmd.Flags().StringVar(&out, "out", "build/bench", "directory in which kids.json is written")
	cmd.Flags().IntVar(&c.Spawns, "spawns", 100, "how many spawns are measured, and each peer's")
	cmd.Flags().IntVar(&c.Execs, "execs", 200, "how many commands in a kid are measured")
	cmd.Flags().IntVar(&c.Idle, "idle", 200, "how many kids are idle at once; at least 2")
	cmd.Flags().IntVar(&c.Parallel, "parallel", 50, "how many kids are spawned at once")
	cmd.Flags().BoolVar(&short, "short", false, "take every figure from tiny counts; they mean nothing")
	return cmd
}
