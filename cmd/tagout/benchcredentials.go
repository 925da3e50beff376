package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"tagout/internal/bench"
)

func (a *app) benchCredentialsCommand() *cobra.Command {
	var bin, out string
	var c bench.CredentialsConfig
	var short bool
	cmd := &cobra.Command{
		Use: "credentials", Short: "Measure what a secret costs a request, live tokens and their revocation, in a box of its own", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if short { // figures of no meaning, to see that all of them can be taken
				c.Requests, c.Tokens, c.Revokes, c.Rate, c.Kill, c.Kills = 20, 100, 10, 100, 20, 2
			}
			err := errors.Join(atLeastOne("requests", c.Requests), atLeastOne("tokens", c.Tokens), atLeastOne("revokes", c.Revokes), atLeastOne("rate", c.Rate), atLeastOne("kill", c.Kill), atLeastOne("kills", c.Kills))
			if err == nil && c.Revokes >= c.Tokens {
				err = usage(fmt.Errorf("--revokes %d: give fewer than --tokens", c.Revokes))
			}
			if err != nil {
				return err
			}
			return a.withPracticeBox(cmd.Context(), a.ownName(cmd, "benchcred"), bin, "", func(p practiceBox) error {
				c.Inst, c.InputDir, c.Dir, c.Out = p.inst, p.inputDir, out, a.out
				_, err := bench.RunCredentials(cmd.Context(), c)
				return err
			})
		},
	}
	cmd.Flags().StringVar(&bin, "bin-dir", "", "directory of the binaries (default: where tagout itself lies)")
	cmd.Flags().StringVar(&out, "out", "build/bench", "directory in which credentials.json is written")
	cmd.Flags().IntVar(&c.Requests, "requests", 2000, "how many requests carry a secret, and as many none")
	cmd.Flags().IntVar(&c.Tokens, "tokens", 10000, "how many tokens live at once")
	cmd.Flags().IntVar(&c.Revokes, "revokes", 500, "how many sessions are revoked one by one")
	cmd.Flags().IntVar(&c.Rate, "rate", 1000, "how often a second tokens are used meanwhile")
	cmd.Flags().IntVar(&c.Kill, "kill", 1000, "how many sessions are revoked at once")
	cmd.Flags().IntVar(&c.Kills, "kills", 10, "how often")
	cmd.Flags().BoolVar(&short, "short", false, "take every figure from tiny counts; they mean nothing")
	return cmd
}
