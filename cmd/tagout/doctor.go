package main

import (
	"github.com/spf13/cobra"
)

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Find out whether this machine can run Tagout, what is missing and how to get it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r := diagnose(cmd.Context())
			if c, ok := a.releasers(); ok {
				r.Checks = append(r.Checks, c)
			}
			if c, ok := a.imageAge(cmd.Context()); ok {
				r.Checks = append(r.Checks, c)
			}
			if c, ok := a.hostKids(cmd.Context()); ok {
				r.Checks = append(r.Checks, c)
			}
			if c, ok := a.vaultSeal(); ok {
				r.Checks = append(r.Checks, c)
			}
			if a.json {
				if err := a.printJSON(r); err != nil {
					return err
				}
			} else {
				a.printf("%s", r)
			}
			return r.Refusal()
		},
	}
}
