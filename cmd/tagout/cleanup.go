package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
)

func (a *app) cleanupCommand() *cobra.Command {
	var purge, check bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Kill every process of an instance and remove everything that it made, also after kill -9",
		Long: `Kill every process of an instance and remove everything that it made. The audit log,
tags, vault, CA and configuration stay unless --purge is given. With --check, only
look for what is left, print it, and end with 1 if there is anything.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := instance.CheckName(a.instance); err != nil {
				return usage(err)
			}
			what := "cleaning up instance "
			if check {
				what = "looking for leftovers of instance "
			}
			if err := needRoot(what + a.instance); err != nil {
				return err
			}
			if check {
				return a.checkLeftovers(purge)
			}
			if err := boxes().Cleanup(cmd.Context(), a.instance, purge); err != nil {
				return err
			}
			if !a.json {
				a.printf("nothing of instance %s is left%s\n", a.instance, a.kept(purge))
				return nil
			}
			return a.printJSON(map[string]any{"instance": a.instance, "leftovers": []string{}})
		},
	}
	cmd.Flags().BoolVar(&purge, "purge", false, "remove (or with --check, look for) the instance's state too")
	cmd.Flags().BoolVar(&check, "check", false, "remove nothing, only look for leftovers")
	return cmd
}

func (a *app) checkLeftovers(state bool) error {
	left, err := boxes().Leftovers(a.instance, state)
	if err != nil {
		return err
	}
	if a.json {
		if left == nil {
			left = []string{}
		}
		err = a.printJSON(map[string]any{"instance": a.instance, "leftovers": left})
	} else {
		for _, l := range left {
			a.printf("%s\n", l)
		}
	}
	if len(left) > 0 {
		flag, are := "", "are"
		if len(left) == 1 {
			are = "is"
		}
		if state {
			flag = " --purge"
		}
		err = errors.Join(err, fmt.Errorf("instance %s: %s %s left: run `tagout cleanup --instance %s%s`", a.instance, count(len(left), "thing"), are, a.instance, flag))
	}
	return err
}

// kept says what a cleanup without purge leaves, if there is any.
func (a *app) kept(purge bool) string {
	inst, err := instance.New(a.instance, 0) // the state directory follows from the name alone
	if purge || err != nil {
		return ""
	}
	if _, err := os.Stat(inst.StateDir()); err != nil {
		return ""
	}
	return fmt.Sprintf(" but its state in %s, which --purge removes", inst.StateDir())
}
