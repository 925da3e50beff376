package main

import (
	"errors"
	"os"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/bench"
)

func (a *app) benchAuditCommand() *cobra.Command {
	c := bench.AuditConfig{Plain: 3 * time.Second, Runs: 20}
	var short bool
	cmd := &cobra.Command{
		Use: "audit", Short: "Measure the audit logs beside an fsync for each line and beside rsyslog", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if short { // figures of no meaning, to see that all of them can be taken
				c.Records, c.View, c.Plain, c.Runs = 4000, 40_000, 100*time.Millisecond, 2
			}
			if err := errors.Join(atLeastOne("records", c.Records), atLeastOne("view", c.View)); err != nil {
				return err
			}
			if err := os.MkdirAll(c.Work, 0o755); err != nil {
				return err
			}
			c.Print = a.out
			_, err := bench.RunAudit(cmd.Context(), c)
			return err
		},
	}
	cmd.Flags().StringVar(&c.Out, "out", "build/bench", "directory in which audit.json is written")
	cmd.Flags().StringVar(&c.Work, "work", "/var/tmp", "directory for the logs that are written, on a disk like the real one; what is made there is removed")
	cmd.Flags().IntVar(&c.Records, "records", 600_000, "how many records are written and verified")
	cmd.Flags().IntVar(&c.View, "view", 2_000_000, "how many records are searched")
	cmd.Flags().BoolVar(&short, "short", false, "take every figure from tiny counts; they mean nothing")
	return cmd
}
